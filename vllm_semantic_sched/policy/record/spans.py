"""Draws when each request had a seat, simulated or logged: Gantt charts and Chrome traces."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LEVEL_COLORS = ("#c0392b", "#e08e0b", "#27915b", "#2f7ebc", "#7d6aa8", "#8c8c8c")
# Kinds of phases.
RUNNING = "running"
WAITING = "waiting"
SWAPPED = "swapped"
HELD = "held"  # the kind of a span in which a request had a seat and got no token
ON_HOST = ("swap", "partial")  # ways of preemption that leave KV on the host
_MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True)
class Span:
    """A request's time in a seat, or a part of it in which the request was held (`HELD`); times in
    seconds on one clock. A request that never had a seat has one span of length zero.

    `end_kind`: why it ended: `finish`, `failed`, `cancelled`, `refused`, or what a preemption did
    with the KV (`recompute`, `swap`, `partial`, `drop`). Other words are drawn grey.
    """

    request: int | str
    level: int
    arrival: float
    start: float
    end: float
    end_kind: str
    engine: int = 0
    held: float = 0.0  # seconds of it without a token, because the request was held


def phases(spans: Iterable[Span]) -> Iterator[tuple[str, float, float, Span]]:
    """Yield kind, start and end of each span (by time within each request) and, before a time in a
    seat, of the wait for it: `RUNNING`, `HELD`, `WAITING`, or `SWAPPED` while the KV of a preempted
    request is on the host."""
    waits: dict[tuple[int, int | str], tuple[float, str]] = {}  # start and kind of the next wait
    for span in spans:
        if span.end_kind == HELD:
            yield HELD, span.start, span.end, span
            continue
        key = (span.engine, span.request)
        since, wait = waits.get(key, (span.arrival, WAITING))
        if span.start > since:
            yield wait, since, span.start, span
        waits[key] = (span.end, SWAPPED if span.end_kind in ON_HOST else WAITING)
        yield RUNNING, span.start, span.end, span


def chrome_trace(
    spans: Iterable[Span], depths: Sequence[tuple[float, Mapping[str, float]]] = ()
) -> dict[str, Any]:
    """Make a trace in Chrome's JSON format, for Perfetto or chrome://tracing: a process per engine,
    a thread per request in order of first appearance, a slice for each time in a seat, each hold
    and each wait for a seat, and (seconds, counts by name) of `depths` as a counter. Spans are
    ordered by time within each request."""
    events: list[dict[str, Any]] = []
    threads: dict[tuple[int, int | str], int] = {}
    for phase, start, end, span in phases(spans):
        key = (span.engine, span.request)
        place = {"pid": span.engine, "tid": threads.get(key, len(threads) + 1)}
        if key not in threads:
            threads[key] = place["tid"]
            name = f"request {span.request} (level {span.level})"
            events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": name}})
        title = phase
        args: dict[str, Any] = {"level": span.level, "end": span.end_kind}
        if phase == RUNNING:
            title = f"running, {span.end_kind}" if end > start else span.end_kind
            if span.held:
                args["held_seconds"] = span.held
        times = {"ts": start * _MICROSECONDS, "dur": (end - start) * _MICROSECONDS}
        level = {"cat": f"level {span.level}"}
        events.append({"ph": "X", "name": title, **level, **place, **times, "args": args})
    for engine in sorted({engine for engine, _ in threads}):
        label = {"name": f"engine {engine}"}
        events.append({"ph": "M", "name": "process_name", "pid": engine, "tid": 0, "args": label})
    counter = {"ph": "C", "name": "queue depth", "pid": 0, "tid": 0}
    for time, counts in depths:
        events.append(counter | {"ts": time * _MICROSECONDS, "args": dict(counts)})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def level_color(level: int) -> str:
    """As hexadecimal digits of red, green and blue; levels beyond the last color start again."""
    return LEVEL_COLORS[level % len(LEVEL_COLORS)]
