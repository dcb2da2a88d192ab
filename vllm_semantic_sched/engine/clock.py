"""The clock of everything that the policy measures."""

from __future__ import annotations

import time
from collections.abc import Callable


class ServiceClock:
    """Seconds during which the engine was serving: the monotonic clock, which no change of the
    date moves, less pauses. A request does not grow old, and no queue timeout or deadline comes
    nearer, while an operator holds the queue.

    Args:
        seconds: the clock behind it.
    """

    def __init__(self, seconds: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._paused = 0.0  # seconds, in all
        self._since: float | None = None

    def __call__(self) -> float:
        """Now; comparable with other readings of this clock only."""
        running_until = self._seconds() if self._since is None else self._since
        return running_until - self._paused

    def pause(self) -> None:
        """Stand still; nothing if it does."""
        if self._since is None:
            self._since = self._seconds()

    def resume(self) -> None:
        """Go on; nothing if it does."""
        if self._since is not None:
            self._paused += self._seconds() - self._since
            self._since = None
