"""Orders that a test gives in place of the policy."""

from typing import Any

from vllm_semantic_sched.policy import step


def preempt(scheduler: Any, request: Any, reason: str = "urgent") -> None:
    """Preempt a running request of a `SemanticScheduler` between two steps."""
    decisions = step._Step(scheduler.core, scheduler.snapshot(), scheduler.clock())
    with scheduler.guard("room"):
        decisions.preempt(scheduler.jobs[request.request_id], reason)
    scheduler.applier.apply(decisions.orders)
