"""The real servers of a module."""

import pytest


@pytest.fixture(scope="module")
def serve(model, tmp_path_factory):
    """Starts servers: `serve(*arguments, **ServerConfig fields)`; they are stopped after the last
    test of the module."""
    from contextlib import ExitStack

    from vllm_semantic_sched.lab.bench.server import ServerConfig, VllmServer

    with ExitStack() as servers:

        def start(*arguments: str, **fields) -> VllmServer:
            log = tmp_path_factory.mktemp("logs") / "server.log"
            fields = {"model": model, "log": log, "scheduler_args": arguments} | fields
            return servers.enter_context(VllmServer(ServerConfig(**fields)))

        yield start
