"""vLLM's scheduler and ours without a model, for `engine_steps`."""

from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_semantic_sched import SemanticScheduler
from vllm_semantic_sched.engine.kv.ledger import HostPool
from vllm_semantic_sched.lab.bench.standalone import build_scheduler

# Steps take no time here, so the profile is better left as it is.
HINTS_ONLY = "predictor: {enabled: false}\ncorrect_profile: false\n"


def build_ours(
    folder: Path, text: str = "", hints_only: bool = True, host_blocks: int = 0, **options: Any
) -> SemanticScheduler:
    """Ours under a policy of such text, whose file is written to a folder. `host_blocks`: size of
    the host pool."""
    path = folder / "policy.yaml"
    path.write_text((HINTS_ONLY if hints_only else "correct_profile: false\n") + text)
    scheduler = build_scheduler(SemanticScheduler, semantic_sched={"policy": str(path)}, **options)
    assert isinstance(scheduler, SemanticScheduler)
    if scheduler.preemptions.connector is not None:
        scheduler.preemptions.connector.ledger.pool = HostPool(host_blocks)
    return scheduler


def build_vllms(**options: Any) -> Scheduler:
    """vLLM's own: first come, first served unless `policy="priority"`."""
    asynchronous = options.get("async_scheduling", False)
    return build_scheduler(AsyncScheduler if asynchronous else Scheduler, **options)
