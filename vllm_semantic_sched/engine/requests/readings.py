"""The readings of requests that have ended, to which operators' corrections refer."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from vllm_semantic_sched.engine.requests.arrivals import origin_of
from vllm_semantic_sched.policy.facts.job import Job

_KEPT = 20_000  # about 8 MB


class RecentReadings:
    """Probabilities and level of the requests that ended last, by the client's request id. Of
    several prompts or answers of a request, those of the last."""

    def __init__(self) -> None:
        self._readings: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def keep(self, job: Job) -> None:
        """Remember a job that has ended, if the predictor has read it."""
        if job.prediction is None or job.awaits_prediction:
            return
        origin = origin_of(job.request_id)
        self._readings[origin] = {
            "probabilities": list(job.prediction.urgency),
            "level": job.level,
        }
        self._readings.move_to_end(origin)
        if len(self._readings) > _KEPT:
            self._readings.popitem(last=False)

    def find(self, request_id: str) -> dict[str, Any] | None:
        """`probabilities` and `level` of a request, by the client's id or vLLM's; None if it is not
        known."""
        return self._readings.get(request_id) or self._readings.get(origin_of(request_id))
