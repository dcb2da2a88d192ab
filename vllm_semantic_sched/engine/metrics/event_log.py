"""Writes the event log in a background thread."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from vllm_semantic_sched.engine.metrics.counters import Counters
from vllm_semantic_sched.policy.config.overload import Events
from vllm_semantic_sched.policy.events import Event
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.facts.section import PolicyError
from vllm_semantic_sched.policy.lifecycle import Transition

_INTERVAL = 0.1  # seconds between writes; polling spares the engine's thread a wake-up call
_CHUNK = 64  # lines per write; the file may be rotated between writes
_CLOSING = 5.0  # seconds that shutdown waits for the remaining lines

_OLDEST = 30 * 86_400.0  # seconds after which a renamed part is deleted
_QUEUE = 100_000  # changes that wait to be written; further ones are dropped and counted


class EventLog:
    """Writes state transitions to a file; a listener of the core's lifecycle
    (`policy.lifecycle.Listener`). The caller only appends to a bounded queue and never waits for
    the disk.

    Args:
        engine: number of this engine, used in its lines and its file name.
        tier_names: returns the current policy's tier names, by level.

    Raises:
        PolicyError: the file cannot be opened.
    """

    def __init__(
        self,
        settings: Events,
        engine: int,
        tier_names: Callable[[], tuple[str, ...]],
        logger: logging.Logger,
    ) -> None:
        assert settings.path is not None
        path = Path(settings.path).expanduser()
        self.path = path.with_stem(f"{path.stem}-{engine}") if engine else path
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.file = _File(self.path, maxBytes=settings.max_bytes, backupCount=settings.backups)
        except OSError as error:
            raise PolicyError(f"events.path: cannot write {self.path}: {error.strerror}") from error
        self._limit = _QUEUE
        self._engine = engine
        self._tier_names = tier_names
        self._logger = logger
        self._events: deque[Event] = deque()
        # One thread writes each of these, the other reads it.
        self._written = self._dropped = self._failed = 0
        self._broken = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="semsched-events", daemon=True)
        self._thread.start()

    def moved(self, transition: Transition) -> None:
        """Queue a transition, or drop it if the queue is full."""
        if self._has_room():
            self._events.append(Event.of(transition, time.time()))

    def held(self, job: Job, seconds: float) -> None:
        """Queue the end of a hold, or drop it if the queue is full."""
        if self._has_room():
            self._events.append(Event.of_hold(job, seconds, time.time()))

    def first_token(self, job: Job) -> None:
        """Does nothing: later lines contain the time of the first token."""

    def _has_room(self) -> bool:
        if len(self._events) < self._limit:
            return True
        self._dropped += 1
        return False

    def report(self, counters: Counters) -> None:
        """Update the counters of written and dropped lines."""
        counters.raise_to("event_log_lines", self._written)
        counters.raise_to("event_log_dropped", self._dropped, "queue_full")
        counters.raise_to("event_log_dropped", self._failed, "not_writable")

    @property
    def running(self) -> bool:
        """Whether the background thread still runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Write the remaining lines and close the file, unless that takes too long."""
        self._closing.set()
        self._thread.join(_CLOSING)

    # Background thread

    def _run(self) -> None:
        last = False
        while not last:
            last = self._closing.wait(_INTERVAL)
            left = len(self._events)  # later events wait for the next round
            while left > 0:
                events = [self._events.popleft() for _ in range(min(left, _CHUNK))]
                left -= len(events)
                self.write(events)
        self.file.close()

    def write(self, events: list[Event]) -> None:
        """Write events now. Errors are counted, not raised."""
        try:
            tiers = self._tier_names()
            text = "\n".join(
                json.dumps(event.line(self._engine, tiers[event.level])) for event in events
            )
            # A failed write may have left a partial line.
            self.file.write(("\n" if self._broken else "") + text)
            self._written += len(events)
            self._broken = False
        except Exception as error:  # keep trying: space may be freed
            if not self._failed:
                self._logger.error(
                    "Semantic scheduling: the event log %s cannot be written: %s. Lost lines are "
                    "counted in semsched:event_log_dropped_total.",
                    self.path,
                    error,
                )
            self._failed += len(events)
            self._broken = True
            self.file.reopen()


class _File(RotatingFileHandler):
    """The standard library's rotating file, but errors are raised instead of printed, nobody else
    can read it, and old parts go: it says who asked for urgent help, and when."""

    def _open(self) -> Any:
        file = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.fchmod(file, 0o600)
        return os.fdopen(file, "a", encoding="utf-8")

    def doRollover(self) -> None:
        super().doRollover()
        oldest = time.time() - _OLDEST
        for number in range(1, self.backupCount + 1):
            part = Path(f"{self.baseFilename}.{number}")
            if part.exists() and part.stat().st_mtime < oldest:
                part.unlink()

    def write(self, text: str) -> None:
        self.emit(logging.makeLogRecord({"msg": text}))

    def handleError(self, record: logging.LogRecord) -> None:
        raise

    def reopen(self) -> None:
        """Discard what could not be written; the next write opens the file again."""
        stream, self.stream = self.stream, None
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
