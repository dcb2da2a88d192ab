"""Predicts in the background: the scheduler submits prompts and collects predictions later."""

import hashlib
import itertools
import logging
import math
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

from vllm_semantic_sched.policy.config.estimates import Predictor
from vllm_semantic_sched.policy.config.private_files import own_folder
from vllm_semantic_sched.policy.facts.decision import DEFAULT_DECISION, Decision, decision_of
from vllm_semantic_sched.policy.facts.heap import AddressableHeap
from vllm_semantic_sched.policy.facts.prediction import (
    MAX_BATCH,
    MAX_PASS,
    LengthBuckets,
    Prediction,
)
from vllm_semantic_sched.predict.process import (
    LONGEST,
    PassSize,
    PredictorError,
    PredictorProcess,
    threads_of,
)
from vllm_semantic_sched.predict.shared import shared_command

_START_TIMEOUT = 180.0  # seconds; loading torch on a busy machine takes tens of them
_LONGEST_BACKOFF = 60.0  # seconds between restarts
# Prompts that may wait, each queue; further requests run at the default level. Far more than an
# engine serves before clients give up; 10,000 prompts of the longest kind fill 20 MB.
MAX_QUEUE = 10_000
CACHE_SIZE = 4096  # predictions; templates and retries repeat within minutes. About 1 KB each
# Seconds for one forward pass, after which the process counts as stuck and is restarted. Hundreds
# of times the bound on a pass: a process on a machine that swaps must not restart in circles.
PASS_TIMEOUT = 30.0
_WATCH = 1.0  # seconds between two looks at an idle process


class _Prompt(NamedTuple):
    text: str
    digest: bytes  # a short key, so that no prompt is kept in memory

    @classmethod
    def of(cls, text: str) -> Self:
        """The prompt of a text."""
        data = text.encode("utf-8", "surrogatepass")
        return cls(text, hashlib.blake2b(data, digest_size=16).digest())


_Text = str | Callable[[], str]  # a prompt, or what gives it, on the service's thread


