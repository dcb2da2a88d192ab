"""Interactive Gantt charts of seats."""

import pytest
from small_scenario import SMALL

from vllm_semantic_sched.lab.report.gantt import MOST_BARS, gantt_chart
from vllm_semantic_sched.policy.record.spans import HELD, Span, level_color
from vllm_semantic_sched.sim.runner import run_task, tasks_of
from vllm_semantic_sched.sim.scenario import parse_scenarios


def _span(request: int, start: float, kind: str = "finish") -> Span:
    return Span(request, request % 2, 0.0, start, start + 1.0, kind)


def test_marks_by_phase() -> None:
    spans = [_span(0, 0.5, "swap"), _span(1, 1.5), _span(0, 3.0, HELD), _span(0, 3.0)]
    chart = gantt_chart("t", spans, requests=2)
    marks = {mark.name: mark for mark in chart.marks}
    assert [*marks] == [
        *("swapped", "waiting", "level 0", "level 1", "held"),
        *("swap", "finish", "arrival"),
    ]
    ((left, right, *_),) = marks["swapped"].boxes
    assert (left, right) == (1.5, 3.0)
    assert [right for _, right, *_ in marks["waiting"].boxes] == [0.5, 1.5]
    assert [left for left, *_ in marks["level 0"].boxes] == [0.5, 3.0]
    assert marks["level 0"].color == level_color(0)
    ((_, _, bottom, _, _),) = marks["level 1"].boxes
    assert bottom == pytest.approx(0.6)  # the second row
    assert [left for left, *_ in marks["held"].boxes] == [3.0]
    assert "are shown" not in chart.note


def test_sentence_compares_waits_with_the_reference() -> None:
    spans = [_span(0, 0.5, "recompute"), _span(1, 3.0), _span(0, 3.0), _span(2, 0.5)]
    before = [_span(0, 2.0), _span(1, 1.0)]
    chart = gantt_chart("t", spans, requests=3, reference=("FCFS", before))
    assert chart.sentence == (
        "Half of level 0 had a seat within 0.5 s (FCFS: 2 s; 4 times less); half of level 1 had a "
        "seat within 3 s (FCFS: 1 s; 3 times as long)."
    )
    assert gantt_chart("t", [], requests=0).sentence == ""


def test_number_of_bars_is_bounded_and_said() -> None:
    preempted = [_span(0, float(n), "recompute") for n in range(MOST_BARS - 5)]
    others = [_span(n, 1.0) for n in range(1, 100)]
    chart = gantt_chart("t", [*preempted, *others], requests=5000)
    bars = sum(len(mark.boxes) for mark in chart.marks if mark.name.startswith("level"))
    assert bars == MOST_BARS
    assert "6 of 5000 requests are shown (at most 1500 bars)" in chart.note


def test_one_request_with_too_many_bars_is_cut() -> None:
    chart = gantt_chart("t", [_span(0, float(n)) for n in range(2 * MOST_BARS)], requests=1)
    bars = sum(len(mark.boxes) for mark in chart.marks if mark.name.startswith("level"))
    assert bars == MOST_BARS


def test_simulator_says_when_requests_were_held() -> None:
    """Its holds lie within their seats and last as long as the seats say."""
    (scenario,) = parse_scenarios(
        SMALL
        | {"engine": SMALL["engine"] | {"profile": "cpu-2core-small"}}
        | {"overrides": {"protect": {"level": 0, "price": 0.2}}}  # so that some holds pay
    )
    outcome = run_task(tasks_of([scenario])[0])
    seats = [span for span in outcome.spans if span.end_kind != HELD]
    holds = [span for span in outcome.spans if span.end_kind == HELD]
    assert holds
    for hold in holds:
        assert any(
            seat.request == hold.request and seat.start <= hold.start and hold.end <= seat.end
            for seat in seats
        )
    total = sum(hold.end - hold.start for hold in holds)
    assert total == pytest.approx(sum(seat.held for seat in seats))
    held_mean = outcome.levels["all"]["held_mean"] * outcome.levels["all"]["count"]
    assert total == pytest.approx(held_mean)
