"""Keys about preemption and the KV of victims."""

from typing import Literal

from pydantic import Field

from vllm_semantic_sched.policy.config.section import Section


class Preemption(Section):
    """Taking seats and KV blocks from running requests for more urgent waiting ones."""

    enabled: bool = True
    """Preempt running requests for waiting ones."""
    min_level_gap: int = Field(1, ge=1)
    """A victim must be at least this many levels less urgent than the request it makes room for."""
    max_per_request: int = Field(3, ge=0)
    """Most preemptions of one request for more urgent ones; see `after_limit`."""
    after_limit: Literal["protect", "promote", "drop"] = "protect"
    """After `max_per_request` preemptions: `protect` the request keeps its seat; `promote` it also
    ranks one level higher; `drop` the next preemption ends it with the code `dropped`, if its tier
    has `drop` (others are protected)."""
    shorter: float | None = Field(None, gt=1)
    """A request may also preempt one of its own or a less urgent level whose predicted remaining
    time is at least this many times its own (paper, Alg. 2). Unset: never. For `base: semantic`."""
    victim: Literal["rank", "cost", "progress"] = "rank"
    """First victim within a level: `rank` the request with the most remaining time, `cost` the
    cheapest to preempt, `progress` the one with the fewest output tokens, where each earlier
    preemption counts as 500. The latter two among the 64 with the most remaining time."""


class Retention(Section):
    """How much KV is kept of a victim, and of urgent requests that have ended."""

    mode: Literal["optimal", "paper", "swap", "recompute", "none"] = "optimal"
    """`optimal` takes the plan of least expected cost by the engine profile; `paper` decides by eq.
    3 to 6 of arXiv 2506.12204, corrected; `swap` keeps as much as fits into the host pool;
    `recompute` keeps nothing; `none` keeps nothing and never drops a request."""
    cache_share: float = Field(0.0, ge=0, le=0.9)
    """Share of the KV blocks in which the prefix cache keeps what requests of level 0 have left in
    it: it gives up all others first. 0: the least recently used go first, as in vLLM."""
