"""Writes the event log in a background thread."""

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from vllm_semantic_sched.engine.clock import unix_time
from vllm_semantic_sched.engine.guard import logger
from vllm_semantic_sched.engine.metrics.counters import Counters
from vllm_semantic_sched.policy.config.overload import Events
from vllm_semantic_sched.policy.config.private_files import kept_secret
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.record.event_format import Chain, Event, hash_ids
from vllm_semantic_sched.policy.record.lifecycle import Listener, Transition
from vllm_semantic_sched.predict import model_hash

# The file is renamed to PATH.1 at this size, and so many are kept: days of a busy engine. Who needs
# more has a log shipper take the lines away as they are written.
MAX_BYTES, BACKUPS = 100_000_000, 5
_INTERVAL = 0.1  # seconds between writes; polling spares the engine's thread a wake-up call
_CHUNK = 32  # lines per write; the file may be rotated between writes
_OLDEST = 30 * 86_400.0  # seconds after which a renamed part is deleted
_READ = ("prediction", "instant")  # what a line's `level_from` says of a level read
_TAIL = 65_536  # bytes at the end of a file in which its last line is looked for
_QUEUE = 100_000  # changes that wait to be written; further ones are dropped and counted


class EventLog(Listener):
    """Writes state transitions and decisions to a file. The caller only appends to a bounded queue
    and never waits for the disk. Lines are chained by hashes (`event_format.Chain`); lines about
    the log itself, with a field `log`, mark starts, ends, new files and losses.

    Args:
        engine: number of this engine, used in its lines and its file name.
        tier_names: returns the current policy's tier names, by level.
        policy_hash: returns the fingerprint of the policy in force.
        model: folder of the model that reads texts, None for the shipped one; empty: none.

    Raises:
        PolicyError: the file cannot be opened.
    """

    def __init__(
        self,
        settings: Events,
        engine: int,
        tier_names: Callable[[], tuple[str, ...]],
        policy_hash: Callable[[], str] = lambda: "",
        model: str | None = "",
    ) -> None:
        assert settings.path is not None
        path = Path(settings.path).expanduser()
        self.path = path.with_stem(f"{path.stem}-{engine}") if engine else path
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.file = _File(self.path, maxBytes=MAX_BYTES, backupCount=BACKUPS)
            key_path = path.with_name(f"{path.name}.key")
            key = b""
            if settings.hash_ids or key_path.exists():
                key = kept_secret(key_path).encode()
            self._chain = Chain(key)
        except OSError as error:
            raise PolicyError(f"events.path: cannot write {self.path}: {error.strerror}") from error
        self._hash_ids = settings.hash_ids
        self._policy_hash = policy_hash
        self._model = model
        self._engine = engine
        self._tier_names = tier_names
        self._events: deque[Event] = deque()
        self._next_engine = 0.0
        # One thread writes each of these, the other reads it.
        self._written = self._dropped = self._failed = 0
        self._told = 0  # of the dropped lines
        self._resumes: str | None = "started"  # or after a failure; what the next line is about
        self._torn = False  # the file ends within a line
        self._models: dict[str, str] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="semsched-events", daemon=True)
        self._thread.start()

    def moved(self, transition: Transition) -> None:
        """Queue a line about a change of state."""
        self._queue(Event.of, transition)

    def held(self, job: Job, seconds: float) -> None:
        """Queue a line about a hold that is over."""
        self._queue(Event.of_hold, job, seconds)

    def noted(self, job: Job, what: str, details: Mapping[str, Any]) -> None:
        """Queue a line about a decision."""
        self._queue(Event.of_note, job, what, details)

    def engine(self, describe: Callable[[], dict[str, Any]], now: float) -> None:
        """Queue a line about the engine every 10 seconds; `now` in seconds of any clock."""
        if now >= self._next_engine and self._has_room():
            self._next_engine = now + 10.0
            self._events.append(Event.of_engine(describe(), unix_time()))

    def _queue(self, event: Callable[..., Event], *facts: Any) -> None:
        """Queue a line, or drop it if the queue is full."""
        if self._has_room():
            self._events.append(event(*facts, unix_time(), self._policy_hash()))

    def _has_room(self) -> bool:
        if len(self._events) < _QUEUE:
            return True
        self._dropped += 1
        return False

    def report(self, counters: Counters) -> None:
        """Update the counters of written and dropped lines."""
        counters.raise_to("event_log_lines", self._written)
        counters.raise_to("event_log_dropped_lines", self._dropped, "queue_full")
        counters.raise_to("event_log_dropped_lines", self._failed, "not_writable")

    def close(self) -> None:
        """Write the remaining lines and close the file; wait 5 seconds at most."""
        self._closing.set()
        self._thread.join(5.0)

    # Background thread

    def _run(self) -> None:
        digest = "" if self._model == "" else model_hash(self._model)
        if digest:
            self._models = dict.fromkeys(_READ, digest)
        last = False
        while not last:
            last = self._closing.wait(_INTERVAL)
            left = len(self._events)  # later events wait for the next round
            while left > 0:
                events = [self._events.popleft() for _ in range(min(left, _CHUNK))]
                left -= len(events)
                self.write(events)
        if self._resumes is None:
            self.write([], closes=True)
        self.file.close()

    def write(self, events: Sequence[Event], closes: bool = False) -> None:
        """Write events now. Errors are counted, not raised."""
        try:
            tiers = self._tier_names()
            dropped = self._dropped
            lines = [self._line(event, tiers[event.level]) for event in events]
            if dropped > self._told:
                lines.insert(0, self._about("lost", lost=dropped - self._told))
            if closes:
                lines.append(self._about("closed"))
            if self._resumes is not None:
                lines.insert(0, self._resume(self._resumes))
            last = self._chain.last
            text = "\n".join(map(self._chain.seal, lines))
            if self.file.is_full(len(text)):
                self._chain.last = last
                self.file.doRollover()
                lines.insert(0, self._about("continued", previous=last))
                text = "\n".join(map(self._chain.seal, lines))
            self.file.write(("\n" if self._torn else "") + text)
            self.file.note_last(self._chain.last)
            self._written += len(events)
            self._told = dropped
            self._resumes = None
            self._torn = False
        except Exception as error:  # keep trying: space may be freed
            if not self._failed:
                logger.error(
                    "Semantic scheduling: the event log %s cannot be written: %s. Lost lines are "
                    "counted in semsched:event_log_dropped_lines_total.",
                    self.path,
                    error,
                )
            self._failed += len(events)
            self._resumes = "resumed"
            self.file.reopen()

    def _line(self, event: Event, tier: str) -> dict[str, Any]:
        line = event.line(self._engine, tier)
        model = self._models.get(line.get("level_from", ""))
        if model is not None:
            line["model"] = model
        if self._hash_ids:
            hash_ids(line, self._chain.key)
        return line

    def _about(self, what: str, **fields: Any) -> dict[str, Any]:
        keyed = bool(self._chain.key)
        return {"time": round(unix_time(), 6), "log": what, "keyed": keyed, **fields}

    def _resume(self, what: str) -> dict[str, Any]:
        """The first line after a start or a failure. The chain goes on from the last whole line."""
        self._chain.last, self._torn = self.file.last_hash()
        fields: dict[str, Any] = {"previous": self._chain.last, "head": self.file.noted_last()}
        if not self._chain.last:  # lines of an earlier version have no hash
            fields["unchained"] = self.file.size()
        if what == "resumed":
            fields["lost"] = self._failed
        return self._about(what, **fields)


