"""Reserved seats and KV blocks, and how limits count."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job, policy_of, policy_ref

from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.config.reference import PolicyRef
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.policy.config.tiers import Reserve, Tier, TierQueue
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.capacity import Allocation, Allocations, EngineCapacity, Need
from vllm_semantic_sched.policy.limits import Limit, Limits, Scope
from vllm_semantic_sched.policy.profile.formula import load_profile

CAPACITY = EngineCapacity(seats=10, blocks=100, block_size=16)


def reservation(
    *reserves: Reserve, capacity: EngineCapacity = CAPACITY
) -> tuple[Limits, Allocations]:
    allocations = Allocations(len(reserves))
    allocations.capacity = capacity
    tiers = [Tier(name=str(level), reserve=reserve) for level, reserve in enumerate(reserves)]
    return Limits(policy_ref(tiers), allocations), allocations


NONE = Reserve()
reserves = st.builds(
    Reserve,
    seats=st.integers(0, 3),
    kv=st.sampled_from([0.0, 0.1, 0.3]),
    mode=st.sampled_from(["hard", "soft"]),
)
moves = st.lists(
    st.tuples(st.sampled_from(["take", "leave", "grow", "move"]), st.integers(0, 3),
              st.integers(1, 400)),
    max_size=60,
)  # fmt: skip


@given(st.lists(reserves, min_size=3, max_size=3), moves)
def test_admissions_never_break_hard_reservations(reserves, moves) -> None:
    kept, allocations = reservation(*reserves, NONE)
    held: dict = {}

    def below(level: int) -> tuple[int, int]:
        mine = [CAPACITY.blocks_for(tokens) for job, tokens in held.items() if job.level > level]
        return len(mine), sum(mine)

    for kind, level, tokens in moves:
        if kind == "take":
            job = make_job(level)
            admitted = kept.admits_level(level, tokens)
            seats, blocks, alone = 0, 0.0, True
            for above, reserve in enumerate(reserves):
                if reserve.mode == "hard":
                    seats, blocks = seats + reserve.seats, blocks + reserve.kv
                used = below(above)
                if above < level and (seats or blocks):
                    alone = not used[0]
                    fits = used[0] + 1 <= 10 - seats
                    wanted = used[1] + CAPACITY.blocks_for(tokens)
                    fits &= alone or not blocks or wanted <= 100 * (1 - blocks)
                    assert fits or not admitted
                    if not fits:
                        need = kept.shortage(level, tokens)
                        assert need.seats > 0 or need.blocks > 0
            if admitted:
                allocations.occupy(job, tokens)
                held[job] = tokens
        elif held:
            job = list(held)[tokens % len(held)]
            if kind == "leave":
                allocations.release(job)
                del held[job]
            elif kind == "grow":
                held[job] += tokens
                allocations.occupy(job, held[job])
            else:
                before, job.level = job.level, level
                allocations.relevel(job, before)
        for above in range(3):
            assert (allocations.below[above].seats, allocations.below[above].blocks) == below(above)


def test_tiers_may_use_their_own_and_less_urgent_reservations() -> None:
    kept, allocations = reservation(Reserve(seats=2), Reserve(seats=3), NONE)
    for _ in range(5):
        allocations.occupy(make_job(2), 16)
    assert not kept.admits_level(2, 16) and kept.admits_level(1, 16)
    for _ in range(3):
        allocations.occupy(make_job(1), 16)
    assert not kept.admits_level(1, 16) and kept.admits_level(0, 16)
    assert kept.shortage(1, 16) == Need(1, 0)
    assert kept.shortage(2, 16) == Need(1, 0) and kept.shortage(0, 16) == Need(0, 0)


def test_single_request_may_exceed_its_block_limit() -> None:
    kept, allocations = reservation(Reserve(kv=0.5), NONE)
    assert kept.admits_level(1, 16 * 90)
    allocations.occupy(make_job(1), 16 * 90)
    assert not kept.admits_level(1, 16) and kept.level_over_limit() is None
    allocations.occupy(make_job(1), 16)
    assert kept.level_over_limit() == 0


def test_borrowers_are_found_until_enough_is_returned() -> None:
    kept, allocations = reservation(Reserve(seats=4, mode="soft"), NONE, NONE)
    jobs = [make_job(2) for _ in range(8)]
    for job in jobs:
        assert kept.admits_level(2, 16)
        allocations.occupy(job, 16)
    assert kept.lent(0) and not kept.lent(1)
    borrowed = kept.borrowed_from(0)
    assert [borrowed(job) for job in jobs] == [True, True] + [False] * 6
    allocations.release(jobs[0])
    allocations.release(jobs[1])
    assert kept.borrowed_from(0) is None


@pytest.mark.parametrize("reserve", [Reserve(seats=10), Reserve(seats=11)])
def test_reservation_that_leaves_nothing_for_others_raises(reserve) -> None:
    with pytest.raises(PolicyError, match=r"tiers\.0\.reserve: .*the engine has 10 seats"):
        reservation(reserve, NONE)
    kept, _holdings = reservation(Reserve(seats=1), NONE)
    with pytest.raises(PolicyError):
        kept.check(policy_of([Tier(name="a", reserve=reserve), Tier(name="b")]))
    assert kept.table.soft[0].seats == 9


def test_all_jobs_are_admitted_without_reservations() -> None:
    kept, _holdings = reservation(NONE, NONE)
    assert (
        not kept.table.reserves and kept.admits_level(1, 10**6) and kept.level_over_limit() is None
    )


def test_new_reservations_count_once_capacity_is_known() -> None:
    core = SchedulingCore(parse_policy({"levels": 2, "default_level": 1}), load_profile("default"))
    tiers = [{"name": "a", "reserve": {"seats": 3}}, {"name": "b"}]
    core.switch(
        parse_policy({"levels": 2, "default_level": 1, "tiers": tiers}), load_profile("default")
    )
    core.set_capacity(CAPACITY)
    assert core.seating.limits.table.soft[0].seats == 7


def test_policy_whose_reservations_are_too_large_changes_nothing() -> None:
    core = SchedulingCore(policy_of([Tier(name="a"), Tier(name="b")]), load_profile("default"))
    core.set_capacity(CAPACITY)
    before = core.policy
    with pytest.raises(PolicyError):
        tiers = [Tier(name="a", reserve=Reserve(seats=10)), Tier(name="b")]
        core.switch(policy_of(tiers), load_profile("default"))
    assert core.policy is before and not core.outdated


def test_a_group_may_have_one_request_of_any_size() -> None:
    limit = Limit(Scope.TENANT, seats=2, kv=10)
    assert limit.admits(Allocation(), blocks=99)
    assert limit.admits(Allocation(seats=1, blocks=4), blocks=6)
    assert not limit.admits(Allocation(seats=1, blocks=5), blocks=6)
    assert not limit.admits(Allocation(seats=2), blocks=1)
    assert not limit.exceeded_by(Allocation(seats=1, blocks=99)) and limit.exceeded_by(
        Allocation(2, 11)
    )


def test_one_table_has_the_limits_of_tiers_tenants_and_queues() -> None:
    tiers = [
        Tier(name="a", reserve=Reserve(seats=4)),
        Tier(name="b", queue=TierQueue(requests=7)),
    ]
    policy = policy_of(
        tiers,
        tenants={"fair": True, "seats": 0.25, "kv": 0.5},
        admission={"queue": {"requests": 9}, "tenant": {"requests": 3}},
    )
    allocations = Allocations(2)
    allocations.capacity = CAPACITY
    table = Limits(PolicyRef(policy), allocations).table
    assert table.hard[0] == Limit(Scope.LESS_URGENT, seats=6)
    assert table.tiers == [Limit(Scope.TIER), Limit(Scope.TIER, queued=7)]
    assert table.tenant == Limit(Scope.TENANT, seats=2, kv=50, queued=3)
    assert table.all == Limit(Scope.ALL, queued=9)
