"""A router's counts of requests at replicas that come and go."""

from collections import Counter

import pytest
from fake_ray import in_flight
from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.fleet.ray.choice import STATS_KEY, ReplicaChoice, load_of
from vllm_semantic_sched.policy.placement import CACHE_WORTH

LEVELS = 3


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def choice_of(*replicas: str, clock=None) -> ReplicaChoice:
    choice = ReplicaChoice(LEVELS, clock or Clock(), memory=lambda: 600.0)
    choice.update(dict.fromkeys(replicas))
    return choice


def stats(number: int, work: int, by_level: tuple[int, ...]) -> dict:
    load = {"number": number, "work": work, "by_level": by_level, "kv_free": None}
    return {STATS_KEY: load}


def send(choice: ReplicaChoice, request: str, level: int, session=None) -> str:
    replica = choice.choose(request, level, session)
    choice.sent(request, replica)
    return replica


def test_burst_is_spread():
    choice = choice_of("a", "b", "c")
    assert Counter(choice.choose(str(n), 1) for n in range(9)) == {"a": 3, "b": 3, "c": 3}


def test_urgent_request_avoids_urgent_ones_only():
    choice = choice_of("a", "b")
    busy = send(choice, "urgent", 0)
    other = "b" if busy == "a" else "a"
    for number in range(5):
        choice.update({"a": None, "b": None})  # an unchanged set keeps the counts
        assert send(choice, f"late {number}", 2) in "ab"
    choice.update({busy: None, other: stats(1, 30, (0, 0, 30))})
    assert choice.choose("next", 0) == other


def test_finished_requests_no_longer_count():
    choice = choice_of("a", "b")
    first = send(choice, "1", 0)
    second = send(choice, "2", 0)
    assert first != second
    choice.done("1", first)
    assert send(choice, "3", 0) == first
    choice.done("1", first)  # twice
    choice.done("unknown", first)
    assert in_flight(choice, "a") == in_flight(choice, "b") == 1


def test_cancelled_request_is_not_counted():
    choice = choice_of("a", "b")
    chosen = choice.choose("1", 0)
    choice.drop("1")
    choice.drop("1")
    assert in_flight(choice, chosen) == 0
    sent = send(choice, "2", 0)
    choice.drop("2")  # it has been sent
    assert in_flight(choice, sent) == 1


def test_request_counts_where_it_was_sent():
    choice = choice_of("a", "b")
    chosen = choice.choose("1", 0)
    other = "b" if chosen == "a" else "a"
    choice.sent("1", other)
    assert (in_flight(choice, chosen), in_flight(choice, other)) == (0, 1)
    assert choice.choose("2", 0) == chosen
    choice.done("1", other)
    assert in_flight(choice, other) == 0


def test_repeated_choice_counts_once():
    choice = choice_of("a", "b")
    for _ in range(5):
        chosen = choice.choose("1", 0)
    assert in_flight(choice, "a") + in_flight(choice, "b") == 1
    choice.sent("1", chosen)
    # A replica rejects it: Ray reports the end after the second choice, or before.
    again = choice.choose("1", 0)
    choice.done("1", chosen)
    choice.sent("1", again)
    assert in_flight(choice, "a") + in_flight(choice, "b") == 1
    choice.done("1", again)
    assert in_flight(choice, "a") + in_flight(choice, "b") == 0


def test_dead_replica_is_forgotten():
    choice = choice_of("a", "b")
    names = [send(choice, str(number), 0) for number in range(4)]
    choice.forget("a")
    assert {choice.choose(f"later {number}", 0) for number in range(3)} == {"b"}
    assert in_flight(choice, "a") == 0
    for number, name in enumerate(names):
        choice.done(str(number), name)
    # Its successor starts empty.
    choice.update({"b": None, "c": None})
    assert choice.choose("new", 0) == "c"
    choice.forget("b")
    choice.forget("c")
    assert choice.choose("nowhere", 0) is None
    choice.sent("nowhere", "b")


def test_scaling_keeps_the_counts_of_those_that_stay():
    choice = choice_of("a", "b")
    for number in range(4):
        send(choice, str(number), 0)
    choice.update({"b": None, "a": None, "c": None})
    assert [choice.choose(f"new {number}", 0) for number in range(2)] == ["c", "c"]
    choice.update({"c": None, "b": None})
    assert in_flight(choice, "c") == in_flight(choice, "b") == 2
    for number in range(4):
        choice.done(str(number), "b")
    assert in_flight(choice, "b") == 0


