"""A small model and real servers, started once for all tests that use them."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A small random-weight model with a real tokenizer."""
    from vllm_semantic_sched.bench.tiny_model import make_model

    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return folder


@pytest.fixture(scope="session")
def serve(model, tmp_path_factory):
    """Starts servers: `serve(name, *arguments, **ServerConfig fields)`; all are stopped at the
    end of the session."""
    from vllm_semantic_sched.bench.server import ServerConfig, VllmServer

    servers: dict[str, VllmServer] = {}

    def start(name: str, *arguments: str, **fields) -> VllmServer:
        if name not in servers:
            log = tmp_path_factory.mktemp("logs") / f"{name}.log"
            fields = {"model": model, "log": log, "scheduler_args": arguments} | fields
            config = ServerConfig(**fields)
            servers[name] = VllmServer(config).__enter__()
        servers[name].check()
        return servers[name]

    yield start
    for server in servers.values():
        server.stop()
