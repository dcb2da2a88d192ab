"""What crosses the border between policy and engine in a step."""

import sys
from collections import Counter
from pathlib import Path

import pytest

import vllm_semantic_sched
from vllm_semantic_sched import SemanticScheduler
from vllm_semantic_sched.lab.bench.standalone import build_scheduler, make_request, run_step

pytestmark = pytest.mark.engine

PACKAGE = str(Path(vllm_semantic_sched.__file__).parent) + "/"

# Who is told of errors and of changes of state, and the clock of the record.
LISTENERS = {"guard.py", "clock.py", "metrics/gauges.py"}


class Border:
    """Calls from a file of one package into one of the other."""

    def __init__(self) -> None:
        self.into_policy: Counter[str] = Counter()
        self.into_engine: Counter[str] = Counter()

    def __call__(self, frame, event, argument) -> None:
        if event != "call" or frame.f_back is None:
            return
        caller, callee = (part_of(each) for each in (frame.f_back, frame))
        if caller.startswith("engine/") and callee.startswith("policy/"):
            self.into_policy[frame.f_code.co_qualname] += 1
        if caller.startswith("policy/") and callee.startswith("engine/"):
            self.into_engine[callee.removeprefix("engine/")] += 1


def part_of(frame) -> str:
    return frame.f_code.co_filename.removeprefix(PACKAGE)


@pytest.fixture
def about_to_preempt(tmp_path) -> SemanticScheduler:
    """A scheduler with all seats taken and an urgent request that waits."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("predictor: {enabled: false}\n")
    settings = {"policy": str(policy)}
    scheduler = build_scheduler(SemanticScheduler, semantic_sched=settings, max_num_seqs=3)
    for name in "abc":
        scheduler.add_request(make_request(name, urgency=4, output_tokens=30))
    for _ in range(3):
        run_step(scheduler)
    scheduler.add_request(make_request("urgent", urgency=0, output_tokens=30))
    return scheduler


def test_preemption_crosses_the_border_twice(about_to_preempt, monkeypatch) -> None:
    """Once for the decision, and once to confirm that the job is in the queue again."""
    scheduler, border = about_to_preempt, Border()
    apply, before_step = scheduler.applier.apply, scheduler.before_step
    ordered = []

    def watched(orders) -> None:
        ordered.extend(orders.preempt)
        sys.setprofile(border)
        try:
            apply(orders)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(scheduler.applier, "apply", watched)
    before_step()
    assert [victim.reason for victim in ordered] == ["urgent"]
    assert border.into_policy == {"WaitingQueue.__contains__": 1}


def test_decisions_ask_nothing_but_the_snapshot(about_to_preempt) -> None:
    scheduler, border = about_to_preempt, Border()
    sys.setprofile(border)
    try:
        scheduler.before_step()
    finally:
        sys.setprofile(None)
    assert border.into_policy["step"] == 1
    assert set(border.into_engine) - LISTENERS == {"snapshot.py"}
