"""The waiting queue: min-heap plus unsorted buffer."""

from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job, make_rules, take_next

from vllm_semantic_sched.policy.facts.job import Credit, Rank
from vllm_semantic_sched.policy.order.waiting import WaitingQueue

RULES = make_rules()
default_rank = RULES.default_rank


steps = st.lists(
    st.tuples(
        st.sampled_from(["buffer", "push", "predict", "remove", "pop", "aside", "recall"]),
        st.integers(0, 4),
        st.floats(0, 10),
        st.integers(0, 30),
    ),
    max_size=120,
)


@given(steps)
def test_best_job_of_heap_and_buffer_is_first_and_none_is_lost(steps) -> None:
    queue = WaitingQueue(RULES)
    model, aside, buffered = {}, set(), set()
    for kind, level, remaining, pick in steps:
        jobs = list(model)
        if kind in ("buffer", "push"):
            job = make_job(2 if kind == "buffer" else level)
            if kind == "buffer":
                queue.buffer(job)
                buffered.add(job)
                model[job] = default_rank(job)
            else:
                model[job] = Rank(level, remaining, job.sequence)
                queue.push(job, model[job])
        elif jobs and kind == "predict":
            job = jobs[pick % len(jobs)]
            job.level = level
            model[job] = Rank(level, remaining, job.sequence)
            queue.push(job, model[job])
            aside.discard(job)
            buffered.discard(job)
        elif jobs and kind == "remove":
            job = jobs[pick % len(jobs)]
            assert queue.remove(job) and not queue.remove(job)
            del model[job]
        elif jobs and kind == "aside":
            job = jobs[pick % len(jobs)]
            assert queue.set_aside(job) is (job not in buffered)
            aside |= {job} - buffered
        elif jobs and kind == "recall":
            job = jobs[pick % len(jobs)]
            assert queue.recall(job) is (job in aside)
            aside.discard(job)
        elif model.keys() - aside:
            expected = min(model.keys() - aside, key=model.__getitem__)
            assert queue.peek() is expected
            assert take_next(queue) is expected
            del model[expected]
        aside &= model.keys()
        assert len(queue) == len(model) and all(map(queue.__contains__, aside))
        assert [queue.rank_of(job) for job in aside] == [model[job] for job in aside]
        assert list(queue.ordered()) == sorted(model.keys() - aside, key=model.__getitem__)


def test_buffered_job_is_schedulable_without_a_better_one() -> None:
    queue = WaitingQueue(RULES)
    unread, routine, urgent = make_job(), make_job(4), make_job(0)
    queue.buffer(unread)
    queue.push(routine, Rank(4, 1.0, routine.sequence))
    assert queue.peek() is unread
    queue.push(urgent, Rank(0, 9.0, urgent.sequence))
    assert [take_next(queue) for _ in range(3)] == [urgent, unread, routine]


def weighted_queue() -> WaitingQueue:
    return WaitingQueue(make_rules(weighted_levels={"factor": 4.0}))


def fill(queue, *levels_and_seconds):
    jobs = [make_job(level) for level, _ in levels_and_seconds]
    for job, (level, seconds) in zip(jobs, levels_and_seconds, strict=True):
        queue.push(job, Rank(level, seconds, job.sequence))
    return jobs


def test_much_shorter_job_goes_before_a_more_urgent_one() -> None:
    queue = weighted_queue()
    long, short, shorter = fill(queue, (2, 10.0), (3, 2.4), (4, 0.5))
    assert list(queue.ordered()) == [shorter, short, long]
    queue = weighted_queue()
    long, short, shorter = fill(queue, (2, 10.0), (3, 2.6), (4, 0.7))
    assert list(queue.ordered()) == [long, short, shorter]


def test_strict_levels_go_first_whatever_their_length() -> None:
    queue = weighted_queue()
    jobs = fill(queue, (4, 0.001), (1, 500.0), (0, 1000.0), (1, 400.0))
    assert list(queue.ordered()) == [jobs[2], jobs[3], jobs[1], jobs[0]]


def test_promoted_and_favored_jobs_gain_weight() -> None:
    rules = make_rules(weighted_levels={"factor": 4.0})
    rules.fair_share.offsets = [0.0, 0.0, 0.0, 0.0, -1.0]
    queue = WaitingQueue(rules)
    routine, favored = fill(queue, (3, 1.0), (4, 0.9))
    assert queue.peek() is favored  # like a job of level 3
    queue.remove(favored)
    aged = make_job(4, credit=Credit(waiting=4.0))
    queue.push(aged, Rank(aged.effective_level, 50.0, aged.sequence))
    assert queue.peek() is routine  # aging counts only where it may overtake


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0.01, 100)), max_size=30))
def test_weighted_order_is_total_and_keeps_levels_in_order(jobs) -> None:
    queue = weighted_queue()
    made = fill(queue, *jobs)
    seconds = dict(zip(made, (seconds for _, seconds in jobs), strict=True))
    taken = [take_next(queue) for _ in made]
    for level in range(5):
        same = [job for job in taken if job.level == level]
        assert same == sorted(same, key=lambda job: (seconds[job], job.sequence))
    first = [job.level for job in taken if job.level <= 1]
    assert first == sorted(first) == [job.level for job in taken[: len(first)]]


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "pop"]), st.integers(0, 4), st.floats(0, 10)),
        max_size=60,
    )
)
def test_choice_kept_when_a_job_is_added_is_the_one_made_anew(steps) -> None:
    queue = WaitingQueue(RULES)
    for kind, level, remaining in steps:
        if kind == "add":
            job = make_job(level)
            queue.add(job, Rank(level, remaining, job.sequence))
        elif len(queue):
            take_next(queue)
        kept = queue.peek()
        queue.changed()
        assert queue.peek() is kept