class _File(RotatingFileHandler):
    """A rotating file whose errors are raised instead of printed. Nobody else can read it, and old
    parts are deleted: it says who asked for urgent help, and when."""

    def _open(self) -> Any:
        file = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.fchmod(file, 0o600)
        return os.fdopen(file, "a", encoding="utf-8")

    def doRollover(self) -> None:
        super().doRollover()
        for number in range(1, self.backupCount + 1):
            part = Path(f"{self.baseFilename}.{number}")
            if part.exists() and part.stat().st_mtime < time.time() - _OLDEST:
                part.unlink()

    def is_full(self, size: int) -> bool:
        """Whether so many more characters belong into a new file."""
        self.stream = self.stream or self._open()
        return self.stream.tell() > 0 and self.stream.tell() + size >= self.maxBytes

    def write(self, text: str) -> None:
        self.stream = self.stream or self._open()
        self.stream.write(text + "\n")
        self.stream.flush()

    def size(self) -> int:
        """Bytes in the file and its newest renamed part."""
        parts = (Path(self.baseFilename), Path(f"{self.baseFilename}.1"))
        return sum(part.stat().st_size for part in parts if part.is_file())

    def note_last(self, digest: str) -> None:
        """Note the last hash in PATH.head, so that lines missing at the end are found."""
        head = os.open(f"{self.baseFilename}.head", os.O_WRONLY | os.O_CREAT, 0o600)
        with os.fdopen(head, "w") as file:  # in place: never empty
            file.write(f"{digest}\n")

    def noted_last(self) -> str:
        """The hash that was noted last; empty if none was."""
        with contextlib.suppress(OSError):
            return Path(f"{self.baseFilename}.head").read_text().strip()
        return ""

    def last_hash(self) -> tuple[str, bool]:
        """The hash of the last whole line, else empty, and whether a part of a line follows it."""
        path = Path(self.baseFilename)
        if not path.is_file():
            return "", False
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            *whole, rest = file.read().split(b"\n")
        for line in reversed(whole):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                return str(json.loads(line)["chain"]), bool(rest)
        return "", bool(rest)

    def reopen(self) -> None:
        """Discard what could not be written; the next write opens the file again."""
        stream = self.stream
        self.stream = None
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.close()
