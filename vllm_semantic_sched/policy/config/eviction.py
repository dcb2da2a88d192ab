"""Keys about preemption and what becomes of a victim's KV."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vllm_semantic_sched.policy.facts.section import Section


class Preemption(Section):
    """Taking seats and KV blocks from running requests for more urgent waiting ones."""

    enabled: bool = Field(True, description="Preempt running requests for waiting ones at all.")
    min_level_gap: int = Field(
        1,
        ge=1,
        description="A victim must be at least this many levels less urgent than the request it "
        "makes room for.",
    )
    max_per_request: int = Field(
        3,
        ge=0,
        description="Times one request can be preempted for others; after that it is protected.",
    )
    shorter: float | None = Field(
        None,
        gt=1,
        description="A request may also preempt one of its own level, or less urgent, whose "
        "predicted remaining time is so many times its own (paper, Alg. 2). Unset: never. For "
        "base policies that go by length.",
    )
    victim: Literal["rank", "cost"] = Field(
        "rank",
        description="Who goes first within a level: `rank` the one with the most remaining time, "
        "`cost` the one that is cheapest to preempt, of those with the most remaining time.",
    )
    max_victims_per_step: int = Field(
        8, ge=1, description="Upper bound on victims in one scheduling step."
    )


RetentionMode = Literal["optimal", "paper", "swap", "recompute", "none"]


class Retention(Section):
    """What becomes of a victim's KV."""

    mode: RetentionMode = Field(
        "optimal",
        description="`optimal` takes the plan of least expected cost by the engine profile; "
        "`paper` decides by eq. 3 to 6 of arXiv 2506.12204, corrected; `swap` keeps all that the "
        "host pool takes; `recompute` keeps nothing; `none` keeps nothing and never ends a "
        "request instead of preempting it.",
    )
    max_stall: float = Field(
        1.0,
        ge=0,
        description="A load that takes longer than this many decode steps runs beside the "
        "engine's steps; a shorter one before a step, which waits for it.",
    )
    survival: float = Field(
        0.5,
        ge=0,
        le=1,
        description="With this share of the KV blocks free, a victim's blocks are expected in the "
        "device's prefix cache when it comes back, and are not saved; 1: never. Blocks that other "
        "running requests share are always expected there.",
    )
    thrash_tokens: int = Field(
        16,
        ge=1,
        description="A request preempted again before it has this many new tokens counts as "
        "thrashing.",
    )
