"""The methods of which tests let an exception escape inside the scheduler."""

from typing import Any

MAY_FAIL = (
    "core.arrive",
    "core.enqueue",
    "core.requeue",
    "core.tick",
    "core.revise",
    "core.start",
    "core.preempt",
    "core.finish",
    "core.eviction.victims_for",
    "core.eviction.worth_preempting",
    "view.prefilling",
    "view.free_seats",
    "core.waiting.peek",
    "core.waiting.remove",
    "core.running.order",
    "view.predictions",
    "predictions.reads",
    "view.needed_blocks",
)
"""As paths from the scheduler."""

COPIES_MAY_FAIL = (
    *(f"scheduler.connector.ledger.{name}" for name in ("loadable", "admitted", "take_orders")),
    *(f"scheduler.connector.ledger.{name}" for name in ("load_finished", "release")),
    *(f"worker.backend.{name}" for name in ("save", "save beside", "load", "load beside")),
    *(f"worker.backend.{name}" for name in ("finished", "saved", "take_seconds")),
    "scheduler.connector.ledger.kept.saved",
)
"""As paths from an engine with the worker in reach; `beside` its steps."""


def method_of(scheduler: Any, path: str) -> tuple[Any, str]:
    """The object and the name of the method at the end of a path."""
    *owners, name = path.split(".")
    for owner in owners:
        scheduler = getattr(scheduler, owner)
    return scheduler, name
