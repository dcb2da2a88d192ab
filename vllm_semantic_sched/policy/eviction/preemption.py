"""Who has to go: priority-based eviction (paper, Alg. 4)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from vllm_semantic_sched.policy.job import Job
from vllm_semantic_sched.policy.order.running import RunningSet
from vllm_semantic_sched.policy.section import Section

# Jobs of a level among which the cheapest victim is looked for.
_COMPARED = 16


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


@dataclass(frozen=True, slots=True)
class Need:
    """What is missing before a job can be admitted; zero or below where there is enough.

    Attributes:
        seats: running-request slots.
        blocks: KV blocks.
    """

    seats: int
    blocks: int

    @property
    def met(self) -> bool:
        return self.seats <= 0 and self.blocks <= 0


def choose_victims(
    level: float,
    need: Need,
    running: RunningSet,
    limits: Preemption,
    max_victims: int,
    freeable_blocks: Callable[[Job], int | None],
    preemption_seconds: Callable[[Job], float] | None = None,
    gives_way: Callable[[Job], bool] | None = None,
    among_equals: bool = False,
) -> list[Job]:
    """The victims that make room for a job of `level`.

    They come off the eviction heap, least urgent first, each at least `min_level_gap` levels
    less urgent than the newcomer and not preempted too often. A job that gives way has neither
    protection, as long as it is less urgent. Nothing is evicted in vain: if the eligible jobs do
    not suffice the answer is empty, and a victim that the later ones made unnecessary is spared.

    What a running job gained by waiting protects it: its effective level counts, and the
    newcomer's own.

    Args:
        max_victims: how many this call may name.
        freeable_blocks: KV blocks that come free with a job; None if it cannot be preempted now.
        preemption_seconds: what preempting a job would cost; needed for `victim: cost`.
        gives_way: whether a job must yield to the newcomer however near its level is; None: none.
        among_equals: such jobs may also be as urgent as the newcomer.
    """
    candidates = running.by_eviction()
    if limits.victim == "cost" and preemption_seconds is not None:
        candidates = _cheapest_first(candidates, preemption_seconds)
    chosen: list[tuple[Job, int]] = []
    blocks = 0
    for job in candidates:
        if (len(chosen) >= need.seats and blocks >= need.blocks) or len(chosen) == max_victims:
            break
        near = job.effective_level < level + limits.min_level_gap
        above = job.effective_level < level or (job.effective_level == level and not among_equals)
        if above or (near and gives_way is None):
            break  # all that follow are at least as urgent
        protected = near or job.preemptions >= limits.max_per_request
        if protected and (gives_way is None or not gives_way(job)):
            continue
        freed = freeable_blocks(job)
        if freed is None:
            continue
        chosen.append((job, freed))
        blocks += freed
    if len(chosen) < need.seats or blocks < need.blocks:
        return []
    return _without_spare(chosen, blocks, need)


def _cheapest_first(jobs: Iterable[Job], cost: Callable[[Job], float]) -> Iterator[Job]:
    """The first jobs of each level by cost, the later ones as they come; lazily."""
    for _, same_level in itertools.groupby(jobs, key=lambda job: job.effective_level):
        yield from sorted(itertools.islice(same_level, _COMPARED), key=cost)
        yield from same_level  # noqa: B031 - those that were not compared


def _without_spare(chosen: list[tuple[Job, int]], blocks: int, need: Need) -> list[Job]:
    kept = list(chosen)
    # Spare the most urgent first.
    for victim in reversed(chosen):
        if len(kept) > need.seats and blocks - victim[1] >= need.blocks:
            kept.remove(victim)
            blocks -= victim[1]
    return [job for job, _ in kept]
