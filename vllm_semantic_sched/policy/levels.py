"""Decides the urgency level of each job: by its hint, its prediction, or the default."""

from collections.abc import Mapping
from typing import Any

from vllm_semantic_sched.policy.estimates import decision
from vllm_semantic_sched.policy.facts.job import UNREAD, Floor, Job, LevelSource, SessionTurn
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.facts.wait import Cause
from vllm_semantic_sched.policy.order.seating import Seating
from vllm_semantic_sched.policy.record.event_format import LONGEST_ID
from vllm_semantic_sched.policy.record.lifecycle import NOTHING, Lifecycle
from vllm_semantic_sched.policy.sessions import Sessions

_PLACING = ("start", "preempt")
"""Values of `predictor.instant` with which a provisional level places a request in the queue."""


class LevelDecider:
    """Decides levels; whoever has the job stores it again, because its rank has changed."""

    def __init__(self, seating: Seating, lifecycle: Lifecycle, sessions: Sessions) -> None:
        self._seating = seating
        self._lifecycle = lifecycle
        self._sessions = sessions

    def decided(self, job: Job) -> int:
        """The level by a job's prediction or the default; the level of a hint stays."""
        if job.level_source is LevelSource.DEFAULT:
            return max(self._seating.policy.default_level, job.best_level)
        predicted = job.level_source in (LevelSource.PREDICTION, LevelSource.INSTANT)
        if predicted and job.prediction is not None:
            level = decision.predicted_level(self._seating.policy, job.prediction)
            return max(level, job.best_level)
        return job.level

    def glance(self, job: Job, provisional: Prediction | None) -> None:
        """Apply the instant reader's prediction to a new job, as far as the policy allows. The
        level of a hint stays."""
        policy = self._seating.policy
        if policy.predictor.instant not in _PLACING:
            return
        if provisional is None or provisional.unreadable:
            return
        job.prediction = provisional
        if job.level_source is LevelSource.DEFAULT:
            job.level_source = LevelSource.INSTANT
            job.level = self.decided(job)
            job.sure_level = decision.rightful_level(policy, provisional.urgency)

    def inherit(self, job: Job) -> None:
        """Give a new job the floor of its session, if that is more urgent and its client states no
        level. Until its text has been read, it has the rights of its provisional level."""
        turn = job.session
        floor = None if turn is None else turn.inherited(job.level, job.level_source)
        if floor is None:
            return
        if job.awaits_prediction and job.level_source is LevelSource.DEFAULT:
            job.sure_level = None
        job.level = floor.level
        job.level_source = LevelSource.SESSION

    def capped(self, job: Job, level: int, counted: bool = False) -> int:
        """`level`, or the next one that the tenant's cap on top levels allows; `counted`: the
        request counts toward the cap already, at its present level."""
        if not self._seating.used.table.top_cap:
            return level
        lowest = self._seating.policy.levels - 1
        top_levels, before = self._seating.top_levels, job.level if counted else None
        allowed = top_levels.level(job.tenant, level, lowest, job.arrival, before)
        if allowed != level:
            job.best_level = allowed
        return allowed

    def change(self, job: Job, level: int, unread: bool = False) -> None:
        """Change a job's level. Only this method does. `unread`: see `Lifecycle.relevel`."""
        before = job.level
        if level != before:
            job.level = level
            self._lifecycle.relevel(job, before, unread)
            self._seating.relevel(job, before)

    def read(self, job: Job, prediction: Prediction | None) -> None:
        """Apply a prediction, or its failure (None). The level of a hint stays; so does a
        provisional prediction if the predictor failed. A text that the predictor cannot judge keeps
        the default level."""
        if prediction is not None and prediction.unreadable:
            prediction = None
        unread, before = job.level_unread, job.level
        inversions = self._seating.inversions
        if inversions is not None and job.started is None and unread:
            inversions.read(job)
        job.awaits_prediction = False
        job.read_at = self._lifecycle.clock()
        job.draft = None  # made without it
        if prediction is not None:
            job.prediction = prediction
            if job.level_source in UNREAD:
                counted = job.level_source is not LevelSource.DEFAULT
                job.level_source = LevelSource.PREDICTION
                job.sure_level = 0
                level = self.decided(job)
                if job.session is not None:
                    level = self._floored(job, job.session, level)
                level = self.capped(job, level, counted)
                self.change(job, level, unread and level < before)
                if job.session is not None:
                    now = self._lifecycle.clock()
                    latest = Floor(job.level, job.request_id, job.level_source, now)
                    self._sessions.decided(job.session, latest)
        waits, queue = self._lifecycle.waits, self._seating.waiting
        if waits is not None and unread and job.wait is not None and job not in queue:
            waits.split(job.wait, Cause.UNREAD)  # it is queued only now
        if self._lifecycle.journal is not None:
            self._lifecycle.note(job, "read", {"level_before": before, **self.explain(job)})

    def _floored(self, job: Job, turn: SessionTurn, level: int) -> int:
        """The level of a job that has been read, or the floor of its session."""
        floor = turn.inherited(level, job.level_source)
        if floor is None:
            return level
        job.level_source = LevelSource.SESSION
        return max(floor.level, job.best_level)

    def tell(self, job: Job, level: int, source: LevelSource) -> None:
        """Apply a level that the client states later."""
        counted = job.level_source is not LevelSource.DEFAULT or not job.awaits_prediction
        job.level_source = source
        job.sure_level = 0
        self.change(job, self.capped(job, level, counted))

    def assign(self, job: Job, level: int, by: str, why: str) -> None:
        """Apply the level that an operator sets. Neither the tenant's cap nor a later reading of
        the text changes it. `by`, `why`: for the event log."""
        before = job.level
        inversions = self._seating.inversions
        if inversions is not None and job.started is None:
            inversions.read(job)  # requests that got seats before did not overtake this level
        job.level_source = LevelSource.OPERATOR
        job.sure_level = 0
        job.raised = level < before or (job.raised and level == before)
        self.change(job, level)
        if self._lifecycle.journal is not None:
            details = {"level_before": before, "by": by, "why": why}
            self._lifecycle.note(job, "operator", details)

    def explain(self, job: Job) -> Mapping[str, Any]:
        """The rule and the probabilities that decided a job's level, if that is logged."""
        if self._lifecycle.journal is None:
            return NOTHING
        details: dict[str, Any] = {"rule": decision.deciding_rule(job)}
        if job.prediction is not None:
            details["urgency"] = _rounded(job.prediction)
        if job.session is not None:
            details |= _session(job.session, self._lifecycle.clock())
        return details


def _session(turn: SessionTurn, now: float) -> dict[str, Any]:
    """The turn of a session, and the evidence for its floor."""
    floor = turn.floor
    if floor is None:
        return {"turn": turn.number}
    return {
        "turn": turn.number,
        "floor": floor.level,
        "floor_by": floor.request_id[:LONGEST_ID],
        "floor_from": floor.source.value,
        "floor_age": round(now - floor.time, 3),
    }


def _rounded(prediction: Prediction) -> list[float]:
    return [round(share, 4) for share in prediction.urgency]
