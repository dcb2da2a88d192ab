"""The real servers of a module."""

import pytest

# The engine is forked from the server: one import of vLLM less, which takes as long as the rest of
# a start. `vllm serve` by itself spawns it.
ENVIRONMENT = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}


@pytest.fixture(scope="module")
def serve(model, tmp_path_factory, nursery):
    """Starts servers: `serve(*arguments, **ServerConfig fields)`, with `ENVIRONMENT` unless theirs
    says otherwise; they are stopped after the last test of the module. With `by_command`, each
    import is made anew, as where a user starts the server."""
    from contextlib import ExitStack
    from unittest.mock import patch

    from vllm_semantic_sched.lab.bench import server
    from vllm_semantic_sched.lab.bench.server import ServerConfig, VllmServer

    with ExitStack() as servers:

        def start(*arguments: str, by_command: bool = False, **fields) -> VllmServer:
            log = tmp_path_factory.mktemp("logs") / "server.log"
            fields = {"model": model, "log": log, "scheduler_args": arguments} | fields
            if by_command:
                return servers.enter_context(VllmServer(ServerConfig(**fields)))
            fields["environment"] = ENVIRONMENT | fields.get("environment", {})
            with patch.object(server, "subprocess", nursery):
                return servers.enter_context(VllmServer(ServerConfig(**fields)))

        yield start
