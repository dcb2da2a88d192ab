"""Connects the prediction service to the scheduler's jobs."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from vllm_semantic_sched.engine.guard import logger
from vllm_semantic_sched.engine.metrics.counters import Counters
from vllm_semantic_sched.engine.requests.endings import is_part_of_beam
from vllm_semantic_sched.engine.vllm_api import Request
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.decision import Hint, reading_order
from vllm_semantic_sched.policy.facts.job import Job, LevelSource, SessionTurn
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets, Prediction
from vllm_semantic_sched.predict import stored_buckets
from vllm_semantic_sched.predict.instant import InstantReader
from vllm_semantic_sched.predict.service import PredictionService
from vllm_semantic_sched.predict.window import continued, newest_words

# Tokens of a prompt that are decoded, half of them from each end: for the instant reader, about
# twice a predictor's window, and for the predictor, whose window takes what is suspicious between
# the ends.
_LONGEST_INSTANT = 512
_LONGEST_READ = 16_384

# Requests remembered between their submission and their arrival. Far more than vLLM's input queue
# holds: only requests that it rejects stay here.
_MOST_AHEAD = 65536


class PredictionFeed:
    """Sends prompts to the predictor and hands out its predictions, without ever waiting for them.
    Engines of the same group share a predictor process. Raises PredictorError if the configured
    model cannot be loaded; a stored network that proves damaged while it loads is logged."""

    def __init__(
        self,
        core: SchedulingCore,
        jobs: dict[str, Job],
        tokenizer: Any,
        counters: Counters,
        group: str | None,
    ) -> None:
        self.tokenizer = tokenizer
        self._core = core
        self._jobs = jobs
        self._counters = counters
        # Submitted before the scheduler has seen them, and answers that came as early. Both
        # threads change the first, each time by one atomic call.
        self._ahead: OrderedDict[str, None] = OrderedDict()
        self._early: list[tuple[str, Prediction | None]] = []
        # With the provisional level, if there was one; see `applied`.
        self._drained: list[tuple[Job, int | None]] = []
        self.service: PredictionService | None = None
        self.instant: InstantReader | None = None
        predictor = core.policy.predictor
        if not core.policy.reads(hinted=False):
            return
        if tokenizer is None:
            logger.warning(
                "Semantic scheduling: vLLM runs without a tokenizer, so prompts cannot be read; "
                "levels come from hints only."
            )
            return
        self.service = PredictionService(predictor, logger=logger, group=group)
        # A model whose files look complete loads beside the start of the engine.
        buckets = self.service.start(stored_buckets(predictor.model))
        core.estimates.buckets = buckets
        if predictor.has_instant_reader:
            self.instant = _load_instant(predictor.model, buckets)

    @property
    def ready(self) -> bool:
        """Whether the predictor is up, or not needed."""
        return self.service is None or self.service.up

    def gauges(self) -> dict[str, float]:
        """State of the predictor; brings its counters up to date."""
        if self.service is None:
            return {}
        self._counters.raise_to("cached_predictions", self.service.cached)
        self._counters.raise_to("predictor_restarts", self.service.restarts)
        for texts, seconds in self.service.passes():
            self._counters.observe("prediction_batch_size", texts)
            self._counters.observe("prediction_pass_seconds", seconds)
        return {"predictor_queue": self.service.pending, "predictor_up": float(self.service.up)}

    def reads(self, request: Request, hint: Hint, length_known: bool) -> bool:
        """Whether the predictor should read a request's text."""
        can_read = self.service is not None and bool(request.prompt_token_ids)
        return can_read and self._core.policy.reads(hint.level is not None, length_known)

    def read(
        self,
        request: Request,
        hint: Hint,
        passed: Prediction | None,
        submitted: bool,
        turn: SessionTurn | None = None,
    ) -> tuple[Prediction | None, bool]:
        """Read a prompt: what the instant reader says of its first and last tokens (None without
        one), unless the HTTP server has `passed` that, and whether the predictor will send a
        prediction: it gets the prompt, unless it has been `submitted` before, or this is one token
        of a beam. Less than a millisecond, whatever the length. May run on vLLM's input thread,
        before the scheduler knows the request and calls `arrived`. A `turn` of a session is read
        after the session's last words, and notes its own."""
        tokens = request.prompt_token_ids or ()
        # Decoded by the service, on its own thread, unless that has to be done here.
        prompt: str | Callable[[], str] = partial(self._text, tokens, _LONGEST_READ)
        text: str | None = None  # for the instant reader
        if turn is not None:
            text = self._text(tokens, _LONGEST_INSTANT)
            turn.words = newest_words(text)
            text = continued(text, turn.earlier)
            prompt = partial(self._continued, tokens, turn.earlier)
            if turn.earlier:
                passed = None  # the HTTP server does not know them
        provisional = None
        if self.instant is not None:
            if passed is not None and self.instant.same_shape(passed):
                provisional = passed
                # The HTTP server passes the probabilities on alone.
                if passed.decision is not self.instant.decision:
                    provisional = replace(passed, decision=self.instant.decision)
            else:
                if text is None:
                    text = self._text(tokens, _LONGEST_INSTANT)
                provisional = self.instant.read(text)
        if text is not None and len(tokens) <= _LONGEST_INSTANT:
            prompt = text
        if is_part_of_beam(request):  # else the same text would be read for each token of it
            return provisional, False
        if submitted:
            return provisional, True
        return provisional, self._submit(request.request_id, hint, prompt, provisional)

    def _text(self, tokens: Sequence[int], most: int) -> str:
        """The first and the last of more than `most` tokens, decoded."""
        if len(tokens) > most:
            tokens = [*tokens[: most // 2], *tokens[-most // 2 :]]
        try:
            return str(self.tokenizer.decode(list(tokens)))
        except Exception:
            return ""  # ids outside the vocabulary; vLLM decides about the request

    def _continued(self, tokens: Sequence[int], earlier: Sequence[str]) -> str:
        return continued(self._text(tokens, _LONGEST_READ), earlier)

    def _submit(
        self,
        request_id: str,
        hint: Hint,
        text: str | Callable[[], str],
        provisional: Prediction | None,
    ) -> bool:
        """Send the text of a prompt, or what gives it, to the predictor; False if no prediction
        will arrive."""
        if self.service is None:
            return False
        self._ahead[request_id] = None
        if len(self._ahead) > _MOST_AHEAD:
            self._ahead.popitem(last=False)
        order = reading_order(self._core.policy, hint, provisional)
        if self.service.submit(request_id, text, order):
            return True
        self._ahead.pop(request_id, None)
        return False

    def arrived(self, request_id: str) -> None:
        """The scheduler knows a submitted request; its prediction can be applied."""
        self._ahead.pop(request_id, None)

    def cancel(self, job: Job) -> None:
        """Withdraw the prompt of a request that ended, to save its forward passes."""
        if self.service is not None and job.awaits_prediction:
            self.service.cancel(job.request_id)

    def drain(self) -> Iterator[tuple[Job, Prediction | None]]:
        """Predictions that have arrived since the last call, of jobs that have not ended."""
        if self.service is None:
            return
        answers = self.service.drain()
        if not answers and not self._early:  # as in most steps
            return
        now = self._core.lifecycle.clock()
        answers = self._early + answers
        self._early = []
        for request_id, prediction in answers:
            job = self._jobs.get(request_id)
            if job is None and request_id in self._ahead:
                self._early.append((request_id, prediction))
                continue
            self._count_unread(prediction)
            if job is None:  # it has ended in the meantime
                continue
            # A prediction from memory may come before the request.
            self._counters.observe("prediction_latency_seconds", max(0.0, now - job.arrival))
            provisional = job.level if job.level_source is LevelSource.INSTANT else None
            self._drained.append((job, provisional))
            yield job, prediction

    def _count_unread(self, prediction: Prediction | None) -> None:
        """Count a failure of the predictor (None), or a prompt that it could not read."""
        if prediction is None:
            self._counters.add("failed_predictions")
        elif prediction.unreadable:
            self._counters.add("unreadable_prompts", prediction.unreadable)

    def applied(self) -> None:
        """The predictions of the last `drain` have been applied: count the levels that follow from
        them."""
        drained = self._drained
        self._drained = []
        for job, provisional in drained:
            if job.level_source is not LevelSource.PREDICTION:
                continue
            self._counters.add("predictions", str(job.level))
            if provisional is not None and provisional != job.level:
                direction = "raised" if job.level < provisional else "lowered"
                self._counters.add("corrected_levels", direction)

    def close(self) -> None:
        """Stop the predictor process of this engine."""
        if self.service is not None:
            self.service.close()


def _load_instant(model: str | None, buckets: LengthBuckets | None) -> InstantReader | None:
    try:
        reader = InstantReader.load_beside(model, buckets)
    except Exception as error:
        logger.warning("Semantic scheduling: no instant reader: %s.", error)
        return None
    if reader is None:
        logger.info(
            "Semantic scheduling: predictor.model has no instant reader; requests wait for "
            "the predictor at the default level."
        )
    return reader
