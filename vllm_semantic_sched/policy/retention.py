"""Plans how much of a victim's KV is kept on device and host: that of its first tokens.

vLLM rebuilds a request by one prefill over prompt and output, so keeping the first k of L tokens
costs save(k) + load(k) + prefill(k, L). This is concave in k: the minimum is at an end of the range
that the constraints allow.
"""

import enum
from typing import NamedTuple

from vllm_semantic_sched.policy.config.eviction import Retention
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.profile import cost
from vllm_semantic_sched.policy.profile.formula import EngineProfile

# Share of the KV blocks that must be free for a victim's cached blocks to count as safe in the
# device's prefix cache: vLLM takes free blocks in the order in which they became free, so that many
# others go first.
SURVIVAL = 0.5


def tokens_left_on_device(shared: int, cached: int, free_share: float) -> int:
    """A victim's first tokens that will probably still be on the device later: those in blocks
    `shared` with running jobs; all those `cached`, if many KV blocks are free (`free_share`), which
    go first."""
    return cached if free_share > SURVIVAL else shared


class PreemptionKind(enum.Enum):
    """What happens to a victim and its KV."""

    RECOMPUTE = "recompute"
    SWAP = "swap"  # save all of it to the host
    PARTIAL = "partial"  # save the first part to the host
    DROP = "drop"  # end the request


class HostRoom(NamedTuple):
    """Room on the host for one victim."""

    block_size: int  # tokens
    blocks: int  # free ones of the host pool
    on_device: int = 0  # first tokens that will still be on the device, in whole blocks
    all_or_nothing: bool = False  # a part of the KV is useless (sliding windows)

    def most(self, held: int) -> int:
        """First tokens whose KV can be kept, of a victim with `held`."""
        room = self.on_device + self.blocks * self.block_size
        if held <= room:
            return held
        return self.on_device if self.all_or_nothing else room


class PreemptionPlan(NamedTuple):
    """How to preempt one job."""

    kind: PreemptionKind
    on_device: int  # first tokens, which stay on the device
    saved: int  # tokens after them, saved to the host in whole blocks or to the end
    recomputed: int  # the other tokens
    save_seconds: float  # expected engine time to save
    resume_seconds: float  # and to restore

    @property
    def seconds(self) -> float:
        """Total cost of the preemption."""
        return self.save_seconds + self.resume_seconds


def plan_preemption(
    job: Job,
    held: int,
    profile: EngineProfile,
    retention: Retention,
    host: HostRoom | None,
    drop_seconds: float | None = None,
    must_end: bool = False,
) -> PreemptionPlan:
    """Plan the preemption of a running job.

    Args:
        held: its first tokens whose KV is on the device.
        host: None without a host pool.
        drop_seconds: cost of ending the job, which is done if all its preemptions, this one
            included, cost more; None: not allowed.
        must_end: it is ended if it may be, whatever that costs.
    """
    on_device = min(host.on_device, held) if host else 0
    kept_to = max(on_device, _kept_to(job, held, profile, retention, host))
    plan = _plan(on_device, kept_to, held, profile)
    if drop_seconds is None or retention.mode == "none":
        return plan
    if must_end or job.preempted.seconds + plan.seconds > drop_seconds:
        return PreemptionPlan(PreemptionKind.DROP, 0, 0, 0, 0.0, drop_seconds)
    return plan


def _kept_to(
    job: Job,
    held: int,
    profile: EngineProfile,
    retention: Retention,
    host: HostRoom | None,
) -> int:
    if host is None or retention.mode in ("recompute", "none"):
        return 0
    if retention.mode == "swap":
        return host.most(held)
    if retention.mode == "paper":
        return _whole_blocks(_paper(job, held, profile), held, host)

    def cost_of(kept_to: int) -> tuple[float, int]:
        plan = _plan(host.on_device, kept_to, held, profile)
        return plan.seconds, kept_to  # among equals, prefer fewer host blocks

    return min(_corners(held, profile, host), key=cost_of)


def _plan(on_device: int, kept_to: int, held: int, profile: EngineProfile) -> PreemptionPlan:
    if kept_to == on_device:
        seconds = profile.prefill(on_device, held)
        recompute = PreemptionKind.RECOMPUTE
        return PreemptionPlan(recompute, on_device, 0, held - on_device, 0.0, seconds)
    return PreemptionPlan(
        PreemptionKind.SWAP if kept_to == held else PreemptionKind.PARTIAL,
        on_device=on_device,
        saved=kept_to - on_device,
        recomputed=held - kept_to,
        save_seconds=profile.save(kept_to - on_device),
        resume_seconds=cost.resume_seconds(on_device, kept_to, held, profile),
    )


def _corners(held: int, profile: EngineProfile, host: HostRoom) -> set[int]:
    """Candidates for the minimum: the cost is concave in the range of loads before a step and in
    that of loads beside steps, so these are the ends of both ranges."""
    most, start, block = host.most(held), host.on_device, host.block_size
    if start >= held:
        return {held}
    if host.all_or_nothing:
        return {start, most}
    stall = cost.MAX_STALL * profile.gamma2 - profile.load_start
    longest = max(0, int(stall / profile.beta_load)) // block
    # Neighboring blocks as well, because of rounding.
    inner = (start + blocks * block for blocks in (1, *range(longest - 1, longest + 3)))
    return {start, most, *(end for end in inner if start <= end <= most)}


def _paper(job: Job, held: int, profile: EngineProfile) -> float:
    """Tokens to keep by eq. 3 to 6, corrected. Eq. 3 is printed reversed: keeping n prompt tokens
    is right if beta n < alpha1 n^2 + alpha2 n. The minimum of eq. 5 is not eq. 6 but
    m* = m' + n + 1/2 + (gamma2 - beta) / gamma1, clipped to 0 and m'."""
    prompt = min(held, job.prompt_tokens)
    if profile.beta_load * prompt >= profile.prefill(0, prompt):
        return 0  # KV of later tokens is useless without that of the prompt
    decoded = held - prompt
    gain = profile.gamma2 - profile.beta_load
    if profile.gamma1 == 0:
        return held if gain > 0 else prompt
    best = decoded + prompt + 0.5 + gain / profile.gamma1
    return prompt + min(max(best, 0.0), decoded)


def _whole_blocks(kept_to: float, held: int, host: HostRoom) -> int:
    """The largest number of tokens up to `kept_to` that the host can keep."""
    most = host.most(held)
    if kept_to >= most:
        return most
    whole = int(kept_to) // host.block_size * host.block_size
    return host.on_device if host.all_or_nothing else whole
