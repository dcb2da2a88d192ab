"""Costs in seconds: of the rest of a job, and of keeping or rebuilding its KV."""

from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.profile.formula import EngineProfile

# Decode steps by which a load of KV may delay the next step. A load beside the steps costs its
# request one step more, so that a shorter one is cheaper before a step.
MAX_STALL = 1.0


def remaining_seconds(job: Job, expected_output: float, profile: EngineProfile) -> float:
    """Engine time that a job still needs: load, prefill of tokens without KV, decode, to
    `expected_output` tokens (more than `job.generated`)."""
    tokens = job.tokens
    in_place = job.computed + job.swapped
    # The newest token of a decoding job has no KV yet; decoding it is not a prefill.
    prefill = profile.prefill(in_place, tokens) if tokens - in_place > 1 else 0.0
    decode = profile.decode(tokens, expected_output - job.generated)
    return profile.load(job.swapped) + prefill + decode if job.swapped else prefill + decode


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
