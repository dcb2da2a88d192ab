"""A request's wait: why it waits, and since when."""

from __future__ import annotations

import enum
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

Cells = Sequence[float]
"""Seconds by cause and level, see `record.waits`."""


class Cause(enum.Enum):
    """Why a request waits; the values appear in the event log."""

    # Of all waiting requests
    SEAT = "seat"  # every seat is taken
    KV = "kv"  # the next request's KV does not fit
    KV_PEAK = "kv_peak"  # running requests are predicted to need the KV (`kv_peak`)
    TOKENS = "tokens"  # the step's tokens went to others, or vLLM preempted in it
    STEP = "step"  # there was room; the step under way had not ended
    PAUSED = "paused"  # an operator had paused the engine
    # Of some
    TENANT = "tenant"  # its tenant's limit
    RESERVATION = "reservation"  # the room is reserved for more urgent tiers
    UNREAD = "unread"  # its text was unread, and turned out to be more urgent
    NOT_READY = "not_ready"  # its grammar, adapter, KV or input was not ready


@dataclass(slots=True, weakref_slot=True, eq=False)
class Limit:
    """The seconds of each cell in which a limit applied, while a request or the ledger needs it."""

    cells: Cells
    since: Cells | None = None

    def total(self, now: Cells) -> Cells:
        """Seconds of each cell up to now; `now`: the ledger's sums."""
        if self.since is None:
            return self.cells
        return array("d", map(sum, zip(self.cells, difference(now, self.since), strict=True)))


@dataclass(slots=True, eq=False)
class Wait:
    """The wait of one request, while it lasts."""

    level: int
    tenant: str
    cells: Cells = ()  # the ledger's sums when the present stretch began
    limits: list[tuple[Cause, Limit, Cells]] = field(default_factory=list)  # and theirs then
    override: Cause | None = None  # cause of the whole stretch
    lasting: bool = False  # whether it is that of all later stretches, too
    # Seconds of earlier stretches.
    parts: defaultdict[tuple[Cause, int | None], float] = field(
        default_factory=lambda: defaultdict(float)
    )


def difference(cells: Cells, earlier: Cells) -> list[float]:
    """Seconds of each cell that were added since its `earlier` value."""
    return [after - before for after, before in zip(cells, earlier, strict=True)]
