"""The order in which an HTTP server prepares requests."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.engine.http.preparation_queue import PreparationQueue


def test_urgent_request_overtakes_those_that_wait() -> None:
    queue: PreparationQueue[str] = PreparationQueue(1)
    assert queue.enter("first", 4, 0.0)
    assert not queue.enter("small talk", 4, 0.0)
    assert not queue.enter("emergency", 0, 0.3)
    assert not queue.enter("second emergency", 0, 0.4)
    assert [queue.leave() for _ in range(4)] == [
        "emergency",
        "second emergency",
        "small talk",
        None,
    ]
    assert queue.enter("next", 4, 1.0)


def test_nobody_starves_behind_a_flood_of_urgent_requests() -> None:
    queue: PreparationQueue[str] = PreparationQueue(1)
    queue.enter("first", 0, 0.0)
    queue.enter("patient", 4, 0.0)
    served, now = "", 0.0
    while served != "patient":
        now += 0.05
        queue.enter(f"urgent at {now}", 0, now)
        served = queue.leave() or ""
        assert now < 5.0


@given(
    st.integers(1, 4),
    st.lists(st.one_of(st.none(), st.integers(0, 4)), max_size=60),
)
def test_every_request_gets_one_slot_within_the_limit(slots: int, events: list[int | None]) -> None:
    queue: PreparationQueue[int] = PreparationQueue(slots)
    inside: list[int] = []
    came: list[int] = []
    for number, level in enumerate(events):
        if level is not None:
            came.append(number)
            if queue.enter(number, level, number / 10):
                inside.append(number)
        elif len(inside) > 0:
            inside.pop()
            if (following := queue.leave()) is not None:
                inside.append(following)
        assert len(inside) <= slots
        assert not len(queue) or len(inside) == slots
        assert len(set(inside)) == len(inside) and set(inside) <= set(came)
