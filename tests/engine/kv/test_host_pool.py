"""The host pool: no slot is allocated twice or lost, and runs are as long as possible."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.engine.kv.ledger import HostPool

actions = st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=60)


@given(st.integers(0, 64), actions)
def test_slots_are_allocated_once_and_all_freed(slots, actions) -> None:
    pool = HostPool(slots)
    held: list[list[range]] = []
    for take, number in actions:
        if take:
            taken = pool.allocate(number)
            assert (taken is None) == (number > slots - sum(map(len, _slots(held))))
            if taken is not None:
                assert sum(map(len, taken)) == number
                held.append(taken)
        elif held:
            pool.give_back(held.pop(number % len(held)))
        used = [slot for slots_of_one in _slots(held) for slot in slots_of_one]
        assert len(set(used)) == len(used) == pool.used
        assert set(used) <= set(range(slots))
        assert 0.0 <= pool.fragmentation < 1.0
    for taken in held:
        pool.give_back(taken)
    assert (pool.free, pool.fragmentation) == (slots, 0.0)
    assert pool.allocate(slots) == ([range(slots)] if slots else [])


def _slots(held: list[list[range]]) -> list[list[int]]:
    return [[slot for run in taken for slot in run] for taken in held]


def test_shortest_sufficient_run_is_preferred_to_several_runs() -> None:
    pool = HostPool(20)
    first, second, third = pool.allocate(4), pool.allocate(6), pool.allocate(8)
    assert (first, second, third) == ([range(4)], [range(4, 10)], [range(10, 18)])
    pool.give_back(second)  # free: 4 to 9 and 18 to 19
    assert pool.fragmentation == 0.25
    assert pool.allocate(2) == [range(18, 20)]
    pool.give_back(first)  # free: 0 to 9
    assert pool.allocate(3) == [range(3)]
    pool.give_back(third)
    assert pool.allocate(15) == [range(3, 18)]
    assert pool.allocate(1) is None


def test_smaller_pool_gives_no_slot_beyond_its_end() -> None:
    pool = HostPool(20)
    first, second = pool.allocate(4), pool.allocate(10)
    pool.shrink(10)
    assert (pool.slots, pool.free) == (10, 0)
    pool.give_back(second)  # 4 to 13
    assert (pool.free, pool.used) == (6, 4)
    pool.give_back(first)
    assert pool.allocate(10) == [range(10)] and pool.allocate(1) is None
    pool.shrink(30)
    assert pool.slots == 10
