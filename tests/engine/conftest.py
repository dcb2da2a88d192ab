"""The real servers of a module."""

import pytest

# The server's processes are forked: an import of vLLM less for each, which takes as long as the
# rest of a start. `vllm serve` by itself spawns them, as does the one of test_server.py.
ENVIRONMENT = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}


@pytest.fixture(scope="module")
def serve(model, tmp_path_factory, nursery):
    """Starts servers: `serve(*arguments, **ServerConfig fields)`, with `ENVIRONMENT` unless theirs
    says otherwise, and KV for requests of `longest` tokens on every seat; they are stopped after
    the last test of the module."""
    from contextlib import ExitStack
    from unittest.mock import patch

    from metrics_page import room_for

    from vllm_semantic_sched.lab.bench import server
    from vllm_semantic_sched.lab.bench.server import ServerConfig, VllmServer

    with ExitStack() as servers:

        def start(*arguments: str, longest: int = 0, **fields) -> VllmServer:
            log = tmp_path_factory.mktemp("logs") / "server.log"
            if longest:
                room, fields["num_blocks"] = room_for(longest, fields["seats"])
                arguments += room
            fields = {"model": model, "log": log, "scheduler_args": arguments} | fields
            fields["environment"] = ENVIRONMENT | fields.get("environment", {})
            with patch.object(server, "subprocess", nursery):
                return servers.enter_context(VllmServer(ServerConfig(**fields)))

        yield start