class PredictionService:
    """Feeds a predictor process from a bounded queue, on a thread of its own.

    More urgent prompts are read first, equal ones by arrival. Recent prompts are answered from
    memory. A process that ends, sends an
    invalid answer or exceeds its time limit is replaced, after `first_backoff` seconds that double
    each time; the prompts that it had get the prediction None. Services of a `group` share a
    worker. `command`: the worker's command line, for tests.
    """

    def __init__(
        self,
        settings: Predictor,
        logger: logging.Logger,
        command: Sequence[str] = (sys.executable, "-m", "vllm_semantic_sched.predict.worker"),
        first_backoff: float = 1.0,
        group: str | None = None,
    ) -> None:
        self._logger = logger
        self._command = [*command, "--threads", str(threads_of(settings))]
        if settings.model is not None:
            self._command += ["--model", settings.model]
        # Without a folder of its own, a user has no socket that others cannot reach.
        if group is not None and (folder := own_folder()) is not None:
            name = f"{group}-{_Prompt.of(repr(self._command)).digest.hex()[:16]}"
            self._command = shared_command(folder / name, PASS_TIMEOUT, self._command)
        self._first_backoff = first_backoff
        self._pass_size = PassSize(MAX_PASS)
        self.cached = 0  # prompts answered from memory
        self.restarts = 0  # of failed processes
        self._process: PredictorProcess | None = None
        self._loaded = False  # the process has said that it is ready
        self._decision = DEFAULT_DECISION  # of the model, once it is loaded
        self._changed = threading.Condition()
        # These four are guarded by _changed.
        self._queue: AddressableHeap[str] = AddressableHeap()
        self._prompts: dict[str, _Prompt | Callable[[], str]] = {}  # of the queued requests
        self._memory: OrderedDict[bytes, Prediction] = OrderedDict()  # least recently used first
        self._closing = False
        self._done: deque[tuple[str, Prediction | None]] = deque()
        self._passes: deque[tuple[int, float]] = deque(maxlen=1000)
        self._batch_ids = itertools.count()
        self._thread = threading.Thread(target=self._run, name="semsched-predict", daemon=True)

    # For the scheduler; only `start` and `close` wait.

    def start(self, known: LengthBuckets | None = None) -> LengthBuckets | None:
        """Start the process and wait until its model is loaded; PredictorError says why it cannot
        be. Returns the model's length buckets, None if it predicts no lengths. If they are `known`
        from the model's files, nothing waits: prompts stay in the queue until the model is loaded,
        and a failure is logged and retried."""
        process = self._spawn()
        if known is None:
            known = self._wait_for(process)
        self._thread.start()
        return known

    def submit(self, request_id: str, text: _Text, order: float = 0) -> bool:
        """Queue a prompt, or answer it from memory; False if the queue is full. The prompt of the
        smallest `order` (`reading_order`) is read first. A `text` that is called gives a long
        prompt: once, on the service's thread."""
        prompt = _Prompt.of(text) if isinstance(text, str) else text
        with self._changed:
            if isinstance(prompt, _Prompt) and self._recall(request_id, prompt):
                return True
            if len(self._queue) >= MAX_QUEUE:
                return False
            self._queue.push(request_id, order)
            self._prompts[request_id] = prompt
            self._changed.notify()
        return True

    def cancel(self, request_id: str) -> None:
        """Remove a prompt from the queue, if it is there."""
        with self._changed:
            self._queue.discard(request_id)
            self._prompts.pop(request_id, None)

    def drain(self) -> list[tuple[str, Prediction | None]]:
        """Predictions since the last call; None for a prompt that could not be predicted."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def passes(self) -> list[tuple[int, float]]:
        """Forward passes since the last call: texts, seconds."""
        return [self._passes.popleft() for _ in range(len(self._passes))]

    @property
    def pending(self) -> int:
        """Prompts in the queue."""
        return len(self._queue)

    @property
    def up(self) -> bool:
        """Whether the process runs and has loaded its model."""
        process = self._process  # the service's thread may replace it meanwhile
        return process is not None and self._loaded and process.poll() is None

    def close(self) -> None:
        """Stop the process, and tell the thread to stop."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._stop_process()

    def _recall(self, request_id: str, prompt: _Prompt) -> bool:
        """Answer a prompt from memory if possible; the caller holds _changed."""
        prediction = self._memory.get(prompt.digest)
        if prediction is None:
            return False
        self._memory.move_to_end(prompt.digest)
        self._done.append((request_id, prediction))
        self.cached += 1
        return True

    # The service's thread

    def _run(self) -> None:
        backoff = self._first_backoff
        process = self._process
        if not self._loaded and process is not None and not self._loads(process):
            backoff = self._relaunch(backoff)
        while True:
            batch = self._next_batch()
            if batch is None:
                return
            if not batch:
                if not self.up and not self._closing:
                    self._logger.warning("The urgency predictor has ended; it is restarted.")
                    backoff = self._relaunch(backoff)
                continue
            try:
                predictions = self._predict(list(batch.values()))
            except Exception as error:
                self._deliver(batch, [None] * len(batch))
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
                self._deliver(batch, predictions)
                backoff = self._first_backoff

    def _next_batch(self) -> dict[str, _Prompt] | None:
        """Wait for prompts, at most `_WATCH` seconds, so that the end of an idle process is
        noticed; returns them by request id (perhaps none), None when closing."""
        batch: dict[str, _Prompt | Callable[[], str]] = {}
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing, timeout=_WATCH)
            if self._closing:
                return None
            lengths: list[int] = []
            while self._queue and len(batch) < MAX_BATCH:
                request_id = self._queue.peek()
                assert request_id is not None
                prompt = self._prompts[request_id]
                known = prompt if isinstance(prompt, _Prompt) else None
                # The batch before may have had the same text.
                if known is None or not self._recall(request_id, known):
                    lengths.append(LONGEST if known is None else len(known.text))
                    if not self._pass_size.fits(lengths):
                        break
                    batch[request_id] = prompt
                self._queue.pop()
                del self._prompts[request_id]
        return self._with_texts(batch)

    def _with_texts(self, batch: dict[str, _Prompt | Callable[[], str]]) -> dict[str, _Prompt]:
        """The prompts of a batch with the texts of the long ones, but for those in memory."""
        prompts = {}
        for request_id, prompt in batch.items():
            if not isinstance(prompt, _Prompt):
                try:
                    prompt = _Prompt.of(prompt())  # takes a moment: without the lock
                except Exception as error:
                    reason = f"{type(error).__name__}: {error}"
                    self._logger.warning("A long prompt cannot be read: %s", reason)
                    self._done.append((request_id, None))
                    continue
                with self._changed:
                    if self._recall(request_id, prompt):
                        continue
            prompts[request_id] = prompt
        return prompts

    def _pause(self, seconds: float) -> bool:
        """Wait `seconds`; returns True, at once, when the service is closed."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closing, timeout=seconds)

    def _deliver(self, batch: dict[str, _Prompt], predictions: list[Prediction | None]) -> None:
        with self._changed:
            for (request_id, prompt), prediction in zip(batch.items(), predictions, strict=True):
                if prediction is not None:
                    self._memory[prompt.digest] = prediction
                self._done.append((request_id, prediction))
            while len(self._memory) > CACHE_SIZE:
                self._memory.popitem(last=False)

    def _predict(self, prompts: list[_Prompt]) -> list[Prediction | None]:
        texts = [prompt.text for prompt in prompts]
        process = self._process  # the scheduling thread may stop it meanwhile
        if process is None:
            raise PredictorError("no predictor process")
        begin = time.monotonic()
        message = {"id": next(self._batch_ids), "texts": texts}
        answer = process.read(PASS_TIMEOUT, message)
        seconds = time.monotonic() - begin
        self._passes.append((len(texts), seconds))
        self._pass_size.measured(list(map(len, texts)), seconds)
        if "error" in answer:
            raise PredictorError(answer["error"])
        rows = list(zip(answer["urgency"], answer["length"], answer["unreadable"], strict=True))
        if len(rows) != len(texts):
            raise PredictorError(f"{len(rows)} answers to {len(texts)} texts")
        return [_prediction(*row, self._decision) for row in rows]

    # The process

    def _spawn(self) -> PredictorProcess:
        self._loaded = False
        process = PredictorProcess(self._command)
        self._process = process
        if self._closing:  # close() may have run before this process existed
            self._stop_process()
        return process

    def _wait_for(self, process: PredictorProcess) -> LengthBuckets | None:
        """Wait until a new process has loaded its model; returns its length buckets."""
        first = process.read(_START_TIMEOUT)
        if "failed" in first:
            raise PredictorError(f"predictor.model: {first['failed']}")
        self._loaded = True
        ready = first["ready"]
        self._decision = decision_of(ready)
        buckets = ready["length_buckets"]
        return LengthBuckets(tuple(buckets["edges"]), tuple(buckets["means"])) if buckets else None

    def _loads(self, process: PredictorProcess | None = None) -> bool:
        """Wait until the process (None: a new one) has loaded its model; False if it cannot."""
        try:
            if process is None:
                self._stop_process()
                process = self._spawn()
            self._wait_for(process)
        except Exception as error:
            if not self._closing:
                self._logger.warning("The urgency predictor does not start: %s", error)
            return False
        return True

    def _relaunch(self, backoff: float) -> float:
        """Restart the process, after a longer wait each time it fails; returns the next wait, s."""
        while not self._pause(backoff):
            backoff = min(2 * backoff, _LONGEST_BACKOFF)
            self.restarts += 1
            if self._loads():
                self._logger.info("The urgency predictor is back.")
                break
        return backoff

    def _stop_process(self) -> None:
        with self._changed:
            process = self._process
            self._process = None
        if process is not None:
            process.stop()


def _prediction(
    urgency: list[float] | None,
    length: list[float] | None,
    unreadable: str | None,
    decision: Decision,
) -> Prediction | None:
    """The prediction; None if the text was not read, or a number is not finite (broken model)."""
    if urgency is None:
        return None
    probabilities = urgency if length is None else urgency + length
    if not all(map(math.isfinite, probabilities)):
        return None
    return Prediction(
        urgency=tuple(urgency),
        length=None if length is None else tuple(length),
        unreadable=unreadable,
        decision=decision,
    )
