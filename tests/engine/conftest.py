"""A small model, and the real servers of a module."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A small random-weight model with a real tokenizer."""
    from vllm_semantic_sched.bench.tiny_model import make_model

    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return folder


@pytest.fixture(scope="module")
def serve(model, tmp_path_factory):
    """Starts servers: `serve(*arguments, **ServerConfig fields)`; they are stopped after the last
    test of the module."""
    from contextlib import ExitStack

    from vllm_semantic_sched.bench.server import ServerConfig, VllmServer

    with ExitStack() as servers:

        def start(*arguments: str, **fields) -> VllmServer:
            log = tmp_path_factory.mktemp("logs") / "server.log"
            fields = {"model": model, "log": log, "scheduler_args": arguments} | fields
            return servers.enter_context(VllmServer(ServerConfig(**fields)))

        yield start
