"""Connects the prediction service to the scheduler's jobs."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from vllm_semantic_sched.engine.metrics.counters import Counters
from vllm_semantic_sched.engine.vllm_api import Request
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.hints import Hint
from vllm_semantic_sched.policy.facts.job import Job, LevelSource
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.predict.service import PredictionService

# Tokens taken from each end of a prompt; together about twice a predictor's window.
_WINDOW = 256

# Requests remembered between their submission and their arrival. Far more than vLLM's input queue
# holds: only requests that it rejects stay here.
_MOST_AHEAD = 65536


class PredictionFeed:
    """Sends prompts to the predictor and hands out its predictions, without ever waiting for them.

    Args:
        jobs: the scheduler's jobs by request id.
        structured_output_manager: holds the served model's tokenizer in this process.

    Attributes:
        service: the predictor; None if the policy uses none.
        tokenizer: the served model's; None if the engine has none.

    Raises:
        PredictorError: the configured model cannot be loaded.
    """

    def __init__(
        self,
        core: SchedulingCore,
        jobs: dict[str, Job],
        structured_output_manager: Any,
        counters: Counters,
        logger: logging.Logger,
    ) -> None:
        self._core = core
        self._jobs = jobs
        self._counters = counters
        # Submitted before the scheduler has seen them, and answers that came as early. Both
        # threads change the first, each time by one atomic call.
        self._ahead: OrderedDict[str, None] = OrderedDict()
        self._early: list[tuple[str, Prediction | None]] = []
        self.service: PredictionService | None = None
        self.tokenizer = getattr(structured_output_manager, "tokenizer", None)
        policy = core.policy
        if not policy.reads(hinted=False):
            return
        tokenizer = self.tokenizer
        if tokenizer is None:
            logger.warning(
                "Semantic scheduling: vLLM runs without a tokenizer, so prompts cannot be read; "
                "levels come from hints only."
            )
            return
        self.service = PredictionService(policy.predictor, decode=tokenizer.decode, logger=logger)
        core.estimates.buckets = self.service.start()

    @property
    def decode(self) -> Callable[[list[int]], str] | None:
        """Converts token ids to text; None if the engine has no tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.decode

    def gauges(self) -> dict[str, float]:
        """State of the predictor; empty if the policy uses none."""
        if self.service is None:
            return {}
        return {
            "predictor_queue": self.service.pending,
            "predictor_up": float(self.service.up),
        }

    def reads(self, request: Request, hint: Hint) -> bool:
        """Whether the predictor should read a request's text."""
        return (
            self.service is not None
            and self._core.policy.reads(hinted=hint.level is not None)
            and bool(request.prompt_token_ids)
        )

    def submit(self, request: Request, hint: Hint) -> bool:
        """Send a request's prompt to the predictor. May be called on vLLM's input thread, before
        the scheduler knows the request; it then calls `arrived`.

        Returns:
            False if no prediction will arrive.
        """
        if self.service is None:
            return False
        tokens = request.prompt_token_ids or []
        if len(tokens) > 2 * _WINDOW:
            tokens = [*tokens[:_WINDOW], *tokens[-_WINDOW:]]
        level = self._core.policy.default_level if hint.level is None else hint.level
        self._ahead[request.request_id] = None
        if len(self._ahead) > _MOST_AHEAD:
            self._ahead.popitem(last=False)
        if self.service.submit(request.request_id, tokens, level):
            return True
        self._ahead.pop(request.request_id, None)
        return False

    def arrived(self, request_id: str) -> None:
        """The scheduler knows a request that was submitted; its prediction can be applied."""
        self._ahead.pop(request_id, None)

    def cancel(self, job: Job) -> None:
        """Withdraw the prompt of a request that ended, to save its forward pass."""
        if self.service is not None and job.awaits_prediction:
            self.service.cancel(job.request_id)

    def take(self) -> Iterator[tuple[Job, Prediction | None]]:
        """Predictions that have arrived since the last call, of jobs that have not ended."""
        if self.service is None:
            return
        self._counters.raise_to("cached_predictions", self.service.cached)
        self._counters.raise_to("predictor_restarts", self.service.restarts)
        for texts, seconds in self.service.passes():
            self._counters.observe("prediction_batch_size", texts)
            self._counters.observe("prediction_pass_seconds", seconds)
        now = self._core.lifecycle.clock()
        early, self._early = self._early, []
        for request_id, prediction in (*early, *self.service.drain()):
            job = self._jobs.get(request_id)
            if job is None and request_id in self._ahead:
                self._early.append((request_id, prediction))
                continue
            if prediction is None:
                self._counters.add("failed_predictions")
            if job is None:  # it has ended in the meantime
                continue
            # A prediction from memory may come before the request.
            self._counters.observe("prediction_latency_seconds", max(0.0, now - job.arrival))
            yield job, prediction
            if job.level_source is LevelSource.PREDICTION:  # as the caller has applied it
                self._counters.add("predictions", str(job.level))

    def close(self) -> None:
        """Stop the predictor."""
        if self.service is not None:
            self.service.close()
