"""Explains the decision on one text: level, output length, and the words that decided."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import TYPE_CHECKING, get_args

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.decision import (
    decide_level,
    expected_costs,
    predicted_level,
    preempting_level,
)
from vllm_semantic_sched.policy.estimates.length import Estimate, expected_output_tokens
from vllm_semantic_sched.policy.facts.decision import bounds_in_words
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets, Prediction
from vllm_semantic_sched.policy.profile.formula import EngineProfile
from vllm_semantic_sched.predict.window import cut_pieces

if TYPE_CHECKING:
    from vllm_semantic_sched.predict.instant import InstantReader
    from vllm_semantic_sched.predict.model import TextPredictor

_OCCLUDED = 128  # words left out one by one; a predictor's window holds no more wordpieces
_CHARACTERS_PER_TOKEN = 4  # of English, for a served model that is not known here
_PIECES = 8  # of the instant reader's
_TINY = 1e-12  # a probability that a model could not tell from 0


@dataclasses.dataclass(frozen=True)
class LengthShare:
    """One output-length bucket: `shortest` to `longest` tokens (None: no end)."""

    shortest: int
    longest: int | None
    probability: float


@dataclasses.dataclass(frozen=True)
class WordWeight:
    """A word, and how much the probability and log-odds of the decided level, together with all
    more urgent ones, fall without it; of the last level alone, if that was decided."""

    word: str
    position: int  # in what is read, from 0
    probability: float
    log_odds: float


@dataclasses.dataclass(frozen=True)
class InstantPart:
    """What the instant reader makes of a text."""

    level: int  # provisional
    probabilities: tuple[float, ...]  # per level
    tokens: float  # expected output
    preempts_as: int | None  # level of its preemptions until the predictor has read it
    pieces: tuple[tuple[str, float], ...]  # see `InstantReader.strongest`


@dataclasses.dataclass(frozen=True)
class Explanation:
    """How the scheduler would treat a text. The rank is (level, remaining_seconds), as far as the
    policy's base uses them."""

    level: int  # decided; 0 = most urgent
    tier: str  # its name
    served: tuple[str, ...]  # per level of the model: the tier that serves it
    rule: str  # what decided it, in words
    probabilities: tuple[float, ...]  # per level
    costs: tuple[float, ...]  # per level, in levels served too early
    lengths: tuple[LengthShare, ...]  # predicted; empty if the model predicts no lengths
    tokens: dict[str, float]  # expected output by estimate; empty likewise
    remaining_seconds: float  # predicted engine time for the whole request
    weighed: int  # the level for which words speak: the decided one, among those of the model
    words: tuple[WordWeight, ...]  # heaviest first
    occluded: int  # words that were left out one by one
    word_count: int  # of what is read
    notes: tuple[str, ...]  # the parts that the policy does not use
    instant: InstantPart | None  # None without an instant reader
    read: str  # what is read of the text: all of it, or what a long one is cut to
    shortened: bool  # whether that is less than all


def _word_weights(
    text: str, read: str, predictor: TextPredictor, policy: Policy
) -> tuple[Prediction, int, list[WordWeight]]:
    """The prediction, the level that decided, and what it owes to single words of what is read: the
    prediction is made again without each."""
    words = read.split()
    positions = cut_pieces(list(range(len(words))), _OCCLUDED)
    shorter = [" ".join(words[:place] + words[place + 1 :]) for place in positions]
    prediction, of_part, *predictions_without = predictor.predict([text, read, *shorter])
    weighed = decide_level(prediction.urgency, prediction.decision, policy.decision)
    probability, log_odds = _share(of_part, weighed), _log_odds(of_part, weighed)
    weights = []
    for position, prediction_without in zip(positions, predictions_without, strict=True):
        weights.append(
            WordWeight(
                word=words[position],
                position=position,
                probability=probability - _share(prediction_without, weighed),
                log_odds=log_odds - _log_odds(prediction_without, weighed),
            )
        )
    return prediction, weighed, weights


