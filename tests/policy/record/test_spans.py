"""Chrome traces and Gantt charts of seats."""

from vllm_semantic_sched.policy.record.spans import Span, chrome_trace

_SPANS = [
    Span("a", 4, arrival=0.0, start=0.5, end=1.0, end_kind="recompute"),
    Span("b", 0, arrival=1.0, start=1.0, end=2.0, end_kind="finish", engine=1),
    Span("a", 4, arrival=0.0, start=2.0, end=3.0, end_kind="finish"),
]


def test_chrome_trace_has_thread_per_request_slice_per_seat() -> None:
    trace = chrome_trace(_SPANS, depths=[(1.0, {"level 4": 1})])
    events = trace["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"]) for event in slices] == [
        ("waiting", 0.0, 0.5e6),
        ("running, recompute", 0.5e6, 0.5e6),
        ("running, finish", 1e6, 1e6),
        ("waiting", 1e6, 1e6),
        ("running, finish", 2e6, 1e6),
    ]
    assert [event["tid"] for event in slices] == [1, 1, 2, 1, 1]
    assert {event["pid"] for event in slices} == {0, 1}
    counter = next(event for event in events if event["ph"] == "C")
    assert counter["ts"] == 1e6 and counter["args"] == {"level 4": 1}


def test_chrome_trace_says_how_long_a_request_was_held() -> None:
    held = Span("a", 4, arrival=0.0, start=0.0, end=1.0, end_kind="finish", held=0.25)
    slices = [e for e in chrome_trace([held, _SPANS[1]])["traceEvents"] if e["ph"] == "X"]
    assert [event["args"].get("held_seconds") for event in slices] == [0.25, None]
