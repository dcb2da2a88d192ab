"""Fairness among tenants within a level, and a cap on their requests at the top levels.

Fairness follows virtual token counters (Sheng et al. 2024, Fairness in Serving Large Language
Models, algorithm 2), counted in engine seconds: within a level the tenant with the least service is
next, and a tenant that returns after a pause gets no credit for it. While two tenants both wait at
a level, their counters differ by at most U = P + m D, and their service over any such time by 2 U:
P is the engine time of the longest prefill, m the seats, D the engine time of the longest decode.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_semantic_sched.policy.config.reference import PolicyRef
from vllm_semantic_sched.policy.facts.heap import AddressableHeap
from vllm_semantic_sched.policy.facts.lately import SlidingWindow

ANONYMOUS = ""

_MOST_TENANTS = 4096  # remembered while they have no request
_SLICES = 8  # of the sliding window
_WINDOW = 60.0  # seconds of it
_TOP_LEVELS = 1  # levels that count as top, from 0 on
_ALLOWANCE = 5  # top-level requests in the window that every tenant may have


class VirtualCounters:
    """Service of tenants at one level; `len` counts the waiting ones. Those that do not wait are
    remembered up to `_MOST_TENANTS`, the latest."""

    def __init__(self) -> None:
        self._waiting: AddressableHeap[str] = AddressableHeap()  # tenants by their counters
        self._counters: OrderedDict[str, float] = OrderedDict()
        self._left_last = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def __getitem__(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def enter(self, tenant: str) -> None:
        """Add a waiting tenant; its counter is at least the lowest, or that of the last one."""
        if tenant in self._waiting:
            return
        least = self._waiting.peek()
        floor = self._left_last if least is None else self._counters[least]
        counter = max(self._counters.get(tenant, floor), floor)
        self._counters[tenant] = counter
        self._counters.move_to_end(tenant)
        self._waiting.push(tenant, counter)

    def leave(self, tenant: str) -> None:
        """Record that a tenant's last waiting job is gone; its counter is kept for its return."""
        if self._waiting.discard(tenant):
            self._left_last = self._counters[tenant]
            while len(self._counters) > _MOST_TENANTS + len(self._waiting):
                oldest = next(iter(self._counters))
                if oldest in self._waiting:
                    self._counters.move_to_end(oldest)
                else:
                    del self._counters[oldest]

    def charge(self, tenant: str, seconds: float) -> None:
        """Charge service to a tenant; negative to refund."""
        if tenant in self._counters:
            self._counters[tenant] += seconds
            if tenant in self._waiting:
                self._waiting.push(tenant, self._counters[tenant])

    def ordered(self) -> Iterator[tuple[float, str]]:
        """Counters and names of the waiting tenants, the least served first, lazily."""
        return self._waiting.ordered()


@dataclass(slots=True)
class _Requests:
    """Numbers of requests in a slice of the window."""

    all: int = 0
    top: int = 0  # at a top level


class TopLevelGuard:
    """Limits the share of a tenant's requests at the top levels, if the policy caps it."""

    def __init__(self, ref: PolicyRef) -> None:
        self._ref = ref
        self.count = 0  # requests moved down so far
        self._windows: OrderedDict[str, SlidingWindow[_Requests]] = OrderedDict()

    def level(
        self, tenant: str, level: int, lowest: int, now: float, before: int | None = None
    ) -> int:
        """The level at which a request with a hinted or predicted `level` is served; `lowest`: the
        least urgent level, `before`: its level so far, if it has been counted."""
        if lowest < _TOP_LEVELS:
            return level
        window = self._windows.get(tenant)
        if window is None:
            window = self._windows[tenant] = SlidingWindow(_WINDOW, _SLICES, _Requests)
        self._windows.move_to_end(tenant)
        if len(self._windows) > _MOST_TENANTS:
            self._windows.popitem(last=False)
        window.advance(now)
        at_top = level < _TOP_LEVELS
        if before is not None and before < _TOP_LEVELS:  # it has its place among the top
            if not at_top:
                _lower_one(window)
            return level
        top = sum(requests.top for requests in window) + 1
        count = sum(requests.all for requests in window) + (before is None)
        fits = top <= max(_ALLOWANCE, self._ref.policy.tenants.top.share * count)
        newest, _ = window.newest(now)
        newest.all += before is None
        newest.top += at_top and fits
        if at_top and not fits:
            self.count += 1
            return _TOP_LEVELS
        return level


def _lower_one(window: SlidingWindow[_Requests]) -> None:
    """Count the latest request at a top level below these."""
    latest = next((requests for requests in reversed([*window]) if requests.top), None)
    if latest is not None:
        latest.top -= 1
