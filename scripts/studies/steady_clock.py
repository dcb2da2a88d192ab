"""A clock on which work takes the same time when the speed of the machine changes."""

import time
from collections import deque
from collections.abc import Callable
from statistics import median

# Number of measured speeds. The clock uses their median, which one interruption does not change.
_RECENT = 15
# Operands of a matrix product, which is most of the work of an engine on a CPU. It takes a tenth of
# a small model's step and, like a model, is larger than a core's own caches.
_ROWS, _WIDTH = 8, 2048


class SteadyClock:
    """CPU time of this process in seconds, corrected for changes of the machine's speed.

    A virtual machine may be a third slower than minutes before, because others share its
    processor. The clock repeats the same piece of work and slows down by as much as that takes
    longer. CPU time of other programs and of this work does not count.

    Args:
        unit: seconds that the work takes at the reference speed; by default what it takes now.
            Clocks of several processes with the same `unit` agree.
        work: the work to repeat; by default a matrix product.
        cpu_seconds: returns this process's CPU time.

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
        for _ in range(2 * _RECENT):  # the first runs are slower
            self._measure()
        self.unit = median(self._recent) if unit is None else unit
        self._passed = 0.0
        self._set_pace()

    def now(self) -> float:
        """Return the seconds since the clock was created."""
        return self._passed + (self._cpu_seconds() - self._since) / self._pace

    def skip(self, seconds: float) -> None:
        """Advance the clock by that many seconds."""
        self._passed += seconds

    def adjust(self) -> None:
        """Measure the current speed of the machine and use it from now on."""
        self._passed = self.now()
        self._measure()
        self._set_pace()

    def _set_pace(self) -> None:
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
