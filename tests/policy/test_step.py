"""The sequence of a scheduling step, over the simulated engine as its view."""

import pytest
from drive import PROFILE, drive

from vllm_semantic_sched.policy import holds
from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.job import JobState
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets, Prediction
from vllm_semantic_sched.policy.step import SchedulingStep
from vllm_semantic_sched.sim.engine import Engine
from vllm_semantic_sched.sim.request import Run, SimRequest
from vllm_semantic_sched.sim.sections import EngineModel

PARTS = [
    "advancing virtual time",
    "applying predictions",
    "revising estimates",
    "ending what waited too long",
    "keeping reservations",
    "looking for decisions",
    "making room for urgent requests",
    "holding less urgent requests",
    "limiting prefills",
]


def make_world(policy: dict, **engine):
    core = SchedulingCore(parse_policy(policy), PROFILE)
    core.estimates.buckets = LengthBuckets((100,), (50.0, 200.0))
    return core, Engine(core, EngineModel(**engine), PROFILE)


def arrive(core, engine, index: int, urgency: int | None = None, prediction=None) -> Run:
    hint = core.read_hints({} if urgency is None else {"urgency": urgency}, 0)
    job = core.arrive(core.draft(str(index), 40, 500, hint, awaits_prediction=urgency is None), 0.0)
    run = Run(SimRequest(index, 0.0, urgency or 0, 40, 500), job, prediction)
    engine.submit(run)
    return run


def test_parts_run_in_order_and_an_error_skips_only_its_part(monkeypatch) -> None:
    core, engine = make_world({}, seats=2)
    failed: list[str] = []
    ran: list[str] = []
    step = SchedulingStep(core)
    guarded = step._guarded

    def watched(doing: str, part, *args):
        ran.append(doing)
        return guarded(doing, part, *args)

    def broken(*args):
        raise RuntimeError("broken")

    monkeypatch.setattr(step, "_guarded", watched)
    monkeypatch.setattr(step, "_revise_estimates", broken)
    with pytest.raises(RuntimeError):
        step.run(engine)
    ran.clear()
    core.on_error = failed.append
    step.run(engine)
    assert ran == PARTS and failed == ["revising estimates"]


@pytest.mark.parametrize("question", ["is_quiet", "repeats", "_has_nothing_to_decide", "may_hold"])
def test_asking_about_a_step_changes_nothing(question) -> None:
    core, engine = make_world({"protect": {"level": 0}}, seats=1)
    arrive(core, engine, 0, urgency=4)
    arrive(core, engine, 1, urgency=0)
    engine.begin_step()
    step = engine.step
    before = (step.last, core.version, core.protection.steps, core.protection.budget.worked)
    for _ in range(2):
        answer = holds.may_hold(core) if question == "may_hold" else getattr(step, question)
        if callable(answer):
            answer(engine)
    after = (step.last, core.version, core.protection.steps, core.protection.budget.worked)
    assert after == before


def test_no_victim_for_a_request_that_ends_in_the_same_step() -> None:
    """A queue timeout is applied before room is made."""
    policy = {"admission": {"queue": {"timeout": 1.0}}, "predictor": {"enabled": False}}
    core, engine = make_world(policy, seats=1)
    background = arrive(core, engine, 0, urgency=4)
    engine.begin_step()
    engine.end_step()
    urgent = arrive(core, engine, 1, urgency=0)
    core.lifecycle.clock = lambda: 5.0
    engine.begin_step()
    assert urgent.refused == "queue_timeout"
    assert background.job.preemptions == 0 and background.job.state is JobState.RUNNING


def test_prediction_is_applied_before_room_is_made() -> None:
    core, engine = make_world({}, seats=1)
    background = arrive(core, engine, 0, urgency=4)
    engine.begin_step()
    engine.end_step()
    unread = arrive(core, engine, 1, prediction=Prediction((1.0, 0.0, 0.0, 0.0, 0.0), (1.0, 0.0)))
    core.levels.change(unread.job, 4)  # at the default level it would not preempt
    engine.predicted(unread)
    assert unread.job.level == 4
    engine.begin_step()
    assert unread.job.level == 0 and unread.job.state is JobState.RUNNING
    assert background.job.preemptions == 1


def test_predicted_level_is_judged_by_the_bound_of_its_tier() -> None:
    tiers = [{"name": str(n)} for n in range(4)] + [{"name": "4", "queue": {"requests": 1}}]
    core, engine = make_world({"tiers": tiers}, seats=1)
    for index in range(2):  # one runs, one waits: tier 4 is full
        arrive(core, engine, index, urgency=4)
        if index == 0:
            engine.begin_step()
            engine.end_step()
    unread = arrive(core, engine, 2, prediction=Prediction((0.0, 0.0, 0.0, 0.0, 1.0), (1.0, 0.0)))
    engine.predicted(unread)
    engine.begin_step()
    assert unread.refused == "over_capacity"


def test_simulation_drops_requests_of_a_tier_with_drop() -> None:
    tiers = [{"name": "0"}, {"name": "1", "drop": True}]
    policy = {
        "levels": 2,
        "default_level": 0,
        "tiers": tiers,
        "preemption": {"max_per_request": 999},
        "predictor": {"enabled": False},
    }
    requests = [SimRequest(0, 0.0, 1, 4000, 300)]
    requests += [SimRequest(n, n * 0.5, 0, 10, 2) for n in range(1, 100)]
    runs = drive(policy, requests, seats=1)
    assert runs[0].refused == "dropped" and runs[0].finish is None
    assert all(run.finish is not None for run in runs[1:])


def test_prefill_for_which_others_sat_out_in_vain_counts_once_it_runs() -> None:
    """It takes tokens of the step: uncounted, it would take those of the decodes behind it."""
    core, engine = make_world({"predictor": {"enabled": False}}, seats=3, token_budget=100)
    for index in range(2):
        arrive(core, engine, index, urgency=2)
    engine.begin_step()
    engine.end_step()
    long = Run(SimRequest(2, 0.0, 0, 500, 9), _job(core, 500), None)
    engine.submit(long)
    engine.step.sharing._in_vain = {long.job: 0}
    for _ in range(3):
        engine.begin_step()
        assert sum(engine._chunks.values()) + len(engine._decoding) <= 100
        engine.end_step()
    assert long.job.computed > 250


def _job(core, prompt_tokens: int):
    hint = core.read_hints({"urgency": 0}, 0)
    return core.arrive(core.draft("long", prompt_tokens, 500, hint, False), 0.0)
