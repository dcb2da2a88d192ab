"""The sequence of a scheduling step, on snapshots of the simulated engine."""

import pickle
from collections import deque
from contextlib import contextmanager
from enum import Enum

import pytest
from drive import PROFILE, drive

from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.job import JobState
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets, Prediction
from vllm_semantic_sched.policy.snapshot import Room, Snapshot
from vllm_semantic_sched.policy.step import step
from vllm_semantic_sched.sim.engine import Engine
from vllm_semantic_sched.sim.request import Run, SimRequest
from vllm_semantic_sched.sim.sections import EngineModel

PARTS = [
    "virtual_time",
    "predictions",
    "estimates",
    "overdue",
    "reservations",
    "idle_check",
    "room",
    "holds",
    "prefill_limits",
]
ABOUT_WAITING = {
    "is_ready",
    "needed_blocks",
    "cached_tokens",
    "obstacles",
}  # the other questions: a running job


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


class WatchedGuard:
    """Counts the parts of a step, and lets errors through or not."""

    def __init__(self, lenient: bool) -> None:
        self.lenient = lenient
        self.parts: list[str] = []
        self.failed: list[str] = []

    @contextmanager
    def __call__(self, doing: str):
        self.parts.append(doing)
        try:
            yield
        except Exception:
            self.failed.append(doing)
            if not self.lenient:
                raise


def test_parts_run_in_order_and_an_error_skips_only_its_part(monkeypatch) -> None:
    core, engine = make_world({}, seats=1)
    arrive(core, engine, 0, urgency=4)
    engine.begin_step()
    engine.end_step()
    arrive(core, engine, 1, urgency=0)

    def broken(*args):
        raise RuntimeError("broken")

    monkeypatch.setattr(core, "revise", broken)
    with pytest.raises(RuntimeError):
        step(core, engine.snapshot(), 0.0, WatchedGuard(lenient=False))
    guard = WatchedGuard(lenient=True)
    orders = step(core, engine.snapshot(), 0.0, guard)
    assert guard.parts == PARTS and guard.failed == ["estimates"]
    assert [victim.job.request_id for victim in orders.preempt] == ["0"]


def frozen(core: SchedulingCore) -> bytes:
    """Everything that the policy remembers."""
    return pickle.dumps(copied(core))


def copied(value, seen=None):
    """Plain values of an object and all that it refers to."""
    seen = {} if seen is None else seen
    if isinstance(value, (int, float, str, bytes, bool, type(None), Enum)) or callable(value):
        return repr(value) if not callable(value) else "callable"
    if id(value) in seen:
        return ("seen", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, dict):
        return [(copied(key, seen), copied(value[key], seen)) for key in value]
    if isinstance(value, (list, tuple, set, deque)):
        return [copied(item, seen) for item in value]
    slots = [name for owner in type(value).__mro__ for name in getattr(owner, "__slots__", ())]
    names = [*getattr(value, "__dict__", ()), *slots]
    return [(name, copied(getattr(value, name, None), seen)) for name in names]


def test_no_question_to_a_snapshot_changes_the_state() -> None:
    """Neither that of the policy nor that of a request."""
    core, engine = make_world({"protect": {"level": 0}}, seats=2, kv_blocks=200, swap=True)
    for index, urgency in enumerate((4, 3, 0)):
        arrive(core, engine, index, urgency)
        engine.begin_step()
        engine.end_step()
    snapshot, before = engine.snapshot(), frozen(core)
    jobs = {"running": list(core.running), "waiting": list(core.waiting)}
    assert all(jobs.values())
    for name, question in vars(Snapshot).items():
        if name.startswith("_"):
            continue
        if isinstance(question, property):
            getattr(snapshot, name)
            continue
        for job in jobs["waiting" if name in ABOUT_WAITING else "running"]:
            getattr(snapshot, name)(*((job, 10) if name == "host_room" else (job,)))
    assert frozen(core) == before
    step(core, snapshot, 0.0, WatchedGuard(lenient=False))
    assert frozen(core) != before


def test_orders_are_applied_after_all_decisions() -> None:
    """The engine is as it was while a step is decided, and so is what a snapshot says of it."""
    core, engine = make_world({}, seats=1)
    running = arrive(core, engine, 0, urgency=4)
    engine.begin_step()
    engine.end_step()
    arrive(core, engine, 1, urgency=0)
    snapshot = engine.snapshot()
    orders = step(core, snapshot, 0.0, WatchedGuard(lenient=False))
    assert [victim.job for victim in orders.preempt] == [running.job]
    assert running.job.state is JobState.WAITING and engine.running == [running.job]
    assert snapshot.seats == 0


def test_victim_of_a_step_is_no_longer_asked_about_as_a_waiting_request() -> None:
    """In the snapshot it still runs: vLLM has no answer then."""
    core, engine = make_world({}, seats=1, kv_blocks=100)
    running = arrive(core, engine, 0, urgency=4)
    for _ in range(3):
        engine.begin_step()
        engine.end_step()
    snapshot = engine.snapshot()
    held, room = snapshot.freeable_blocks(running.job), Room(snapshot)
    before = room.blocks
    room.free(running.job)
    assert room.needed_blocks(running.job) == held + snapshot.next_blocks(running.job)
    assert room.blocks == before + room.needed_blocks(running.job)
    assert room.seats == 1 and room.holds(running.job)


def test_plan_of_a_victim_is_computed_once(monkeypatch) -> None:
    """To sort, to compare its price with what the room is worth, and to carry it out."""
    core, engine = make_world({"preemption": {"victim": "cost"}}, seats=2, kv_blocks=200, swap=True)
    for index in range(2):
        arrive(core, engine, index, urgency=4)
        engine.begin_step()
        engine.end_step()
    arrive(core, engine, 2, urgency=0)
    planned = []
    plan = core.plan_preemption

    def counted(job, *args):
        planned.append(job.request_id)
        return plan(job, *args)

    monkeypatch.setattr(core, "plan_preemption", counted)
    orders = step(core, engine.snapshot(), 0.0, WatchedGuard(lenient=False))
    assert len(orders.preempt) == 1 and sorted(planned) == ["0", "1"]


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
    assert background.job.preempted.times == 0 and background.job.state is JobState.RUNNING


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
    assert background.job.preempted.times == 1


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


def test_prefill_others_sat_out_for_counts_once_it_runs() -> None:
    """It takes tokens of the step: uncounted, it would take those of the decodes behind it."""
    core, engine = make_world({"predictor": {"enabled": False}}, seats=3, token_budget=100)
    for index in range(2):
        arrive(core, engine, index, urgency=2)
    engine.begin_step()
    engine.end_step()
    long = Run(SimRequest(2, 0.0, 0, 500, 9), _job(core, 500), None)
    engine.submit(long)
    core.sharing._in_vain = {long.job: 0}
    for _ in range(3):
        engine.begin_step()
        assert sum(engine._chunks.values()) + len(engine.decoding) <= 100
        engine.end_step()
    assert long.job.computed > 250


def _job(core, prompt_tokens: int):
    hint = core.read_hints({"urgency": 0}, 0)
    return core.arrive(core.draft("long", prompt_tokens, 500, hint, False), 0.0)
