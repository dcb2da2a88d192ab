"""Polls a running server, and carries out an operator's actions on it."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from vllm_semantic_sched.operate.client import AdminClient, AdminError, abandon_pause
from vllm_semantic_sched.operate.figures import Figures, Interval, Page, add_page, compute

_TIMEOUT = 5.0  # seconds for one page; a busy server answers late


@dataclass(frozen=True)
class ServerState:
    """A server's last answer."""

    url: str
    figures: Figures | None = None
    error: str | None = None  # why there are no figures, or why they are empty
    paused: bool | None = None  # whether an engine is paused; None: not known
    locked: str | None = None  # why the operator's endpoints are closed, if they are
    interval: Interval | None = None  # that of the figures

    @property
    def open(self) -> bool:
        """Whether the server takes an operator's actions."""
        return self.figures is not None and self.locked is None

    def as_json(self) -> dict[str, Any]:
        """Plain values, named as the attributes."""
        fields = {name: value for name, value in vars(self).items() if name != "interval"}
        return fields | {"figures": self.figures and asdict(self.figures)}


class ServerWatch:
    """One server. `poll`, which sets `state`, and the actions may run on different threads."""

    def __init__(self, client: AdminClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._pages: deque[Page] = deque()
        self._pausing = False
        self.state = ServerState(client.url, error="not read yet")

    def poll(self) -> ServerState:
        """Read the server's metrics and status. Never raises because of the server."""
        url = self._client.url
        try:
            page = Page(self._client.send("/metrics", timeout=_TIMEOUT), self._clock())
        except (AdminError, ValueError) as error:
            self.state = ServerState(url, error=str(error).removeprefix(f"{url}: "))
            return self.state
        interval = add_page(self._pages, page)
        note = None if page else "no scheduler metrics; they begin with the first request"
        paused = locked = None
        try:
            paused = any(engine.get("paused") for engine in self._client.status(timeout=_TIMEOUT))
        except AdminError as refusal:
            locked = str(refusal)
        self.state = ServerState(url, compute([interval]), note, paused, locked, interval)
        return self.state

    def pause(self) -> str:
        """Start no more requests, and wait for the running ones. AdminError if it refuses."""
        self._pausing = True
        try:
            self._client.post("/pause", mode="wait")
        finally:
            self._pausing = False
        return "no request is running any more"

    def resume(self) -> str:
        """Resume, also if a `pause` still waits. See `pause`."""
        if self._pausing:
            abandon_pause(self._client)
        else:
            self._client.post("/resume")
        return "resumed"

    def reload(self) -> str:
        """Make the server read its policy file again. See `pause`."""
        reports = self._client.post("/policy/reload")["engines"]
        results = sorted({f"{report['result']}, version {report['version']}" for report in reports})
        return "policy " + "; ".join(results)
