"""Sessions, stated deadlines and ranks by uncached work cost a step nothing while they are off."""

import linecache
import re
import sys
from pathlib import Path

import pytest
from schedulers import build_ours

import vllm_semantic_sched
from vllm_semantic_sched.engine.snapshot import VllmSnapshot
from vllm_semantic_sched.lab.bench.standalone import make_request, model_output
from vllm_semantic_sched.policy.order.seating import Seating
from vllm_semantic_sched.policy.order.uncached import UncachedWork
from vllm_semantic_sched.policy.sessions import Sessions

pytestmark = pytest.mark.engine

ON = "sessions: {memory: 600}\ndeadlines: {stated: true}\nrank_uncached: true\n"
# Where the work of each feature begins.
ENTRIES = [
    (Sessions, "begin"),
    (Sessions, "arrived"),
    (Sessions, "decided"),
    (Sessions, "floors"),
    (UncachedWork, "add"),
    (UncachedWork, "refresh"),
    (VllmSnapshot, "cached_tokens"),
    (Seating, "start_by"),
    (Seating, "_latest_starts"),
]
FEATURES = re.compile(r"session|stated|uncached|start_by|latest_starts")
PACKAGE = str(Path(vllm_semantic_sched.__file__).parent)


def serve(scheduler, around_step=lambda schedule: schedule()) -> None:
    """Serve requests that name a session and state deadlines: more than there are seats."""
    for number in range(24):
        request = make_request(f"r{number}", 40, 12, urgency=number % 5)
        times = {"deadline_ms": 60_000, "slo_ttft_ms": 30_000}
        request.sampling_params.extra_args |= {"session": f"s{number % 3}"} | times
        scheduler.add_request(request)
        for _ in range(2):
            step = around_step(scheduler.schedule)
            scheduler.update_from_output(step, model_output(scheduler, step))
    while scheduler.has_requests():
        step = around_step(scheduler.schedule)
        scheduler.update_from_output(step, model_output(scheduler, step))
    scheduler.make_stats()


@pytest.mark.parametrize("policy", ["", ON])
def test_features_that_are_off_are_not_entered(tmp_path, monkeypatch, policy) -> None:
    entered = set()

    def watch(owner, name: str) -> None:
        original = getattr(owner, name)

        def call(*args, **kwargs):
            entered.add((owner, name))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for owner, name in ENTRIES:
        watch(owner, name)
    serve(build_ours(tmp_path, policy))
    assert entered == (set(ENTRIES) if policy else set())


def test_features_that_are_off_are_a_hundredth_of_a_step(tmp_path) -> None:
    """Counted in lines of this package that run in `schedule()`, those that mention a feature or
    are in its file against all: no busy machine changes that."""
    lines, about = 0, {}

    def trace(frame, event, argument):
        nonlocal lines
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            lines += 1
            place = frame.f_code.co_filename, frame.f_lineno
            if FEATURES.search(place[0].removeprefix(PACKAGE) + linecache.getline(*place)):
                about[place] = about.get(place, 0) + 1
        return trace

    def traced(schedule):
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return schedule()
        finally:
            sys.settrace(before)

    serve(build_ours(tmp_path), traced)
    assert lines > 10_000
    assert sum(about.values()) < 0.01 * lines, about
