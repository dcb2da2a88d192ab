"""The addressable heap against a sorted list."""

import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.policy.facts.heap import AddressableHeap, stored_entries

# (operation, item, key); few items, so that they are re-keyed and removed often
operations = st.lists(
    st.tuples(st.sampled_from(["push", "discard", "pop"]), st.integers(0, 9), st.integers(0, 5)),
    max_size=300,
)


@given(operations)
def test_heap_behaves_like_a_sorted_list(operations) -> None:
    heap: AddressableHeap[int] = AddressableHeap()
    model: dict[int, tuple[int, int]] = {}
    for tick, (operation, item, key) in enumerate(operations):
        if operation == "push":
            heap.push(item, key)
            model[item] = (key, tick)
        elif operation == "discard":
            assert heap.discard(item) == (model.pop(item, None) is not None)
        elif model:
            first = min(model, key=model.__getitem__)
            assert heap.pop() == first
            del model[first]
        expected = sorted(model, key=model.__getitem__)
        assert heap.peek() == (expected[0] if expected else None)
        assert [item for _, item in heap.ordered()] == expected
        assert len(heap) == len(model) and set(heap) == set(model)


def test_dead_entries_are_dropped() -> None:
    class Key(float):
        """A key that can be referenced weakly."""

    before = stored_entries()
    heap: AddressableHeap[int] = AddressableHeap()
    heap.push(0, Key(0))
    assert stored_entries() == before + 1
    stored: weakref.WeakSet[Key] = weakref.WeakSet()
    for number in range(10_000):
        key = Key(-number)
        stored.add(key)
        heap.push(1, key)
    assert len(stored) < 200
    assert stored_entries() - before < 200


def test_items_are_never_compared() -> None:
    heap: AddressableHeap[object] = AddressableHeap()
    for _ in range(10):
        heap.push(object(), 1)
    again = object()
    heap.push(again, 1)
    heap.push(again, 1)
    assert len([heap.pop() for _ in range(11)]) == 11
    with pytest.raises(IndexError):
        heap.pop()