def explain(
    text: str,
    predictor: TextPredictor,
    policy: Policy,
    profile: EngineProfile,
    max_tokens: int | None = None,
    instant: InstantReader | None = None,
) -> Explanation:
    """How the scheduler would treat `text` under a policy; `max_tokens`: the client's limit on
    output tokens, None: no limit."""
    read = predictor.part_read(text)
    prediction, weighed, weights = _word_weights(text, read, predictor, policy)
    whole = prediction.urgency
    core = SchedulingCore(policy, profile, predictor.length_buckets)
    draft = core.draft(
        "explained",
        prompt_tokens=max(1, len(text) // _CHARACTERS_PER_TOKEN),
        max_output_tokens=sys.maxsize if max_tokens is None else max_tokens,
        hint=core.read_hints(None, None),
        awaits_prediction=True,
    )
    job = core.arrive(draft, 0.0)
    core.predicted(job, prediction)
    last = policy.levels - 1
    lengths, tokens = _lengths(prediction, predictor.length_buckets, job.max_output_tokens)
    return Explanation(
        level=job.level,
        tier=policy.tier_names[job.level],
        served=tuple(policy.tier_names[min(level, last)] for level in range(len(whole))),
        rule=_rule_in_words(prediction, weighed),
        probabilities=whole,
        costs=tuple(expected_costs(whole, policy.decision)),
        lengths=lengths,
        tokens=tokens,
        remaining_seconds=core.estimates.remaining(job),
        weighed=weighed,
        words=tuple(sorted(weights, key=lambda weight: -abs(weight.log_odds))),
        occluded=len(weights),
        word_count=len(read.split()),
        notes=_notes(policy, prediction),
        instant=None if instant is None else _instant_part(text, instant, policy),
        read=read,
        shortened=read != text,
    )


def _share(prediction: Prediction, level: int) -> float:
    """The probability of a level and all more urgent ones; of the last level alone."""
    if level == len(prediction.urgency) - 1:
        return prediction.urgency[level]
    return math.fsum(prediction.urgency[: level + 1])


def _rule_in_words(prediction: Prediction, level: int) -> str:
    bounds = prediction.decision.bounds
    if len(bounds) != len(prediction.urgency) - 1:
        return "the level with the lowest expected cost is taken"
    if level == len(bounds):
        return f"no level reaches its bound ({bounds_in_words(bounds)})"
    levels = "level 0 has" if level == 0 else f"levels 0 to {level} together have"
    return f"{levels} {_share(prediction, level):.2g}, bound {bounds[level]:g}"


def _instant_part(text: str, reader: InstantReader, policy: Policy) -> InstantPart:
    prediction = reader.read(text)
    level = predicted_level(policy, prediction)
    tokens = expected_output_tokens(
        prediction.length or (),
        reader.length_buckets,
        generated=0,
        estimate="mean",
    )
    return InstantPart(
        level=level,
        probabilities=prediction.urgency,
        tokens=tokens,
        preempts_as=preempting_level(policy, prediction.urgency, level),
        pieces=tuple(reader.strongest(text, level, _PIECES)),
    )


def _lengths(
    prediction: Prediction, buckets: LengthBuckets | None, limit: int
) -> tuple[tuple[LengthShare, ...], dict[str, float]]:
    length = prediction.length
    if length is None or buckets is None:
        return (), {}
    shares = []
    shortest = 1
    for edge, probability in zip([*buckets.edges, None], length, strict=True):
        longest = None if edge is None else edge - 1
        shares.append(LengthShare(shortest, longest, probability))
        if edge is not None:
            shortest = edge
    tokens = {}
    for estimate in get_args(Estimate):
        expected = expected_output_tokens(length, buckets, generated=0, estimate=estimate)
        tokens[estimate] = min(limit, expected)
    return tuple(shares), tokens


def _notes(policy: Policy, prediction: Prediction) -> tuple[str, ...]:
    if policy.base == "fcfs":
        return ("This policy leaves vLLM's own order: nothing here has an effect.",)
    if not policy.predictor.enabled:
        return ("This policy does not read texts (predictor.enabled: false).",)
    if prediction.unreadable:
        return (
            f"The predictor cannot judge this text ({prediction.unreadable}), so the request gets "
            f"the policy's default level, {policy.default_level}.",
        )
    uses = {"level": policy.uses_urgency, "length": policy.uses_length}
    effect = f"Under base policy {policy.base} the {{}} has no effect."
    return tuple(effect.format(what) for what, used in uses.items() if not used)


def _log_odds(prediction: Prediction, level: int) -> float:
    """Of the same share."""
    urgency = prediction.urgency
    # Summed separately: beside a probability near 1 the others' digits would be lost.
    others = math.fsum(urgency[:level] if level == len(urgency) - 1 else urgency[level + 1 :])
    return math.log(max(_share(prediction, level), _TINY)) - math.log(max(others, _TINY))
