"""Runs the predictor process and exchanges messages with it, each within a time limit."""

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

from vllm_semantic_sched.policy.config.estimates import Predictor

_PATIENCE = 5.0  # seconds that a process may take to end after it closed its pipes


# Where `predictor.threads` is unset. A small machine has no core to spare; more than four threads
# gain little on a batch.
_CORES_PER_THREAD = 8
_MOST_THREADS = 4


def threads_of(settings: Predictor) -> int:
    """The number of CPU threads of the predictor process."""
    if settings.threads is not None:
        return settings.threads
    cores = len(os.sched_getaffinity(0))
    return min(_MOST_THREADS, max(1, cores // _CORES_PER_THREAD))


class PredictorError(RuntimeError):
    """The configured predictor cannot be used."""


class PredictorProcess(subprocess.Popen[str]):
    """A worker (`predict/worker.py`) and the pipes to it."""

    def __init__(self, command: Sequence[str]) -> None:
        pipe = subprocess.PIPE
        super().__init__(command, stdin=pipe, stdout=pipe, encoding="utf-8", errors="replace")

    def read(self, timeout: float, request: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send `request`, if there is one, and read one message. PredictorError if none came within
        `timeout` seconds, the process ended, or it is not JSON. The process is killed then: a late
        answer would be taken for the next one."""
        assert self.stdin is not None and self.stdout is not None
        begin = time.monotonic()
        # Unblocks a write as well as a read, also if the process is stopped by a signal.
        watchdog = threading.Timer(timeout, self.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            if request is not None:
                print(json.dumps(request), file=self.stdin, flush=True)
            answer = self.stdout.readline()
        except OSError:  # the process ended during the write
            answer = ""
        finally:
            watchdog.cancel()
        if not answer:
            late = time.monotonic() - begin >= timeout
            status = self.stop(_PATIENCE)
            if late:
                raise PredictorError(f"no answer within {timeout:g} s; the process was killed")
            raise PredictorError(f"the predictor process ended with status {status}")
        try:
            message: dict[str, Any] = json.loads(answer)
        except ValueError as error:
            self.stop()
            raise PredictorError(f"not an answer: {answer[:80]!r}") from error
        return message

    def stop(self, patience: float = 0) -> int:
        """Wait `patience` seconds for the process to end, then kill it: it holds no data that could
        be lost. A pending `read` raises. Returns the exit status."""
        try:
            status = self.wait(patience)
        except subprocess.TimeoutExpired:
            self.kill()
            status = self.wait()
        for pipe in filter(None, (self.stdin, self.stdout)):
            with contextlib.suppress(OSError):  # buffered output has no reader any more
                pipe.close()
        return status


_FIRST_GUESS = 1e-4  # seconds for a character on one slow core
_NEW_SHARE = 0.3  # of a measurement in the running mean
_SHORTEST = 128  # characters; a shorter text costs hardly less
LONGEST = 1008  # characters that the network's window holds at most


class PassSize:
    """Bounds forward passes to a number of seconds, from the measured speed of earlier ones. A pass
    takes as long as its texts together, as those of similar length are read together."""

    def __init__(self, seconds: float) -> None:
        self._limit = seconds
        self._rate = _FIRST_GUESS

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether a pass over texts of these lengths (characters) is expected to end in time. A
        single text always fits."""
        return len(lengths) <= 1 or _work(lengths) * self._rate <= self._limit

    def measured(self, lengths: Sequence[int], seconds: float) -> None:
        """Learn from a pass over texts of these lengths."""
        rate = seconds / _work(lengths)
        # At once if slower than thought: the limit is strict.
        share = 1.0 if rate > self._rate else _NEW_SHARE
        self._rate += share * (rate - self._rate)


def _work(lengths: Sequence[int]) -> int:
    return sum(min(max(_SHORTEST, length), LONGEST) for length in lengths)
