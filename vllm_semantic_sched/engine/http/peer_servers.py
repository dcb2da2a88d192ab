"""What the API servers of one `vllm serve` know of each other, in memory that they share: vLLM
starts as many as engines, and each sees only its own requests."""

import hashlib
import mmap
import os
from pathlib import Path

import numpy as np

from vllm_semantic_sched.engine import vllm_api
from vllm_semantic_sched.engine.guard import logger
from vllm_semantic_sched.policy.config.private_files import own_folder
from vllm_semantic_sched.policy.sessions import SessionKey

# Sessions whose engines the servers tell each other, each at a place by its hash. Another session
# at the same place overwrites it: then each server remembers its own requests only.
_SESSIONS = 2**14
# One number holds all that is known of a session, so that it is read and written as a whole: from
# the highest bit on, 31 bits of its hash, the second, and the engine counted from 1.
_SECONDS = 2**20  # twelve days
_ENGINES = 2**12


class PeerServers:
    """The requests that each API server has at each engine, the engine of each session, and how
    often one of them has reloaded the policy, in a file that all of them map and the last one
    removes. They write number by number, and each its own counts only, so no lock is needed; those
    of the others may be a moment old."""

    def __init__(self, path: Path, servers: int, rank: int, engines: int, levels: int) -> None:
        self.shape = engines, levels
        requests = servers * engines * levels
        count = 1 + servers + requests + _SESSIONS
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if os.fstat(file).st_size < 8 * count:  # never shorter: others have mapped it
                os.ftruncate(file, 8 * count)
            numbers = np.frombuffer(mmap.mmap(file, 8 * count), dtype=np.int64)
        finally:
            os.close(file)
        parts = np.split(numbers, [1, 1 + servers, 1 + servers + requests])
        self._reloads, joined, ahead, self._homes = parts
        self._seen = int(self._reloads[0])
        # By server, engine and level: requests at least as urgent as that level.
        self._ahead = ahead.reshape(servers, engines, levels)
        self._own = self._ahead[rank]
        joined[rank] = 1
        if joined.all():
            path.unlink(missing_ok=True)

    def add(self, engine: int, level: int, requests: int) -> None:
        """Count requests that this server has sent; negative: that have ended."""
        self._own[engine, level:] += requests

    def others(self) -> list[list[int]]:
        """By engine and level: the other servers' requests at least as urgent as that level."""
        ahead: list[list[int]] = (self._ahead.sum(axis=0) - self._own).tolist()
        return ahead

    def home(self, session: SessionKey, now: float, memory: float) -> int | None:
        """The engine to which one of the servers has sent a session last; None if that is unknown,
        or more than `memory` seconds ago. `now`: seconds on a clock that they share."""
        place, mark = _place_of(session)
        rest, engine = divmod(int(self._homes[place]), _ENGINES)
        known, second = divmod(rest, _SECONDS)
        age = (int(now) - second) % _SECONDS
        return engine - 1 if engine and known == mark and age <= memory else None

    def move(self, session: SessionKey, engine: int, now: float) -> None:
        """Tell the others to which engine this server sends a session."""
        place, mark = _place_of(session)
        second = int(now) % _SECONDS
        self._homes[place] = (mark * _SECONDS + second) * _ENGINES + engine + 1

    def tell_reload(self) -> None:
        """Record a reload of this server; `has_reload` of each other server is true once."""
        self._reloads += 1
        self._seen = int(self._reloads[0])

    def has_reload(self) -> bool:
        """Whether another server has told of a reload since the last call."""
        before, self._seen = self._seen, int(self._reloads[0])
        return self._seen != before


def _place_of(session: SessionKey) -> tuple[int, int]:
    """The place of a session in the table, and the mark that tells it from others there."""
    digest = hashlib.blake2b(repr(session).encode(), digest_size=8).digest()
    mark, place = divmod(int.from_bytes(digest, "big") % 2**45, _SESSIONS)
    return place, mark


def join_peers(vllm_config: vllm_api.VllmConfig, levels: int) -> PeerServers | None:
    """Share memory with the other API servers; None if there are none, or it cannot be shared."""
    rank, servers = vllm_api.api_servers(vllm_config)
    if servers < 2:
        return None
    try:
        folder = own_folder()
        if folder is None:
            raise PermissionError("the folder for it belongs to somebody else")
        parent = os.getppid()  # vLLM starts all of them from one process
        # When it started, in clock ticks since the machine did: no change of the clock moves it.
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
        path, engines = folder / f"{parent}-{started}.counts", vllm_api.engine_count(vllm_config)
        return PeerServers(path, servers, rank, engines, levels)
    except (OSError, ValueError) as error:
        logger.warning(
            "Semantic scheduling: the %d API servers share no memory (%s): each chooses engines by "
            "its own requests only, and a reload changes the rules of the one that got it.",
            servers,
            error,
        )
        return None
