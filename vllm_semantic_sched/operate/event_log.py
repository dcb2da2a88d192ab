"""Follows requests through a server's event log, line by line, and sums them up per tier."""

import contextlib
import itertools
import json
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_semantic_sched.policy.record.spans import HELD, Span

END_STATES = ("completed", "failed", "cancelled", "refused")
UNSEATED = ("queued", "swapped")
_STATES = {"running", *UNSEATED, *END_STATES}
_DEPTH_INTERVAL = 0.1  # seconds; more points than that cannot be told apart in a chart


@dataclass(slots=True)
class LoggedRequest:
    """A request as the log shows it. Times are seconds since the first line of the log."""

    request: str
    engine: int
    level: int
    tier: str
    arrival: float  # time of the first line about it
    whole: bool  # whether that was its arrival
    keeps_spans: bool
    state: str = "queued"
    seated: float | None = None  # since when it has its present seat
    first_seat: float | None = None
    first_token: float | None = None
    end: float | None = None
    preemptions: Counter[str] = field(default_factory=Counter)  # by what happened to the KV
    held: float = 0.0  # seconds in which it had a seat and got no token
    spans: list[Span] = field(default_factory=list)

    def end_span(self, now: float, kind: str) -> None:
        """Close the span of the present seat. A request without a seat gets an empty span, which
        shows it in the chart."""
        start = now if self.seated is None else self.seated
        self.keep_span(start, now, kind)
        self.seated = None

    def keep_span(self, start: float, end: float, kind: str) -> None:
        """Add a span to those of a chart, unless the reader leaves this request out of it."""
        if self.keeps_spans:
            span = Span(self.request, self.level, self.arrival, start, end, kind, self.engine)
            self.spans.append(span)


class LogReader:
    """Reads requests from a log. Only unfinished requests stay in memory. Spans are kept of the
    first `limit` requests that arrive more than `since` seconds after the first line."""

    def __init__(self, limit: int, since: float = 0.0) -> None:
        self.unreadable = 0  # lines that are not events, as a full disk leaves them
        # Time and waiting requests by tier, while requests with spans are unfinished.
        self.depths: list[tuple[float, dict[str, float]]] = []
        self._limit = limit
        self._since = since
        self._kept = 0
        self._unfinished_kept = 0
        self._start: float | None = None
        self._now = 0.0
        self._requests: dict[tuple[int, str], LoggedRequest] = {}
        self._waiting: Counter[str] = Counter()

    def requests(self, path: Path) -> Iterator[LoggedRequest]:
        """Yield each request when it ends, and after the last line the unfinished ones. OSError if
        the log cannot be read."""
        for line in lines_of(path):
            if not line.strip():
                continue
            try:
                ended = self._read(json.loads(line))
            except (ValueError, KeyError, TypeError):
                self.unreadable += 1
                continue
            if ended is not None:
                yield ended
        for request in self._requests.values():
            if request.seated is not None:
                request.end_span(self._now, "unfinished")
            yield request

    def _read(self, event: dict[str, Any]) -> LoggedRequest | None:
        """Apply one event; returns the request if it has ended."""
        if "log" in event:  # about the log itself or the engine
            return None
        state = event["state"]
        if state not in _STATES:
            raise ValueError(state)
        key = (int(event["engine"]), str(event["request"]))
        level = int(event["level"])
        tier = str(event["tier"])
        time = float(event["time"])
        if self._start is None:
            self._start = time
        now = self._now = time - self._start
        request = self._requests.get(key)
        decides = event["from"] == state and "held" not in event  # no change of state
        if request is None:
            if decides:
                return None
            request = self._requests[key] = self._begin(event, now)
        elif request.state in UNSEATED:
            self._waiting[request.tier] -= 1
        request.level = level
        request.tier = tier
        request.state = state
        if event.get("first_token") is not None:
            request.first_token = float(event["first_token"]) - self._start
        if "held" in event:
            seconds = float(event["held"])
            request.held += seconds
            request.keep_span(max(now - seconds, request.seated or 0.0), now, HELD)
        elif not decides:
            self._change_state(request, event, now)
        if state in UNSEATED:
            self._waiting[tier] += 1
        self._keep_depths(now)
        return self._requests.pop(key) if state in END_STATES else None

    def _begin(self, event: dict[str, Any], now: float) -> LoggedRequest:
        """The record of a request that appears in the log for the first time."""
        keeps_spans = self._kept < self._limit and now >= self._since
        self._kept += keeps_spans
        self._unfinished_kept += keeps_spans
        return LoggedRequest(
            request=str(event["request"]),
            engine=int(event["engine"]),
            level=int(event["level"]),
            tier=str(event["tier"]),
            arrival=now,
            whole=event["from"] is None,
            keeps_spans=keeps_spans,
            seated=now if event["from"] == "running" else None,
        )

    def _keep_depths(self, now: float) -> None:
        if not self._unfinished_kept:
            return
        if not self.depths or now - self.depths[-1][0] >= _DEPTH_INTERVAL:
            self.depths.append((now, dict(self._waiting)))

    def _change_state(self, request: LoggedRequest, event: dict[str, Any], now: float) -> None:
        state = request.state
        if state == "running":
            request.seated = now
            if request.first_seat is None and request.whole:
                request.first_seat = now
        elif state in END_STATES:
            request.end = now
            kind = "finish" if state == "completed" else state
            request.end_span(now, kind)
            self._unfinished_kept -= request.keeps_spans
        elif request.seated is not None:
            kind = event.get("plan") or event.get("reason") or "recompute"
            request.preemptions[kind] += 1
            request.end_span(now, kind)


