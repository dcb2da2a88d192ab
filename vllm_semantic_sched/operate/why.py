"""Explains from an event log why requests waited: causes that add up to the wait, and the requests
that got seats meanwhile."""

import contextlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vllm_semantic_sched.operate.event_log import END_STATES, UNSEATED, events_in, key_of
from vllm_semantic_sched.policy.record.event_format import hashed_id, keyed_hash
from vllm_semantic_sched.policy.record.spans import ON_HOST

Event = dict[str, Any]

_PHRASES = {
    "seat": "no seat",
    "kv": "KV short",
    "kv_peak": "KV kept for running requests",
    "tokens": "the step was full",
    "step": "until the next step",
    "paused": "engine paused",
    "tenant": "its tenant's limit",
    "reservation": "room reserved for more urgent tiers",
    "unread": "unread, and taken for less urgent",
    "not_ready": "not ready (grammar, adapter, KV)",
    "unknown": "not recorded",
}
NOT_RECORDED = _PHRASES["unknown"]  # the words for a part of a wait without a cause

_ROOM = ("seat", "kv", "kv_peak", "tokens")  # others have what it waits for
_TICK = 0.001  # seconds that do not count
_SHORT = 0.05  # seconds, shown as 0.0 s; a cause of less is left out beside others
_UNSURE = 0.05  # seconds between an event and its line, on a busy machine


class Delay(NamedTuple):
    """A part of a wait.

    `cause`: see `policy.facts.wait.Cause`, or `overtaken` (the latest seat went to a more urgent
    request), `preempted`, `held`, `restoring`.
    """

    cause: str
    seconds: float
    level: int | None = None  # of what it waited for; None: not for other requests
    blocker: str = ""  # the request that it waited for, if it is a single one
    # What a preemption did with the KV, or what was short for an overtaken request.
    detail: str = ""


@dataclass(slots=True)
class Account:
    """Why one request waited."""

    request: str
    engine: int
    lines: list[Event] = field(default_factory=list)  # its events
    delays: list[Delay] = field(default_factory=list)  # all that it waited for
    windows: list[tuple[float, float]] = field(default_factory=list)  # Unix times without a seat
    # Requests, with their level, that got seats in these windows, and the seconds until the next
    # one did.
    served: Counter[tuple[str, int]] = field(default_factory=Counter)

    @property
    def waited(self) -> float:
        """Seconds without a seat, held, or restoring KV."""
        return sum(delay.seconds for delay in self.delays)

    @property
    def last(self) -> Event:
        """The newest event of the request."""
        return self.lines[-1]


