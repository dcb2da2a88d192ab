"""The core under random events of many jobs, with every base policy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import step, take_next, victims_for

from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.core import URGENT, SchedulingCore
from vllm_semantic_sched.policy.estimates.calibration import AnswerEnd
from vllm_semantic_sched.policy.estimates.decision import Hint, reading_level, reading_order
from vllm_semantic_sched.policy.estimates.length import DEFAULT_TOKENS
from vllm_semantic_sched.policy.facts.capacity import Need
from vllm_semantic_sched.policy.facts.decision import Decision
from vllm_semantic_sched.policy.facts.job import Job, JobState, LevelSource, Preempted
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets, Prediction
from vllm_semantic_sched.policy.profile.formula import load_profile
from vllm_semantic_sched.policy.retention import HostRoom

BUCKETS = LengthBuckets(edges=(20, 100), means=(10.0, 60.0, 300.0))
LEVELS = [(1.0, 0.0, 0.0, 0.0, 0.0), (0.1, 0.1, 0.1, 0.1, 0.6)]
LENGTHS = [(1.0, 0.0, 0.0), (0.0, 0.0, 1.0), None]


def make_core(base: str = "semantic", **policy) -> SchedulingCore:
    return SchedulingCore(parse_policy({"base": base} | policy), load_profile("default"), BUCKETS)


def arrive(core: SchedulingCore, name: str, urgency=None, unread=False, priority=0) -> Job:
    extra_args = {} if urgency is None else {"urgency": urgency}
    hint = core.read_hints(extra_args, priority)
    job = core.arrive(core.draft(name, 50, 500, hint, awaits_prediction=unread), 0.0)
    core.enqueue(job, core.waiting)
    return job


actions = st.lists(
    st.tuples(
        st.sampled_from(
            ["arrive", "predict", "admit", "preempt", "finish", "step", "skip", "assign"]
        ),
        st.integers(0, 50),
        st.integers(0, 4),
    ),
    max_size=150,
)


@given(st.sampled_from(["semantic", "priority", "sjf"]), actions)
def test_every_job_is_in_exactly_one_place_until_it_finishes(base, actions) -> None:
    core = make_core(base)
    jobs: list[Job] = []
    for number, (action, pick, level) in enumerate(actions):
        waiting = [job for job in jobs if job.state is JobState.WAITING]
        running = [job for job in jobs if job.state is JobState.RUNNING]
        if action == "arrive":
            hinted = level if pick % 2 else None
            jobs.append(arrive(core, str(number), hinted, unread=pick % 3 == 0))
        elif action == "predict" and jobs:
            job = jobs[pick % len(jobs)]
            core.predicted(job, Prediction(LEVELS[level % 2], LENGTHS[pick % 3]))
        elif action == "assign" and jobs:
            core.assign(jobs[pick % len(jobs)], level)
        elif action == "admit" and waiting:
            best = min(waiting, key=lambda job: list(core.waiting.ordered()).index(job))
            assert core.waiting.peek() is best
            core.start(take_next(core.waiting))
        elif action == "skip" and waiting:
            job = take_next(core.waiting)
            core.requeue(job, core.waiting)
        elif action == "preempt" and running:
            job = running[pick % len(running)]
            core.preempt(job, core.plan_preemption(job, job.computed, HostRoom(16, pick)))
            core.enqueue(job, core.waiting)
        elif action == "finish" and jobs:
            job = jobs.pop(pick % len(jobs))
            core.finish(job, list(AnswerEnd)[level % 3])
            assert job not in core.waiting and job not in core.running
        elif action == "step":
            for job in running:
                job.generated += 1
            step(core, lambda job: None, float(number))
        for job in jobs:
            assert (job in core.waiting) == (job.state is JobState.WAITING)
            assert (job in core.running) == (job.state is JobState.RUNNING)
        assert len(core.waiting) + len(core.running) == len(jobs)


def test_order_under_each_base_policy() -> None:
    def order(base: str) -> list[str]:
        core = make_core(base)
        for name, level, length in (
            ("routine-short", 4, LENGTHS[0]),
            ("urgent-long", 0, LENGTHS[1]),
            ("urgent-short", 0, LENGTHS[0]),
        ):
            job = arrive(core, name, level, unread=True)
            core.predicted(job, Prediction(LEVELS[0], length))
        return [take_next(core.waiting).request_id for _ in range(3)]

    assert order("semantic") == ["urgent-short", "urgent-long", "routine-short"]
    assert order("priority") == ["urgent-long", "urgent-short", "routine-short"]
    assert order("sjf") == ["routine-short", "urgent-short", "urgent-long"]


def test_hint_overrides_prediction_and_prediction_moves_any_job() -> None:
    core = make_core()
    hinted, unread, other = arrive(core, "a", 3), arrive(core, "b", unread=True), arrive(core, "c")
    assert core.waiting.buffered == 1
    core.predicted(hinted, Prediction(LEVELS[0]))
    assert (hinted.level, hinted.level_source) == (3, LevelSource.HINT)
    core.predicted(unread, Prediction(LEVELS[0]))
    assert core.waiting.peek() is unread and core.waiting.buffered == 0
    core.start(take_next(core.waiting))
    core.start(take_next(core.waiting))
    assert core.running.least_urgent() is other
    core.predicted(other, Prediction(LEVELS[0]))
    assert {job.level for job in core.running.by_eviction()} == {0}


def test_prediction_for_more_levels_than_the_policy_is_clipped() -> None:
    core = make_core(levels=3, default_level=1)
    job = arrive(core, "a", unread=True)
    core.predicted(job, Prediction(LEVELS[1], decision=HALF))
    assert job.level == 2


@pytest.mark.parametrize(("base", "worth"), [("semantic", True), ("sjf", False)])
def test_only_more_urgent_jobs_preempt(base: str, worth: bool) -> None:
    core = make_core(base)
    routine = arrive(core, "a", 4)
    core.start(take_next(core.waiting))
    urgent = arrive(core, "b", 0)
    assert core.eviction.worth_preempting(urgent) is worth
    assert not core.eviction.worth_preempting(arrive(core, "c", 4))
    if worth:
        assert victims_for(core, urgent, Need(1, 0), freed=0) == [routine]


def test_number_of_preemptions_is_bounded() -> None:
    core = make_core()
    routine = arrive(core, "a", 4)
    urgent = arrive(core, "b", 0)
    core.waiting.remove(urgent)
    for _ in range(core.policy.preemption.max_per_request):
        core.start(take_next(core.waiting))
        assert victims_for(core, urgent, Need(1, 0), freed=0) == [routine]
        core.preempt(routine, core.plan_preemption(routine, routine.computed), URGENT)
        core.enqueue(routine, core.waiting)
    core.start(take_next(core.waiting))
    assert victims_for(core, urgent, Need(1, 0), freed=0) == []


def test_only_preemptions_for_more_urgent_requests_are_bounded() -> None:
    """Cache resets and shortages of KV protect nobody from an emergency."""
    core = make_core()
    routine = arrive(core, "a", 4)
    urgent = arrive(core, "b", 0)
    core.waiting.remove(urgent)
    for _ in range(core.policy.preemption.max_per_request + 1):
        core.start(take_next(core.waiting))
        core.preempt(routine, core.plan_preemption(routine, routine.computed), "reset")
        core.enqueue(routine, core.waiting)
    core.start(take_next(core.waiting))
    assert victims_for(core, urgent, Need(1, 0), freed=0) == [routine]


def test_tier_that_is_not_preemptible_keeps_its_seats() -> None:
    tiers = [{"name": str(level), "preemptible": level != 4} for level in range(5)]
    core = make_core(tiers=tiers)
    batch, routine = arrive(core, "batch", 4), arrive(core, "routine", 3)
    core.start(take_next(core.waiting))
    core.start(take_next(core.waiting))
    urgent = arrive(core, "urgent", 0)
    assert victims_for(core, urgent, Need(1, 0), freed=0) == [routine]
    assert victims_for(core, urgent, Need(2, 0), freed=0) == []
    assert batch in core.running


def test_jobs_with_kv_go_by_rank_without_turns_of_tenants_or_overtaking() -> None:
    core = make_core(tenants={"fair": True}, aging={"enabled": True, "interval": 1.0})

    def resume(name: str, urgency: int, tenant: str, prompt_tokens: int) -> Job:
        hint = core.read_hints({"urgency": urgency}, 0)
        job = core.arrive(core.draft(name, prompt_tokens, 500, hint, False, tenant=tenant), 0.0)
        if urgency == 4:
            core.seating.credits.earn(job, 1000.0)
            assert job.overdue
        core.requeue(job, core.with_kv)
        return job

    overdue = resume("overdue", 4, "a", 100)
    long = resume("long", 0, "a", 2000)
    short = resume("short", 0, "b", 100)
    longer = resume("longer", 0, "b", 4000)
    assert core.with_kv.peek() is short and not core.with_kv.overtakes(short)
    assert list(core.with_kv.ordered()) == [short, long, longer, overdue]


def test_limit_of_the_client_bounds_the_expected_length() -> None:
    core = make_core()
    job = arrive(core, "a", 1)
    assert core.estimates.output_tokens(job) == DEFAULT_TOKENS
    job.max_output_tokens = 7
    assert core.estimates.output_tokens(job) == 7


def test_job_that_outlives_its_estimate_gets_a_new_one() -> None:
    core = make_core()
    job = arrive(core, "a", 1)
    core.predicted(job, Prediction(LEVELS[0], LENGTHS[0]))
    core.start(take_next(core.waiting))

    def observe(job: Job) -> None:
        job.generated = 15

    late = [step(core, observe, 0.0) for _ in range(40)]
    assert [job] in late
    assert core.estimates.output_tokens(job) > 15


def finish_with(core: SchedulingCore, tokens: int, ending: AnswerEnd, unread: bool = False) -> None:
    job = arrive(core, "done", 1)
    if not unread:
        core.predicted(job, Prediction(LEVELS[0], LENGTHS[0]))
    core.start(take_next(core.waiting))
    job.generated = tokens
    core.finish(job, ending)


@pytest.mark.parametrize(
    ("ending", "tokens", "longer"),
    [
        (AnswerEnd.STOPPED, 40, True),
        (AnswerEnd.CUT, 40, True),
        (AnswerEnd.CUT, 5, False),
        (AnswerEnd.ABORTED, 40, False),
    ],
)
def test_estimates_follow_how_finished_jobs_ended(ending, tokens, longer) -> None:
    core = make_core()
    like = arrive(core, "like", 1)
    core.predicted(like, Prediction(LEVELS[0], LENGTHS[0]))
    core.waiting.remove(like)
    assert core.estimates.length_ratio is None and core.estimates.output_tokens(like) == 10
    for _ in range(300):
        finish_with(core, tokens, ending)
    assert core.estimates.output_tokens(like) == (pytest.approx(40, rel=0.05) if longer else 10)
    assert (core.estimates.length_ratio is None) == (ending is AnswerEnd.ABORTED)


def test_jobs_without_a_predicted_length_change_no_estimate() -> None:
    core = make_core()
    finish_with(core, 40, AnswerEnd.STOPPED, unread=True)
    assert core.estimates.buckets == BUCKETS and core.estimates.length_ratio is None
    core.estimates.buckets = None  # a predictor without lengths
    finish_with(core, 40, AnswerEnd.STOPPED)
    assert core.estimates.length_ratio is None


def of_length(core: SchedulingCore, name: str, tokens: int, urgency: int = 1) -> Job:
    hint = Hint(urgency, LevelSource.HINT)
    job = core.arrive(core.draft(name, 10, tokens, hint, awaits_prediction=False), 0.0)
    core.enqueue(job, core.waiting)
    return job


def seat(core: SchedulingCore, job: Job) -> None:
    core.take(job, core.waiting)
    core.start(job)


@pytest.mark.parametrize(
    ("base", "shorter", "yields"),
    [
        ("semantic", 4.0, True),
        ("semantic", 20.0, False),
        ("semantic", None, False),
        ("priority", 4.0, False),
    ],
)
def test_shorter_preempts_much_longer_job_of_same_level(base, shorter, yields) -> None:
    core = make_core(base, preemption={"shorter": shorter, "max_per_request": 1})
    running = [of_length(core, name, 100) for name in ("long", "long as well")]
    for job in running:
        seat(core, job)
    for _ in range(5):
        step(core, lambda job: None, 0.0)
    short = of_length(core, "short", 8)
    urgent = of_length(core, "urgent", 90, urgency=0)
    assert core.eviction.wants_room and core.eviction.worth_preempting(urgent)
    seat(core, urgent)
    assert core.eviction.wants_room == core.eviction.worth_preempting(short) == yields
    need = Need(seats=1, blocks=0)
    chosen = victims_for(core, short, need, freed=1)
    assert [job.request_id for job in chosen] == ["long as well"] * yields
    for job in running:
        job.preempted = Preempted(1, urgent=1)
    assert victims_for(core, short, need, freed=1) == []


def test_weighted_levels_never_preempt_and_unread_go_first() -> None:
    core = make_core(weighted_levels={"factor": 4}, preemption={"shorter": 2})
    running = of_length(core, "running", 400, urgency=4)
    seat(core, running)
    unread, routine = arrive(core, "unread", unread=True), of_length(core, "routine", 3, urgency=2)
    need = Need(seats=1, blocks=0)
    for job in (routine, unread):
        assert not core.eviction.worth_preempting(job) and not core.eviction.wants_room
    urgent = of_length(core, "urgent", 400, urgency=1)
    assert core.eviction.wants_room and core.eviction.worth_preempting(urgent)
    assert victims_for(core, urgent, need, freed=1) == [running]
    assert list(core.waiting.ordered()) == [urgent, unread, routine]


HINT = Hint(None, LevelSource.DEFAULT)
SURE = Prediction((0.95, 0.05, 0.0, 0.0, 0.0), (1.0, 0.0, 0.0))
LIKELY = Prediction((0.6, 0.2, 0.2, 0.0, 0.0), (1.0, 0.0, 0.0))
HALF = Decision(bounds=(0.5,) * 4)
CALM = Prediction((0.0, 0.0, 0.0, 0.0, 1.0), (0.0, 0.0, 1.0))


def glance(core: SchedulingCore, name: str, provisional, urgency=None, tenant="") -> Job:
    hint = core.read_hints({} if urgency is None else {"urgency": urgency}, 0)
    job = core.arrive(core.draft(name, 50, 500, hint, True, tenant, provisional=provisional), 0.0)
    core.enqueue(job, core.waiting)
    return job


def test_provisional_level_and_length_rank_until_corrected() -> None:
    core = make_core()
    unread, calm = arrive(core, "unread", unread=True), glance(core, "calm", CALM)
    urgent = glance(core, "urgent", SURE)
    assert (urgent.level, urgent.level_source) == (0, LevelSource.INSTANT)
    assert core.estimates.output_tokens(urgent) < core.estimates.output_tokens(calm)
    assert list(core.waiting.ordered()) == [urgent, unread, calm]
    core.predicted(urgent, CALM)
    core.predicted(calm, SURE)
    assert (urgent.level, urgent.level_source) == (4, LevelSource.PREDICTION)
    assert list(core.waiting.ordered()) == [calm, unread, urgent]
    running = glance(core, "running", SURE)
    core.waiting.remove(running)
    core.start(running)
    core.predicted(running, CALM)
    assert running.level == 4 and core.running.least_urgent() is running


def test_prediction_before_queueing_counts_in_the_rank() -> None:
    core = make_core()
    long, short = (
        core.arrive(core.draft(name, 50, 500, HINT, True), 0.0) for name in ("long", "short")
    )
    core.predicted(long, CALM)
    core.predicted(short, Prediction(CALM.urgency, SURE.length))
    for job in (long, short):
        core.enqueue(job, core.waiting)
    assert list(core.waiting.ordered()) == [short, long]


def test_provisional_prediction_stays_if_the_predictor_fails() -> None:
    core = make_core()
    job = glance(core, "a", SURE)
    core.predicted(job, None)
    assert (job.level, job.level_source, job.prediction) == (0, LevelSource.INSTANT, SURE)
    assert not job.awaits_prediction


def test_hinted_level_stays_and_the_provisional_length_is_used() -> None:
    core = make_core()
    job = glance(core, "a", SURE, urgency=3)
    assert (job.level, job.level_source) == (3, LevelSource.HINT)
    assert core.estimates.output_tokens(job) == 10.0


def test_possible_emergency_is_read_before_calm_prompts() -> None:
    core = make_core()
    hint = core.read_hints({}, 0)
    perhaps = Prediction((0.15, 0.05, 0.1, 0.25, 0.45), decision=HALF)
    calm = Prediction((0.0, 0.0, 0.3, 0.6, 0.1), decision=HALF)
    assert reading_level(core.policy, hint, perhaps) == reading_level(core.policy, hint, calm) == 3
    part = Prediction(CALM.urgency, part=SURE.urgency)
    prompts = {"sure": SURE, "part": part, "perhaps": perhaps, "calm": calm, "calmest": CALM}
    order = {name: reading_order(core.policy, hint, one) for name, one in prompts.items()}
    assert sorted(order, key=order.__getitem__) == [*prompts]


@pytest.mark.parametrize("unread", [None, Prediction(SURE.urgency, unreadable="encoded")])
def test_unread_prompts_are_ordered_by_hint_or_default_level(unread) -> None:
    core = make_core()
    hints = [core.read_hints({"urgency": level}, 0) for level in range(5)]
    order = [reading_order(core.policy, hint, SURE) for hint in hints]
    assert order == sorted(order) and order[0] < order[3]
    default = reading_order(core.policy, core.read_hints({}, 0), unread)
    assert default == order[core.policy.default_level]


def test_provisional_level_may_be_for_the_order_of_reading_only() -> None:
    core = make_core(predictor={"instant": "order"})
    job = glance(core, "a", SURE)
    assert (job.level_source, job.prediction) == (LevelSource.DEFAULT, None)
    hint = core.read_hints({}, 0)
    assert (
        reading_level(core.policy, hint, SURE) == 0 and reading_level(core.policy, hint, CALM) == 4
    )
    assert reading_level(core.policy, hint, None) == core.policy.default_level
    assert reading_level(core.policy, core.read_hints({"urgency": 1}, 0), CALM) == 1
    off = make_core(predictor={"instant": "none"})
    assert reading_level(off.policy, hint, SURE) == off.policy.default_level
    assert glance(off, "a", SURE).level_source is LevelSource.DEFAULT


@pytest.mark.parametrize(
    ("may", "provisional", "victim_level", "preempts"),
    [
        ("preempt", SURE, 1, True),
        ("preempt", LIKELY, 4, True),  # surely level 2 or above: preempts as level 2
        ("preempt", LIKELY, 2, False),
        ("start", SURE, 4, False),
    ],
)
def test_provisional_level_preempts_as_far_as_it_is_probable(
    may, provisional, victim_level, preempts
) -> None:
    core = make_core(predictor={"instant": may})
    victim = arrive(core, "victim", victim_level)
    core.start(take_next(core.waiting))
    job = glance(core, "urgent", provisional)
    assert job.level == 0
    victims = victims_for(core, job, Need(1, 0), freed=1)
    assert core.eviction.worth_preempting(job) == preempts
    if preempts:
        assert victims == [victim]
    assert core.eviction.held_back(job) == (not preempts)
    core.predicted(job, provisional)  # read: its level is final
    assert core.eviction.worth_preempting(job)
    assert victims_for(core, job, Need(1, 0), freed=1) == [victim]


def test_cap_on_top_levels_counts_a_corrected_request_once() -> None:
    cap = {"tenants": {"top": {"share": 0.01}}}
    core = make_core(**cap)
    for name in "abcde":
        job = glance(core, name, SURE if name == "a" else CALM, tenant="acme")
        core.predicted(job, SURE)
        assert job.level == 0
    third = glance(core, "f", SURE, tenant="acme")
    assert third.level == 1  # five have the top level
    core.predicted(third, SURE)
    assert third.level == 1 and core.seating.top_levels.count == 1
    core = make_core(**cap)
    for name in "abcdefgh":  # misread ones give their place back
        job = glance(core, name, SURE, tenant="acme")
        assert job.level == 0
        core.predicted(job, CALM)
        assert job.level == 4
