"""Explains the predictor's decision on one text: level, output length, and the words that decided.

A word's weight is how much the log-odds of the decided level fall when the word is left out. The
text is read as given, without a chat template, and lengths are those that the predictor was trained
with: a server calibrates them on its own answers.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import TYPE_CHECKING, Protocol

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.config.estimates import Estimate
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.decision import decide_level, expected_cost
from vllm_semantic_sched.policy.estimates.length import expected_output_tokens
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets, Prediction
from vllm_semantic_sched.policy.facts.profile import EngineProfile

if TYPE_CHECKING:
    from collections.abc import Sequence

_OCCLUDED = 128  # words left out one by one; a predictor's window holds no more wordpieces
_CHARACTERS_PER_TOKEN = 4  # of English, for a served model that is not known here
_ESTIMATES: tuple[Estimate, ...] = ("mean", "median", "p90")
_TINY = 1e-12  # a probability that a model could not tell from 0


class _Predictor(Protocol):
    length_buckets: LengthBuckets | None

    def predict(self, texts: Sequence[str]) -> list[Prediction]: ...


@dataclasses.dataclass(frozen=True)
class LengthShare:
    """One output-length bucket: `shortest` to `longest` tokens (None: no end)."""

    shortest: int
    longest: int | None
    probability: float


@dataclasses.dataclass(frozen=True)
class WordWeight:
    """A word, and how much the decided level loses without it; below 0 the level gains.

    Attributes:
        position: its place in the text, from 0.
        probability: loss of the level's probability.
        log_odds: loss of its log-odds, which tells words apart even where the model is sure.
    """

    word: str
    position: int
    probability: float
    log_odds: float


@dataclasses.dataclass(frozen=True)
class Explanation:
    """How the scheduler would treat a text.

    Attributes:
        level: decided urgency level, 0 = most urgent.
        probabilities, costs: per level; costs in levels served too early.
        lengths: the predicted distribution; empty if the model predicts no lengths.
        tokens: expected output tokens by estimate; empty likewise.
        remaining_seconds: predicted engine time for the whole request.
        words: heaviest first.
        occluded, word_count: number of words that were left out one by one, and of all words.
        notes: the parts that the policy does not use.

    The rank is (level, remaining_seconds), as far as the policy's base uses them.
    """

    level: int
    rule: str
    probabilities: tuple[float, ...]
    costs: tuple[float, ...]
    lengths: tuple[LengthShare, ...]
    tokens: dict[str, float]
    remaining_seconds: float
    words: tuple[WordWeight, ...]
    occluded: int
    word_count: int
    notes: tuple[str, ...]


def explain(
    text: str,
    predictor: _Predictor,
    policy: Policy,
    profile: EngineProfile,
    max_tokens: int | None = None,
) -> Explanation:
    """How the scheduler would treat `text` under a policy.

    Args:
        max_tokens: the client's limit on output tokens; None: no limit.
    """
    words = text.split()
    positions = _to_occlude(len(words))
    shorter = [" ".join(words[:at] + words[at + 1 :]) for at in positions]
    prediction, *without = predictor.predict([text, *shorter])
    decided = decide_level(prediction.urgency, policy.decision)
    whole = prediction.urgency
    weights = [
        WordWeight(
            words[at],
            at,
            whole[decided] - one.urgency[decided],
            _log_odds(whole, decided) - _log_odds(one.urgency, decided),
        )
        for at, one in zip(positions, without, strict=True)
    ]

    core = SchedulingCore(policy, profile, predictor.length_buckets)
    job = core.new_job(
        "explained",
        arrival=0.0,
        prompt_tokens=max(1, len(text) // _CHARACTERS_PER_TOKEN),
        max_output_tokens=sys.maxsize if max_tokens is None else max_tokens,
        hint=core.read_hints(None, None),
        awaits_prediction=True,
    )
    core.predicted(job, prediction)
    lengths, tokens = _lengths(prediction, predictor.length_buckets, job.max_output_tokens)
    return Explanation(
        level=job.level,
        rule=policy.decision.rule,
        probabilities=prediction.urgency,
        costs=tuple(
            expected_cost(prediction.urgency, level, policy.decision)
            for level in range(len(prediction.urgency))
        ),
        lengths=lengths,
        tokens=tokens,
        remaining_seconds=core.estimates.remaining(job),
        words=tuple(sorted(weights, key=lambda one: -abs(one.log_odds))),
        occluded=len(positions),
        word_count=len(words),
        notes=_notes(policy),
    )


def _to_occlude(count: int) -> list[int]:
    """Positions of the words to leave out: all, or the first and last ones of a long text, whose
    middle a predictor does not see either."""
    if count <= _OCCLUDED:
        return list(range(count))
    half = _OCCLUDED // 2
    return [*range(half), *range(count - half, count)]


def _lengths(
    prediction: Prediction, buckets: LengthBuckets | None, limit: int
) -> tuple[tuple[LengthShare, ...], dict[str, float]]:
    if prediction.length is None or buckets is None:
        return (), {}
    starts = (1, *buckets.edges)
    ends = (*(edge - 1 for edge in buckets.edges), None)
    shares = tuple(map(LengthShare, starts, ends, prediction.length))
    tokens: dict[str, float] = {
        estimate: min(limit, expected_output_tokens(prediction.length, buckets, 0, estimate))
        for estimate in _ESTIMATES
    }
    return shares, tokens


def _notes(policy: Policy) -> tuple[str, ...]:
    if policy.base == "fcfs":
        return ("This policy leaves vLLM's own order: nothing here has an effect.",)
    if not policy.predictor.enabled:
        return ("This policy does not read texts (predictor.enabled: false).",)
    unused = {"level": policy.uses_urgency, "length": policy.uses_length}
    return tuple(
        f"Under base policy {policy.base} the {what} has no effect."
        for what, used in unused.items()
        if not used
    )


def _log_odds(probabilities: Sequence[float], level: int) -> float:
    # Summed separately: beside a probability near 1 the others' digits would be lost.
    others = sum(p for at, p in enumerate(probabilities) if at != level)
    return math.log(max(probabilities[level], _TINY)) - math.log(max(others, _TINY))
