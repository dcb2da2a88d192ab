"""The predictor process as its owner sees it: one question, one answer, never waiting for ever."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

_PATIENCE = 5.0  # seconds for a process that has closed its pipes to end


class PredictorError(RuntimeError):
    """The configured predictor cannot be used."""


class PredictorProcess:
    """A worker (`predict/worker.py`) and the pipes to it. Starts at construction."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )

    @property
    def up(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def ask(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send a message and read the answer; see `read`."""
        return self._exchange(json.dumps(message) + "\n", timeout)

    def read(self, timeout: float) -> dict[str, Any]:
        """Read one message.

        Raises:
            PredictorError: none within `timeout` seconds, none at all, or nonsense. The process
                is gone then: what still came of it would be taken for the answer to another
                question.
        """
        return self._exchange("", timeout)

    def stop(self) -> None:
        """Kill it; it holds nothing that could get lost. Whoever waits for it gets its error."""
        self._end(patience=0)

    def _exchange(self, line: str, timeout: float) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        begin = time.monotonic()
        # Ends a write to a stuck process as well as a read, and also a stopped one.
        watchdog = threading.Timer(timeout, self._process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            if line:
                stdin.write(line)
                stdin.flush()
            answer = stdout.readline()
        except OSError:  # it ended while it was written to
            answer = ""
        finally:
            watchdog.cancel()
        if not answer:
            late = time.monotonic() - begin >= timeout
            status = self._end(_PATIENCE)
            if late:
                raise PredictorError(f"no answer within {timeout:g} s; the process was killed")
            raise PredictorError(f"the predictor process ended with status {status}")
        try:
            message: dict[str, Any] = json.loads(answer)
        except ValueError as error:
            self.stop()
            raise PredictorError(f"not an answer: {answer[:80]!r}") from error
        return message

    def _end(self, patience: float) -> int:
        """Wait that many seconds for its end, then kill it; its exit status."""
        process = self._process
        try:
            status = process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what is still to be written has no reader
                    pipe.close()
        return status
