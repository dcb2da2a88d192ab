"""Why requests wait: splits each wait into causes that add up to it.

At any time one cause (no seat, no KV blocks, ...) keeps all waiting requests from starting. The
ledger adds up the seconds of each, by the level that got the latest seat; the growth of the sums
during a wait are its causes. What concerns one request or queue (unread, not ready, limits)
replaces them while it lasts. So only changes cost anything, not steps or waiting requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import NamedTuple
from weakref import WeakValueDictionary

from vllm_semantic_sched.policy.facts.wait import Cause, Limit, Wait, difference

_SHARED = (Cause.SEAT, Cause.KV, Cause.KV_PEAK, Cause.TOKENS, Cause.STEP, Cause.PAUSED)
_PLACE = {cause: place for place, cause in enumerate(_SHARED)}

LimitKey = tuple[int, str | None]
"""A level, and a tenant that is at its limit; None: a reservation keeps the whole level waiting."""


class Part(NamedTuple):
    """A part of a wait."""

    cause: Cause
    level: int | None  # of the request that had got the latest seat; None: none, or irrelevant
    seconds: float


class WaitLedger:
    """Adds up why requests wait, by a clock that, unlike the policy's, runs during pauses.
    `has_limits`: whether limits may keep a queue from starting. Operations are O(levels)."""

    def __init__(
        self, clock: Callable[[], float], levels: int, has_limits: Callable[[], bool]
    ) -> None:
        self.clock = clock
        self._has_limits = has_limits
        self._width = levels + 1
        self._paused = _PLACE[Cause.PAUSED] * self._width  # the last cells
        # Seconds by cause and level of the latest seat, up to `_since`.
        self._cells = array("d", bytes(8 * len(_SHARED) * self._width))
        self._cause = Cause.STEP
        self._column = 0  # of the level of the latest seat, from 1 on; 0: there was none
        self._since = clock()
        self._limits: WeakValueDictionary[LimitKey, Limit] = WeakValueDictionary()
        self._active: dict[LimitKey, Limit] = {}
        self._skipped: dict[Wait, None] = {}
        self._skipped_before: dict[Wait, None] = {}

    # What applies to all

    def because(self, cause: Cause) -> None:
        """Set what keeps waiting requests from starting, from now on."""
        if cause is not self._cause:
            self._sums()
            self._cause = cause

    def seated(self, level: int) -> None:
        """Record that a request of this level got a seat."""
        self._sums()
        self._column = level + 1

    def limit(self, limited: Iterable[LimitKey]) -> None:
        """Set which queues a limit keeps from starting, from now on."""
        keys = set(limited)
        if keys == self._active.keys():
            return
        now = self._sums()[:]
        for key in self._active.keys() - keys:
            ended = self._active.pop(key)
            ended.cells = ended.total(now)
            ended.since = None
        for key in keys - self._active.keys():
            begun = self._limit(key)
            begun.since = now
            self._active[key] = begun

    @property
    def has_skipped(self) -> bool:
        """Whether a request was not ready in this step or the one before."""
        return bool(self._skipped) or bool(self._skipped_before)

    def end_step(self) -> None:
        """Note which requests, not ready in the step before, were ready in this one."""
        for wait in self._skipped_before:
            if wait not in self._skipped:
                self.split(wait)
        self._skipped_before = self._skipped
        self._skipped = {}

    # One request

    def begin(self, level: int, tenant: str) -> Wait:
        """A request begins to wait."""
        wait = Wait(level, tenant)
        self._open(wait)
        return wait

    def split(self, wait: Wait, cause: Cause | None = None) -> None:
        """End a stretch of a wait and begin the next one. `cause`: of the whole stretch; None: what
        the ledger has recorded."""
        self._close(wait, cause)
        self._open(wait)

    def skip(self, wait: Wait, lasting: bool = False) -> None:
        """The engine found a request not ready: in this step or, `lasting`, until it starts."""
        if wait.override is None:
            self.split(wait)
            wait.override = Cause.NOT_READY
        wait.lasting = wait.lasting or lasting
        if not lasting:
            self._skipped[wait] = None

    def ready(self, wait: Wait) -> None:
        """The engine could admit a request that it had found not ready."""
        wait.lasting = False
        self.split(wait)

    def end(self, wait: Wait) -> list[Part]:
        """The parts of a wait that is over."""
        self._close(wait, None)
        self._skipped.pop(wait, None)
        self._skipped_before.pop(wait, None)
        return [Part(*key, seconds) for key, seconds in wait.parts.items() if seconds > 1e-9]

    def _open(self, wait: Wait) -> None:
        now = self._sums()[:]
        wait.cells = now
        wait.limits = []
        wait.override = Cause.NOT_READY if wait.lasting else None
        if self._has_limits() or self._active:
            reservation = self._limit((wait.level, None))
            wait.limits.append((Cause.RESERVATION, reservation, reservation.total(now)))
            tenant = self._limit((wait.level, wait.tenant))
            wait.limits.append((Cause.TENANT, tenant, tenant.total(now)))

    def _close(self, wait: Wait, cause: Cause | None) -> None:
        """Add the seconds of a stretch to the parts of a wait. A pause stays a pause, whatever else
        applied; the rest belongs to the cause of the whole stretch or, if there is none, first to
        the limits and then to what kept all requests waiting."""
        now = self._sums()
        stretch = difference(now, wait.cells)
        rest = stretch[: self._paused]
        paused = stretch[self._paused :]
        whole = cause or wait.override
        if whole is not None:
            wait.parts[whole, None] += sum(rest)
            rest = [0.0] * len(rest)
        else:
            for kind, limit, before in wait.limits:
                limited = difference(limit.total(now), before)[: self._paused]
                wait.parts[kind, None] += sum(limited)
                rest = difference(rest, limited)
        for place, seconds in enumerate([*rest, *paused]):
            if not seconds:
                continue
            row, column = divmod(place, self._width)
            kind = _SHARED[row]
            level = None
            if column > 0 and kind is not Cause.STEP and kind is not Cause.PAUSED:
                level = column - 1
            wait.parts[kind, level] += seconds

    def _limit(self, key: LimitKey) -> Limit:
        limit = self._limits.get(key)
        if limit is None:
            limit = Limit(array("d", bytes(8 * len(self._cells))))
            self._limits[key] = limit
        return limit

    def _sums(self) -> array[float]:
        now = self.clock()
        self._cells[_PLACE[self._cause] * self._width + self._column] += now - self._since
        self._since = now
        return self._cells
