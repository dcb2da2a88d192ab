"""The methods of which tests let an exception escape inside the scheduler."""

from typing import Any

from vllm_semantic_sched.engine import vllm_api

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
    "vllm_api.running_prefills",
    "vllm_api.free_seats",
    "vllm_api.freeable_blocks",
    "core.waiting.peek",
    "core.waiting.remove",
    "core.running.order",
    "predictions.drain",
    "predictions.reads",
    "vllm_api.blocks_needed",
    "applier.apply",
    "applier.gate.returning",
    "preemptions.evict",
)
"""As paths from the scheduler; those of `vllm_api` are what a snapshot asks of vLLM."""

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
    if owners[-1] == "vllm_api":
        return vllm_api, name
    for owner in owners:
        scheduler = getattr(scheduler, owner)
    return scheduler, name
