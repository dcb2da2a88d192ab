"""Reads a server's /metrics page, waits for conditions, and makes room for answers without end."""

import time
from collections.abc import Callable

from vllm_semantic_sched.lab.bench.server import ServerConfig, VllmServer

UNENDING = 16_000
"""Tokens of an answer that outlasts any test. A shorter one can end before its test does when the
machine is busy."""


def room_for(tokens: int, seats: int) -> tuple[tuple[str, str], int]:
    """The arguments of a server whose requests may have so many tokens, and the KV blocks that
    such a request on every seat needs."""
    block = ServerConfig.block_size
    longest = f'{{"max_position_embeddings": {tokens + block}}}'
    return ("--hf-overrides", longest), seats * (tokens // block + 1)


def page_value(server: VllmServer, name: str, **labels: str) -> float:
    """A value on /metrics, summed over labels that are not given."""
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in server.get_text("/metrics").splitlines()
        if line.startswith(name + "{") and all(f'{k}="{v}"' in line for k, v in labels.items())
    )


def wait_until(
    condition: Callable[[], object], seconds: float = 120.0, pause: float = 0.05
) -> None:
    """Poll, with pauses, until the condition holds; fails after a time limit in seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(pause)