def test_session_stays_with_its_replica_while_that_is_worth_it():
    choice = choice_of("a", "b", "c")
    session = ("tenant", "session")
    home = send(choice, "0", 1, session)
    for number in range(CACHE_WORTH):
        assert send(choice, f"same {number}", 1, session) == home
    assert choice.choose("other", 1, ("other tenant", "session")) != home
    # Where it is sent in the end counts, and replicas that stay keep their sessions.
    chosen = choice.choose("1", 0, session)
    other = next(name for name in "abc" if name != chosen)
    choice.sent("1", other)
    choice.update({"d": None, other: None})
    assert send(choice, "2", 0, session) == other
    choice.forget(other)
    assert send(choice, "3", 0, session) == "d"


def test_other_routers_requests_count():
    clock = Clock()
    choice = choice_of("a", "b", clock=clock)
    first = send(choice, "1", 0)
    other = "b" if first == "a" else "a"
    choice.update({first: stats(1, 1, (1, 0, 0)), other: stats(1, 3, (3, 0, 0))})
    assert [choice.choose(f"2{number}", 0) for number in range(2)] == [first, first]
    # Levels of a report that is not renewed are forgotten, its sum is not.
    choice.update({first: stats(2, 9, (0, 0, 9)), other: stats(2, 5, (5, 0, 0))})
    assert choice.choose("3", 0) == first
    clock.now = 5.0
    assert choice.choose("4", 0) == other


def test_report_with_other_levels_counts_as_a_whole():
    choice = choice_of("a", "b")
    choice.update({"a": stats(1, 4, (0, 0, 0, 4)), "b": stats(1, 2, (1, 0, 1))})
    assert choice.choose("1", 0) == "b"


EVENTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=80)


@given(EVENTS)
def test_counts_equal_a_plain_list(events):
    """Any order of arrivals, ends, deaths and starts leaves the counts of what is in flight."""
    choice = choice_of("0", "1")
    serving, flying = {"0", "1"}, []
    for number, (kind, pick) in enumerate(events):
        if kind < 5 and serving:
            replica = send(choice, str(number), pick % LEVELS)
            assert replica in serving
            flying.append((str(number), replica))
        elif kind < 8 and flying:
            request, replica = flying.pop(pick % len(flying))
            choice.done(request, replica)
        elif kind == 8 and serving:
            dead = sorted(serving)[pick % len(serving)]
            serving.remove(dead)
            choice.forget(dead)
            flying = [one for one in flying if one[1] != dead]
        else:
            serving.add(f"new {number}")
            choice.update(dict.fromkeys(serving))
        expected = Counter(replica for _, replica in flying)
        assert {name: in_flight(choice, name) for name in serving} == {
            name: expected[name] for name in serving
        }
    for request, replica in flying:
        choice.done(request, replica)
    choice.update(dict.fromkeys(serving))
    if serving:
        total = len(serving) * 3
        spread = Counter(send(choice, f"end {number}", 0) for number in range(total))
        assert set(spread.values()) == {3}


def test_load_of_several_engines():
    status = {"running": 2, "waiting": 3, "levels": [1, 0, 4], "kv_free": 0.5}
    load = load_of([status, status | {"kv_free": 1.0}], before=6)
    assert load == {"number": 7, "work": 10, "by_level": [2, 0, 8], "kv_free": 0.75}


def test_load_of_an_engine_without_levels():
    fcfs = {"running": 2, "waiting": 3, "levels": [], "kv_free": 0.5}
    load = load_of([fcfs], before=0)
    assert load == {"number": 1, "work": 5, "by_level": None, "kv_free": 0.5}


def test_load_of_an_idle_replica_does_not_change():
    idle = {"running": 0, "waiting": 0, "levels": [0, 0, 0], "kv_free": 1.0}
    assert load_of([idle], before=7)["number"] == 7


@pytest.mark.parametrize("given", [None, {}, {"kv_events": 1}])
def test_missing_load(given):
    choice = choice_of("a", "b")
    first = send(choice, "1", 0)
    choice.update({"a": given, "b": given})
    assert choice.choose("2", 0) != first
