"""From the lines of an event log to the lives of requests, one line at a time."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_semantic_sched.spans import Span

ENDS = ("completed", "failed", "cancelled", "refused")
_STATES = {"queued", "running", "swapped", *ENDS}


@dataclass(slots=True)
class Life:
    """A request, as far as the log tells. Times are seconds since the log's first line.

    Attributes:
        arrival: when it is first mentioned; its arrival, unless the log begins later (`whole`).
        first_seat, first_token, end: None if it got none, or the log ends before.
        outcome: its last state.
        preemptions: by what happened to the KV.
        spans: times in a seat, if they are kept.
    """

    request: str
    engine: int
    level: int
    tier: str
    arrival: float
    whole: bool
    keeps_spans: bool
    outcome: str = "queued"
    seated: float | None = None
    first_seat: float | None = None
    first_token: float | None = None
    end: float | None = None
    preemptions: Counter[str] = field(default_factory=Counter)
    spans: list[Span] = field(default_factory=list)

    def end_span(self, until: float, kind: str) -> None:
        """Its time in the seat is over; a request that never had one gets an empty span, so
        that it can be seen."""
        start = self.seated if self.seated is not None else until
        self.seated = None
        if self.keeps_spans:
            self.spans.append(
                Span(self.request, self.level, self.arrival, start, until, kind, self.engine)
            )


class LogReader:
    """Follows requests through a log; memory is that of the unfinished ones.

    Args:
        limit: requests whose spans are kept, in order of arrival.
        since: seconds after the first line from which on they are.

    Attributes:
        unreadable: lines that are no events, as a full disk leaves them.
        depths: waiting requests by tier over the time of the kept requests.
        last: time of the last line.
    """

    def __init__(self, limit: int, since: float = 0.0) -> None:
        self.unreadable = 0
        self.depths: list[tuple[float, dict[str, float]]] = []
        self.last = 0.0
        self._limit = limit
        self._since = since
        self._kept = 0
        self._open_kept = 0
        self._begin: float | None = None
        self._lives: dict[tuple[int, str], Life] = {}
        self._waiting: Counter[str] = Counter()

    def lives(self, path: Path) -> Iterator[Life]:
        """Requests as they end; last, those that the log leaves unfinished.

        Raises:
            OSError: the log cannot be read.
        """
        for part in log_parts(path):
            with part.open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    if not line.strip():
                        continue
                    try:
                        ended = self._take(json.loads(line))
                    except (ValueError, KeyError, TypeError):
                        self.unreadable += 1
                        continue
                    if ended is not None:
                        yield ended
        for life in self._lives.values():
            if life.seated is not None:
                life.end_span(self.last, "unfinished")
            yield life

    def _take(self, event: dict[str, Any]) -> Life | None:
        """Follow one event; the request if it is over."""
        state, engine, request = event["state"], int(event["engine"]), str(event["request"])
        if state not in _STATES:
            raise ValueError(state)
        level, tier, moment = int(event["level"]), str(event["tier"]), float(event["time"])
        if self._begin is None:
            self._begin = moment
        now = self.last = moment - self._begin
        key = (engine, request)
        life = self._lives.get(key)
        if life is None:
            life = self._lives[key] = self._arrived(event, now)
            life.seated = now if event["from"] == "running" else None
        elif life.outcome in ("queued", "swapped"):
            self._waiting[life.tier] -= 1
        life.level, life.tier = level, tier
        life.outcome = state
        if event.get("first_token") is not None:
            life.first_token = float(event["first_token"]) - self._begin
        self._move(life, state, event, now)
        self._note_depth(now)
        return self._lives.pop(key) if state in ENDS else None

    def _arrived(self, event: dict[str, Any], now: float) -> Life:
        keeps = self._kept < self._limit and now >= self._since
        self._kept += keeps
        self._open_kept += keeps
        return Life(
            str(event["request"]),
            int(event["engine"]),
            int(event["level"]),
            str(event["tier"]),
            arrival=now,
            whole=event["from"] is None,
            keeps_spans=keeps,
        )

    def _move(self, life: Life, state: str, event: dict[str, Any], now: float) -> None:
        if state == "running":
            life.seated = now
            if life.first_seat is None and life.whole:
                life.first_seat = now
        elif state in ENDS:
            life.end = now
            life.end_span(now, "finish" if state == "completed" else state)
            self._open_kept -= life.keeps_spans
        else:
            self._waiting[life.tier] += 1
            if life.seated is not None:
                kind = event.get("plan") or event.get("reason") or "recompute"
                life.preemptions[kind] += 1
                life.end_span(now, kind)

    def _note_depth(self, now: float) -> None:
        # Ten points a second are more than a picture of it can show.
        if self._open_kept and (not self.depths or now - self.depths[-1][0] >= 0.1):
            self.depths.append((now, {tier: n for tier, n in self._waiting.items()}))


def log_parts(path: Path) -> list[Path]:
    """A log and its renamed older parts (`PATH.1` is the newest of them), oldest first."""
    older = (Path(f"{path}.{number}") for number in itertools.count(1))
    return [*reversed(list(itertools.takewhile(Path.exists, older))), path]