def logs_in(paths: Iterable[Path]) -> list[Path]:
    """Event logs among files and in folders, without their rotated parts."""
    logs: list[Path] = []
    for path in paths:
        if path.is_dir():
            logs += sorted(path.glob("*.jsonl"))
        else:
            logs.append(path)
    return logs


def key_of(log: Path) -> bytes:
    """The key of a log's hashes; empty without one. All engines of a server use that of the first,
    whose log has no number."""
    for name in (log.name, re.sub(r"-\d+(?=\.|$)", "", log.name)):
        with contextlib.suppress(FileNotFoundError):
            return log.with_name(f"{name}.key").read_bytes()
    return b""


def log_parts(path: Path) -> list[Path]:
    """A log and its rotated parts (`PATH.1` is the newest of them), oldest first."""
    older = (Path(f"{path}.{number}") for number in itertools.count(1))
    return [*reversed(list(itertools.takewhile(Path.exists, older))), path]


def lines_of(path: Path) -> Iterator[str]:
    """Lines of a log and its rotated parts, oldest first."""
    for part in log_parts(path):
        with part.open(encoding="utf-8", errors="replace", newline="\n") as lines:
            yield from lines


def events_in(path: Path, wanted: str = "") -> Iterator[dict[str, Any]]:
    """Events in a log and its rotated parts, oldest first. Leaves out lines that a full disk has
    cut; `wanted`: takes only lines with this text."""
    for line in lines_of(path):
        if wanted in line:
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict):
                    yield event


class TierSummary:
    """Counts and times of one tier; `held` is in seconds. Takes 8 bytes per request and time."""

    def __init__(self) -> None:
        self.states: Counter[str] = Counter()
        self.preemptions: Counter[str] = Counter()
        self.held = 0.0
        self.times = {name: array("d") for name in ("queueing_delay", "ttft", "e2e")}

    def add(self, request: LoggedRequest) -> None:
        """Count a request that has ended or is left unfinished."""
        self.states[request.state if request.end is not None else "unfinished"] += 1
        self.preemptions.update(request.preemptions)
        self.held += request.held
        if not request.whole:
            return
        completed = request.end if request.state == "completed" else None
        moments = (request.first_seat, request.first_token, completed)
        for times, moment in zip(self.times.values(), moments, strict=True):
            if moment is not None:
                times.append(moment - request.arrival)

    def row(self) -> dict[str, Any]:
        """Number of requests, counts by last state, preemptions by kind, seconds held, and
        50th and 99th percentiles in seconds (None without values)."""
        import numpy as np

        row: dict[str, Any] = {"requests": self.states.total()}
        row |= {state: self.states[state] for state in (*END_STATES, "unfinished")}
        row |= {"preemptions": dict(self.preemptions), "held": self.held}
        for name, times in self.times.items():
            for rank in (50, 99):
                row[f"{name}_p{rank}"] = float(np.percentile(times, rank)) if times else None
        return row