class Waits:
    """Follows the events of one request and finds its delays."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._preempted: Event = {}  # the last one that took its seat

    def follow(self, event: Event) -> tuple[list[Delay], tuple[float, float] | None]:
        """The delays that end with an event, and the times without a seat."""
        if "held" in event:
            return [_blocked("held", event["held"], event)], None
        if "restored" in event:
            plan = self._preempted.get("plan", "recompute")
            return [Delay("restoring", event["restored"], detail=plan)], None
        if event["from"] == event["state"]:
            return [], None
        time = float(event["time"])
        delays: list[Delay] = []
        window = None
        if event["from"] in UNSEATED:
            delays = self._parts(event, time)
            if self._since is not None:
                window = (self._since, time)
        elif event["from"] == "running" and event["state"] not in END_STATES:
            self._preempted = event
        self._since = time if event["state"] in UNSEATED else None
        return delays, window

    def _parts(self, event: Event, time: float) -> list[Delay]:
        parts = event.get("waited", ())
        known = sum(float(seconds) for _, _, seconds in parts)
        rest = 0.0 if self._since is None else time - self._since - known
        unknown = [Delay("unknown", rest)] if abs(rest) > _UNSURE else []
        preempted = self._preempted
        if preempted:
            detail = f"{preempted.get('reason', '')}, {preempted.get('plan', '')}"
            return [_blocked("preempted", known, preempted, detail), *unknown]
        own_level = int(event["level"])
        causes = []
        for cause, level, seconds in parts:
            if cause in _ROOM and level is not None and level < own_level:
                delay = Delay("overtaken", float(seconds), level, detail=cause)
            else:
                delay = Delay(str(cause), float(seconds), level)
            causes.append(delay)
        return [*causes, *unknown]


def _blocked(cause: str, seconds: float, event: Event, detail: str = "") -> Delay:
    """A delay for the request that an event names."""
    return Delay(cause, seconds, event.get("for_level"), str(event.get("for", "")), detail)


def events_of(log: Path, wanted: str = "") -> Iterator[Event]:
    """Events of requests in a log and its rotated parts; `wanted`: only lines with this text."""
    return (event for event in events_in(log, wanted) if "request" in event)


def account_of(logs: Sequence[Path], request: str) -> Account | None:
    """Why a request waited; None if no log has it. OSError if a log cannot be read. `request`: its
    id as in the log, or as the client got it; hashed where the log has hashes."""
    for log in logs:
        names = [request]
        key = key_of(log)
        if key:
            names += [keyed_hash(key, request)[:16], hashed_id(key, request)]
        for name in names:
            account: Account | None = None
            waits = Waits()
            for event in events_of(log, name):
                logged = str(event["request"])
                if account is None and (logged == name or logged.startswith(f"{name}-")):
                    account = Account(logged, int(event["engine"]))
                if account is not None and logged == account.request:
                    account.lines.append(event)
                    delays, window = waits.follow(event)
                    account.delays += delays
                    if window is not None:
                        account.windows.append(window)
            if account is not None:
                _find_served(log, account)
                return account
    return None


class _Seat(NamedTuple):
    """A request that got a seat, at a Unix time."""

    time: float
    request: str
    level: int


def _find_served(log: Path, account: Account) -> None:
    if not account.windows:
        return
    begin = account.windows[0][0]
    end = account.windows[-1][1]
    seats = [
        _Seat(float(event["time"]), str(event["request"]), int(event["level"]))
        for event in events_of(log, '"state": "running"')
        if begin <= float(event["time"]) <= end
        and event["from"] in UNSEATED
        and int(event["engine"]) == account.engine
        and event["request"] != account.request
    ]
    for begin, end in account.windows:
        inside = [seat for seat in seats if begin <= seat.time < end]
        ends = [*(seat.time for seat in inside[1:]), end]
        for seat, until in zip(inside, ends, strict=False):
            account.served[seat.request, seat.level] += until - seat.time  # type: ignore[assignment]


# Words


def sentence(account: Account) -> str:
    """One sentence: how long a request waited, and for what."""
    who = f"{account.request} (level {account.last['level']}, {account.last['tier']})"
    if account.waited < _TICK:
        return f"{who} did not wait."
    parts = grouped(account.delays)
    shown = [part for part in parts if part[1] >= _SHORT] or parts[:1]
    causes = ", ".join(f"{seconds_text(seconds)} {text}" for text, seconds in shown)
    waited = seconds_text(account.waited)
    return f"{who} waited {waited}: {causes}{_who_was_served(account)}."


def seconds_text(seconds: float) -> str:
    """Seconds with one decimal; milliseconds where that would be 0.0."""
    return f"{seconds:.1f} s" if seconds >= _SHORT else f"{seconds * 1000:.0f} ms"


def requests_text(count: int) -> str:
    """So many requests, in words."""
    return "1 request" if count == 1 else f"{count} requests"


def grouped(delays: Iterable[Delay]) -> list[tuple[str, float]]:
    """Causes in words with their seconds, the longest first."""
    seconds = Counter[tuple[str, str, str]]()
    levels = defaultdict[tuple[str, str, str], set[int]](set)
    for delay in delays:
        key = (delay.cause, delay.blocker, delay.detail)
        seconds[key] += delay.seconds  # type: ignore[assignment]
        of_key = levels[key]
        if delay.level is not None:
            of_key.add(delay.level)
    return [
        (_phrase(*key, levels[key]), total)
        for key, total in seconds.most_common()
        if total >= _TICK
    ]


def _phrase(cause: str, blocker: str, detail: str, levels: set[int]) -> str:
    whom = _levels(levels)
    if cause == "overtaken":
        by = f" by {whom}" if whom else ""
        short = "" if detail == "seat" else f" ({_PHRASES[detail]})"
        return f"overtaken{by}{short}"
    if cause == "held":
        of_level = f" ({whom})" if whom else ""
        return f"held for {blocker or 'a protected request'}{of_level}"
    if cause == "preempted":
        reason, _, plan = detail.partition(", ")
        for_whom = f"for {blocker} ({whom})" if blocker else f"({reason})"
        kv = f", KV {_KV_WORDS.get(plan, plan)}" if plan else ""
        return f"preempted {for_whom}{kv}"
    if cause == "restoring":
        return "loading its KV" if detail in ON_HOST else "computing its KV again"
    return _PHRASES.get(cause, cause)


_KV_WORDS = {"swap": "on the host", "partial": "partly on the host", "recompute": "dropped"}


def _levels(levels: set[int]) -> str:
    if not levels:
        return ""
    low = min(levels)
    high = max(levels)
    return f"level {low}" if low == high else f"level {low}-{high}"


def _who_was_served(account: Account) -> str:
    if not account.served:
        return ""
    [(longest, seconds)] = account.served.most_common(1)
    request, level = longest
    levels = _levels({level for _, level in account.served})
    requests = requests_text(len(account.served))
    return (
        f". Meanwhile seats went to {requests} of {levels}; after {request} (level {level}) it "
        f"took longest until the next one, {seconds_text(seconds)}"
    )


def timeline(account: Account) -> list[tuple[float, str]]:
    """What happened to a request: seconds since its first line, and a few words."""
    first = float(account.lines[0]["time"])
    return [(float(event["time"]) - first, _words(event)) for event in account.lines]


def _words(event: Event) -> str:
    whom = f" for {event['for']} (level {event['for_level']})" if "for" in event else ""
    rule = _rule(event)
    reason = event.get("reason", "")
    if event["from"] is None:
        return f"arrived, level {event['level']}{rule}"
    if reason == "read":
        before = event["level_before"]
        level = event["level"]
        change = f"level {level}" if before == level else f"level {before} became {level}"
        return f"read: {change}{rule}"
    if reason == "operator":
        said = f": {event['why']}" if "why" in event else ""
        return f"level {event['level_before']} became {event['level']} by {event['by']}{said}"
    if "held" in event:
        return f"had been held for {event['held']:.3f} s{whom}"
    if "restored" in event:
        return f"has its KV again, after {event['restored']:.3f} s"
    if event["state"] == "running":
        return "got a seat"
    if event["state"] in END_STATES:
        return f"{event['state']} ({reason}){whom}, {event['output_tokens']} tokens"
    if event["from"] == "running":
        place = _KV_WORDS.get(event.get("plan", ""), "")
        kv = f", KV {place}" if place else ""
        return f"preempted ({reason}){whom}{kv}"
    return f"lost the host copy of its KV ({reason})"


_RULES = {
    "hint": "the client's hint",
    "priority": "the client's priority",
    "service_tier": "its service tier",
    "tenant_top": "its tenant's share of level 0",
    "prediction": "the predictor",
    "instant": "the instant reader",
}


def _rule(event: Event) -> str:
    if "rule" not in event:
        return ""
    rule = _RULES.get(event["rule"], event["rule"])
    shares = " ".join(f"{share:.2f}" for share in event.get("urgency", ()))
    model = f"; model {event['model']}" if "model" in event else ""
    reading = f" (P = {shares}{model})" if shares else ""
    return f" by {rule}{reading}{_session(event)}"


def _session(event: Event) -> str:
    """The turn of a session, and the evidence for the level that it inherits."""
    if "turn" not in event:
        return ""
    turn = f", turn {event['turn']} of its session"
    if "floor" not in event:
        return turn
    source = event["floor_from"].replace("_", " ")
    return (
        f"{turn}, whose floor is level {event['floor']} by {event['floor_by']} "
        f"({source}, {event['floor_age']:.0f} s ago)"
    )


# Many requests


@dataclass(slots=True)
class Summary:
    """What the requests of a level waited for in a window: seconds and number of requests by cause,
    and the requests that others were preempted or held for."""

    levels: set[int] = field(default_factory=set)  # of all requests in the window
    requests: set[tuple[int, str]] = field(default_factory=set)
    seconds: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    longest: dict[str, tuple[float, str]] = field(default_factory=dict)


def summarize(logs: Sequence[Path], level: int | None, last: float | None) -> Summary:
    """Add up why requests of a level (None: all) waited in the `last` seconds of each log (None:
    all of it). OSError if a log cannot be read."""
    summary = Summary()
    for log in logs:
        since = 0.0 if last is None else _end_of(log) - last
        following: dict[tuple[int, str], Waits] = {}
        for event in events_of(log):
            request = str(event["request"])
            key = (int(event["engine"]), request)
            delays, _ = following.setdefault(key, Waits()).follow(event)
            if event["state"] in END_STATES:
                del following[key]
            if float(event["time"]) < since:
                continue
            summary.levels.add(int(event["level"]))
            if level not in (None, int(event["level"])):
                continue
            summary.requests.add(key)
            for text, seconds in grouped(map(_alone, delays)):
                summary.seconds[text] += seconds  # type: ignore[assignment]
                summary.counts[text] += 1
                longest = summary.longest.get(text, (0.0, ""))
                summary.longest[text] = max(longest, (seconds, request))
    return summary


def _alone(delay: Delay) -> Delay:
    """A delay without the other requests."""
    detail = delay.detail.partition(", ")[0] if delay.cause == "preempted" else delay.detail
    return Delay(delay.cause, delay.seconds, detail=detail)


def _end_of(log: Path) -> float:
    end = 0.0
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - 65_536))
        for line in file.read().split(b"\n"):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                end = float(json.loads(line)["time"])
    return end
