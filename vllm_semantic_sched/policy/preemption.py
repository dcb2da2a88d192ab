"""Who has to go: priority-based eviction (paper, Alg. 4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import Field

from vllm_semantic_sched.policy.job import Job
from vllm_semantic_sched.policy.running import RunningSet
from vllm_semantic_sched.policy.section import Section


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
    level: int,
    need: Need,
    running: RunningSet,
    limits: Preemption,
    max_victims: int,
    freeable_blocks: Callable[[Job], int | None],
) -> list[Job]:
    """The victims that make room for a job of `level`.

    They come off the eviction heap, least urgent first, each at least `min_level_gap` levels
    less urgent than the newcomer and not preempted too often. Nothing is evicted in vain: if
    the eligible jobs do not suffice the answer is empty, and a victim that the later ones made
    unnecessary is spared.

    Args:
        max_victims: how many this call may name.
        freeable_blocks: KV blocks that come free with a job; None if it cannot be preempted now.
    """
    chosen: list[tuple[Job, int]] = []
    blocks = 0
    for job in running.by_eviction():
        if (len(chosen) >= need.seats and blocks >= need.blocks) or len(chosen) == max_victims:
            break
        if job.level < level + limits.min_level_gap:
            break  # all that follow are at least as urgent
        if job.preemptions >= limits.max_per_request:
            continue
        freed = freeable_blocks(job)
        if freed is None:
            continue
        chosen.append((job, freed))
        blocks += freed
    if len(chosen) < need.seats or blocks < need.blocks:
        return []
    return _without_spare(chosen, blocks, need)


def _without_spare(chosen: list[tuple[Job, int]], blocks: int, need: Need) -> list[Job]:
    kept = list(chosen)
    # Spare the most urgent first.
    for victim in reversed(chosen):
        if len(kept) > need.seats and blocks - victim[1] >= need.blocks:
            kept.remove(victim)
            blocks -= victim[1]
    return [job for job, _ in kept]
