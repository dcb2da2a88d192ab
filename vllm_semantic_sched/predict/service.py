"""The asynchronous prediction service: requests in, predictions out, nobody waits (P3, P7)."""

from __future__ import annotations

import itertools
import json
import logging
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from vllm_semantic_sched.policy.config import Predictor
from vllm_semantic_sched.policy.prediction import LengthBuckets, Prediction

_START_TIMEOUT = 180.0  # seconds; loading torch on a busy machine takes tens of them
_FIRST_BACKOFF, _LONGEST_BACKOFF = 1.0, 60.0  # seconds between restarts


class PredictorError(RuntimeError):
    """The configured predictor cannot be used."""


class PredictionService:
    """Feeds a predictor process from a bounded queue, on a thread of its own.

    Args:
        settings: the policy's predictor section.
        decode: token ids to text; called on the service's thread.
        command: the worker's command line; for tests.
    """

    def __init__(
        self,
        settings: Predictor,
        decode: Callable[[list[int]], str],
        logger: logging.Logger,
        command: Sequence[str] = (sys.executable, "-m", "vllm_semantic_sched.predict.worker"),
    ) -> None:
        self._settings = settings
        self._decode = decode
        self._logger = logger
        self._command = [*command, "--threads", str(settings.threads)]
        if settings.model is not None:
            self._command += ["--model", settings.model]
        self._process: subprocess.Popen[str] | None = None
        self._changed = threading.Condition()
        self._queue: dict[str, Sequence[int]] = {}  # guarded by _changed; oldest first
        self._closing = False  # guarded by _changed
        self._done: deque[tuple[str, Prediction | None]] = deque()
        self._batch_ids = itertools.count()
        self._thread = threading.Thread(target=self._run, name="semsched-predict", daemon=True)

    # For the scheduler: none of these waits, except start and close

    def start(self) -> LengthBuckets | None:
        """Start the process and wait until its model is loaded.

        Returns:
            The model's length buckets, None if it predicts no lengths.

        Raises:
            PredictorError: the model cannot be loaded; says why.
        """
        buckets = self._launch()
        self._thread.start()
        return buckets

    def submit(self, request_id: str, token_ids: Sequence[int]) -> bool:
        """Queue a prompt; False if the queue is full."""
        with self._changed:
            if len(self._queue) >= self._settings.max_queue:
                return False
            self._queue[request_id] = token_ids
            self._changed.notify()
        return True

    def cancel(self, request_id: str) -> None:
        """Forget a queued prompt."""
        with self._changed:
            self._queue.pop(request_id, None)

    def drain(self) -> list[tuple[str, Prediction | None]]:
        """Predictions since the last call; None for a prompt that could not be predicted."""
        done = self._done
        return [done.popleft() for _ in range(len(done))]

    @property
    def pending(self) -> int:
        """Prompts in the queue."""
        return len(self._queue)

    @property
    def up(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        """Stop thread and process."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._stop_process()

    # The service's thread

    def _run(self) -> None:
        backoff = _FIRST_BACKOFF
        while batch := self._next_batch():
            request_ids = [request_id for request_id, _ in batch]
            try:
                predictions = self._predict([token_ids for _, token_ids in batch])
            except Exception as error:
                self._done.extend((request_id, None) for request_id in request_ids)
                if self._closing:
                    return
                self._logger.warning(
                    "The urgency predictor failed (%s: %s); requests run at the default level "
                    "until it is back.",
                    type(error).__name__,
                    error,
                )
                if not self.up:
                    backoff = self._relaunch(backoff)
            else:
                self._done.extend(zip(request_ids, predictions, strict=True))
                backoff = _FIRST_BACKOFF

    def _next_batch(self) -> list[tuple[str, Sequence[int]]]:
        """Wait for work; empty when closing."""
        settings = self._settings
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if settings.mode == "full_batching":
                self._changed.wait_for(
                    lambda: len(self._queue) >= settings.max_batch or self._closing,
                    timeout=settings.max_wait,
                )
            if self._closing:
                return []
            oldest = list(itertools.islice(self._queue, settings.max_batch))
            return [(request_id, self._queue.pop(request_id)) for request_id in oldest]

    def _predict(self, prompts: list[Sequence[int]]) -> list[Prediction]:
        texts = [self._text(token_ids) for token_ids in prompts]
        answer = self._exchange({"id": next(self._batch_ids), "texts": texts})
        if "error" in answer:
            raise PredictorError(answer["error"])
        return [
            Prediction(tuple(urgency), None if length is None else tuple(length))
            for urgency, length in zip(answer["urgency"], answer["length"], strict=True)
        ]

    def _text(self, token_ids: Sequence[int]) -> str:
        try:
            return self._decode(list(token_ids))
        except Exception:
            return ""  # ids outside the vocabulary; vLLM decides what becomes of the request

    # The process

    def _exchange(self, message: dict[str, Any] | None = None) -> dict[str, Any]:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise PredictorError("no predictor process")
        if message is not None:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise PredictorError(f"the predictor process ended with status {process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _launch(self) -> LengthBuckets | None:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
        )
        watchdog = threading.Timer(_START_TIMEOUT, self._process.kill)
        watchdog.start()
        try:
            first = self._exchange()
        finally:
            watchdog.cancel()
        if "failed" in first:
            raise PredictorError(f"predictor.model: {first['failed']}")
        buckets = first["ready"]["length_buckets"]
        if buckets is None:
            return None
        return LengthBuckets(tuple(buckets["edges"]), tuple(buckets["means"]))

    def _relaunch(self, backoff: float) -> float:
        """Start the process again, later each time that it fails; the next back-off, seconds."""
        while not self._closing:
            time.sleep(backoff)
            backoff = min(2 * backoff, _LONGEST_BACKOFF)
            try:
                self._stop_process()
                self._launch()
            except Exception as error:
                self._logger.warning("The urgency predictor does not start: %s", error)
            else:
                self._logger.info("The urgency predictor is back.")
                break
        return backoff

    def _stop_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        try:
            process.stdin.close()  # the worker ends at the end of its input
            process.wait(timeout=5)
        except (OSError, subprocess.TimeoutExpired):
            process.kill()
            process.wait()
