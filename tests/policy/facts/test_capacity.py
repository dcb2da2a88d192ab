"""Allocations of jobs, levels and tenants."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job

from vllm_semantic_sched.policy.facts.capacity import Allocations, EngineCapacity

LEVELS = 3
actions = st.lists(
    st.tuples(
        st.sampled_from(["take", "grow", "expect", "release", "relevel"]),
        st.integers(0, 30),
        st.integers(1, 500),
    ),
    max_size=80,
)


@given(actions)
def test_totals_are_sums_over_the_jobs_with_seats(actions) -> None:
    allocations = Allocations(LEVELS)
    allocations.capacity = EngineCapacity(seats=8, blocks=100, block_size=16)
    blocks, expected = {}, {}
    for action, pick, tokens in actions:
        if action == "take":
            job = make_job(pick % LEVELS, tenant="abc"[pick % 3])
        elif blocks:
            job = list(blocks)[pick % len(blocks)]
        else:
            continue
        if action in ("take", "grow"):
            allocations.occupy(job, tokens)
            blocks[job] = -(-tokens // 16)
            expected.setdefault(job, 0)
        elif action == "expect":
            allocations.expect(job, tokens)
            expected[job] = tokens
        elif action == "release":
            allocations.release(job)
            allocations.release(job)  # the second is a no-op
            del blocks[job], expected[job]
        else:
            before, job.level = job.level, pick % LEVELS
            allocations.relevel(job, before)

        assert len(allocations) == len(blocks)
        seats = Counter(job.level for job in blocks)
        for level in range(LEVELS):
            held = allocations.levels[level]
            here = [job for job in blocks if job.level == level]
            assert held.seats == seats[level]
            assert held.blocks == sum(blocks[job] for job in here)
            assert held.tokens == sum(expected[job] for job in here)
            below = allocations.below[level]
            assert below.seats == sum(count for other, count in seats.items() if other > level)
            assert below.blocks == sum(blocks[job] for job in blocks if job.level > level)
        by_tenant = Counter(job.tenant for job in blocks)
        assert {tenant: held.seats for tenant, held in allocations.tenants.items()} == by_tenant
        assert all(job.seat.blocks == count for job, count in blocks.items())


def test_jobs_hold_no_blocks_without_a_known_capacity() -> None:
    allocations = Allocations(LEVELS)
    job = make_job(1, tenant="a")
    allocations.occupy(job, 100)
    assert allocations.levels[1].seats == 1 and job.seat.blocks == 0
    allocations.expect(make_job(0), 100)  # has no seat
    assert allocations.levels[0].tokens == 0 and "b" not in allocations.tenants
