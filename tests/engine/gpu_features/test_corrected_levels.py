"""Levels that change while a request waits: a request is treated as if they had been known."""

from types import SimpleNamespace

import pytest
from engine_steps import EngineSteps

from vllm_semantic_sched.lab.bench.standalone import StubReader
from vllm_semantic_sched.policy.facts.prediction import Prediction

pytestmark = pytest.mark.engine

LEVELS = 5
TIERS = (
    "predictor: {enabled: false}\n"
    "tiers: [{name: a}, {name: b, slo: {ttft: 1.0, takes_seats: true}},"
    " {name: c}, {name: d}, {name: e}]\n"
    "deadlines: {enabled: true}\n"
)


def read_as(level: int) -> Prediction:
    return Prediction(tuple(0.96 if at == level else 0.01 for at in range(LEVELS)), None)


class ScriptedReader(StubReader):
    """The predictor's service, with answers when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[tuple[str, Prediction]] = []

    def drain(self) -> list[tuple[str, Prediction]]:
        answers, self.answers = self.answers, []
        return answers


def read_texts_as(scheduler, level: int) -> ScriptedReader:
    """The instant reader says this level of all texts; returns the second reader."""
    feed, reader = scheduler.predictions, ScriptedReader()
    feed.service, feed.tokenizer = reader, SimpleNamespace(decode=lambda tokens: "text")
    feed.instant = SimpleNamespace(read=lambda text: read_as(level), same_shape=lambda other: False)
    return reader


@pytest.fixture
def fill(build, clock_of):
    """Builds an engine whose four seats have level 3, dear to preempt; seats came free every 10 ms
    before."""

    def fill(policy: str = ""):
        scheduler = build(policy, hints_only=False, max_num_batched_tokens=20_000)
        clock, steps = clock_of(scheduler), EngineSteps(scheduler)
        for number in range(3):
            steps.add(f"early{number}", urgency=3, output_tokens=1)
            steps.run()
            clock.now += 0.01
        steps.add(*"abcd", urgency=3, prompt_tokens=1400, output_tokens=2000)
        steps.run(2)
        assert len(scheduler.running) == 4
        return steps, clock

    return fill


def steps_until_seat(steps: EngineSteps, clock, limit: int = 60) -> int:
    for step in range(limit):
        if "x" in steps.first:
            return step
        clock.now += 0.01
        steps.run()
    return limit


def test_request_corrected_upward_gets_its_seat_as_if_told_so(fill) -> None:
    steps, clock = fill()
    steps.add("x", urgency=0, output_tokens=5)
    told = steps_until_seat(steps, clock)
    steps, clock = fill()
    reader = read_texts_as(steps.scheduler, level=1)
    steps.add("x", output_tokens=5)
    steps.run(2)
    assert steps.scheduler.jobs["x"].level == 1 and "x" not in steps.first  # victims are too dear
    reader.answers = [("x", read_as(0))]
    assert steps_until_seat(steps, clock) <= told + 1
    assert steps.scheduler.jobs["x"].level == 0


def test_prediction_that_cannot_be_applied_leaves_the_others(build, monkeypatch) -> None:
    scheduler = build(max_num_seqs=2, hints_only=False)
    reader, steps = read_texts_as(scheduler, level=3), EngineSteps(scheduler)
    steps.add("running1", "running2", urgency=2, output_tokens=500)
    steps.run(2)
    names = [f"text{number}" for number in range(6)]
    steps.add(*names, output_tokens=5)
    steps.run()
    apply = scheduler.core.levels.read

    def fail_once(job, prediction) -> None:
        if job.request_id == names[0]:
            raise ValueError("injected")
        apply(job, prediction)

    monkeypatch.setattr(scheduler.core.levels, "read", fail_once)
    reader.answers = [(name, read_as(0)) for name in names]
    steps.run()
    assert steps.scheduled[-1].keys() == set(names[1:3])
    for name in names[1:]:
        job = scheduler.jobs[name]
        assert job.level == 0 and not job.awaits_prediction, name
    assert scheduler.counters.total("policy_errors") == 1
