"""The device's clocks, and its queues of work."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from vllm_semantic_sched.policy.profile.formula import Batch


class Clock(Protocol):
    """A clock of the device."""

    def now(self) -> float:
        """Seconds since a fixed moment."""
        ...

    def wait_until(self, moment: float) -> None:
        """Return once `now` is that moment or later."""
        ...


class WallClock:
    """The real one; it sleeps."""

    def now(self) -> float:
        """Seconds of `time.monotonic`."""
        return time.monotonic()

    def wait_until(self, moment: float) -> None:
        """Sleep until then; no-op if that has passed."""
        seconds = moment - time.monotonic()
        if seconds > 0:
            time.sleep(seconds)


class VirtualClock:
    """Jumps to the moment that is waited for; calls `passed`, if set, at each jump."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self.passed: Callable[[], None] | None = None

    def now(self) -> float:
        """Virtual seconds, from `start` on."""
        return self._now

    def wait_until(self, moment: float) -> None:
        """Jump there, and call `passed`; no-op if that has passed."""
        if moment > self._now:
            self._now = moment
            if self.passed is not None:
                self.passed()


@dataclass(slots=True)
class StepTime:
    """A step on the device. `idle`: seconds before it in which the device had nothing to do;
    `waited`: for copies, thereafter; `host`: from the output fetched last to the submission."""

    number: int
    begin: float
    end: float
    idle: float
    waited: float
    batch: Batch
    sampled: int = 0  # output tokens
    host: float = 0.0

    @property
    def busy(self) -> float:
        """Seconds in which no other step could run."""
        return self.end - self.begin + self.waited


@dataclass
class Timeline:
    """One queue of steps and one of copies. A step begins when it is submitted or when the one
    before ends; a copy waits for the steps submitted before it, as on a CUDA stream that waits for
    the compute stream."""

    steps_end: float = 0.0
    copies_end: float = 0.0
    _in_line: float = 0.0  # end of the copies that the next step waits for

    def copy(self, now: float, seconds: float, beside: bool) -> tuple[float, float]:
        """Queue a copy, for which the next step waits unless it is `beside` it; its begin and
        end."""
        begin = max(now, self.copies_end, self.steps_end)
        self.copies_end = end = begin + seconds
        if not beside:
            self._in_line = end
        return begin, end

    def next_begin(self, now: float) -> float:
        """When a step begins that is submitted now."""
        return max(now, self.steps_end, self._in_line)

    def step(self, now: float, seconds: float, number: int, batch: Batch) -> StepTime:
        """Queue a step."""
        free = max(now, self.steps_end)
        idle = free - self.steps_end if number > 1 else 0.0
        begin = self.next_begin(now)
        self.steps_end = begin + seconds
        self._in_line = 0.0
        return StepTime(
            number, begin, end=self.steps_end, idle=idle, waited=begin - free, batch=batch
        )
