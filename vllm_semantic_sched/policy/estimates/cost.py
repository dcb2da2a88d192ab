"""What a job still costs, and what keeping or rebuilding its KV costs, in seconds."""

from __future__ import annotations

from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.facts.profile import EngineProfile


def remaining_seconds(job: Job, expected_output: float, profile: EngineProfile) -> float:
    """Engine time that a job still needs: load, prefill of what has no KV, decode (P2).

    Args:
        expected_output: output tokens in all, above `job.generated`.
    """
    in_place = job.computed + job.swapped
    # The newest token of a decoding job has no KV yet; decoding it is not a prefill.
    pending = job.tokens - in_place
    prefill = profile.prefill(in_place, job.tokens) if pending > 1 else 0.0
    return (
        profile.load(job.swapped)
        + prefill
        + profile.decode(job.tokens, expected_output - job.generated)
    )


def loads_beside_steps(tokens: int, profile: EngineProfile, max_stall: float) -> bool:
    """Whether KV is loaded while the engine goes on, because loading it before a step would hold
    that step up for too long.

    Args:
        max_stall: what is not too long, in decode steps.
    """
    return profile.load(tokens) > max_stall * profile.gamma2


def resume_seconds(
    on_device: int, kept_to: int, held: int, profile: EngineProfile, max_stall: float
) -> float:
    """Seconds that a preempted job needs to be where it was, once it has a seat again.

    Args:
        on_device: first tokens of the job, whose KV is still on the device.
        kept_to: the KV of tokens `on_device` to `kept_to` is on the host.
        held: the rest up to here is computed again, in one prefill, as vLLM does.
        max_stall: see `loads_beside_steps`; such a load costs one step more.
    """
    loaded = kept_to - on_device
    seconds = profile.load(loaded) + profile.prefill(kept_to, held)
    if loads_beside_steps(loaded, profile, max_stall):
        seconds += profile.gamma2
    return seconds


def starting_over_seconds(job: Job, profile: EngineProfile) -> float:
    """Engine time that a job has taken so far, and would take again if its client sent it anew."""
    return profile.prefill(0, min(job.computed, job.prompt_tokens)) + profile.decode(
        job.prompt_tokens, job.generated
    )
