"""A clock that goes as fast as the machine does: the time that work takes on it stays the same when
the machine changes its speed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

# Of measured speeds: the clock goes by their median, which one interruption does not move.
_RECENT = 15
# Operands of a matrix product: what an engine computes on a CPU is mostly that. A tenth of a small
# model's step; larger than the caches that a core has for itself, as a model is.
_ROWS, _WIDTH = 8, 2048


class SteadyClock:
    """Seconds of CPU time of this process on a machine of unchanging speed.

    A virtual machine may be a third slower than minutes before, as others share its processor. The
    clock does the same work again and again, and goes slower by as much as that takes longer. So
    what other programs take of the machine does not count either; nor does this work.

    Args:
        unit: seconds that the work takes at the speed that is meant; what it takes now if not
            given. Clocks of several processes with one `unit` agree.
        work: what is done; a matrix product by default.
        cpu_seconds: this process's CPU time.

    Attributes:
        unit: see above.
    """

    def __init__(
        self,
        unit: float | None = None,
        work: Callable[[], object] | None = None,
        cpu_seconds: Callable[[], float] = time.process_time,
    ) -> None:
        self._work = work or _matrix_product()
        self._cpu_seconds = cpu_seconds
        self._recent: deque[float] = deque(maxlen=_RECENT)
        for _ in range(2 * _RECENT):  # the first are slower
            self._measure()
        self.unit = median(self._recent) if unit is None else unit
        self._passed = 0.0
        self._go_on()

    def now(self) -> float:
        """Seconds since the clock was made."""
        return self._passed + (self._cpu_seconds() - self._since) / self._pace

    def skip(self, seconds: float) -> None:
        """Go on by that many seconds at once."""
        self._passed += seconds

    def adjust(self) -> None:
        """Look how fast the machine is now."""
        self._passed = self.now()
        self._measure()
        self._go_on()

    def _go_on(self) -> None:
        """From now on at the speed that was measured last."""
        self._pace = median(self._recent) / self.unit
        self._since = self._cpu_seconds()

    def _measure(self) -> None:
        start = self._cpu_seconds()
        self._work()
        self._recent.append(self._cpu_seconds() - start)


def _matrix_product() -> Callable[[], object]:
    import torch

    left, right = torch.rand(_ROWS, _WIDTH), torch.rand(_WIDTH, _WIDTH)
    return lambda: left @ right
