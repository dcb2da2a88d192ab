"""Costs in seconds of keeping or rebuilding the KV of a job, and of ending it."""

from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.profile.formula import EngineProfile

# Decode steps by which a load of KV may delay the next step. A load beside the steps costs its
# request one step more, so that a shorter one is cheaper before a step.
MAX_STALL = 1.0


def loads_beside_steps(tokens: int, profile: EngineProfile) -> bool:
    """Whether KV is loaded beside the engine's steps: before one, it would delay that by more than
    `MAX_STALL` decode steps."""
    return profile.load(tokens) > MAX_STALL * profile.gamma2


def resume_seconds(on_device: int, kept_to: int, held: int, profile: EngineProfile) -> float:
    """Seconds to restore a preempted job after it got a seat again.

    Of its tokens the first `on_device` still have KV on the device, those up to `kept_to` on the
    host, and the rest, up to `held`, is recomputed in one prefill, as vLLM does. A load beside the
    steps (`loads_beside_steps`) costs one more step.
    """
    loaded = kept_to - on_device
    extra = profile.gamma2 if loads_beside_steps(loaded, profile) else 0.0
    return profile.load(loaded) + profile.prefill(kept_to, held) + extra


def drop_seconds(job: Job, expected_output: float, profile: EngineProfile) -> float:
    """Cost of ending a job (S2): the decoding that is lost, and all of the request, with
    `expected_output` tokens, when its client sends it again."""
    prompt = job.prompt_tokens
    lost = profile.decode(prompt, job.generated)
    return lost + profile.prefill(0, prompt) + profile.decode(prompt, expected_output)
