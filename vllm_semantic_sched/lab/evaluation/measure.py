"""Measures predictors on labeled texts, with baselines and claims about the urgency."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from vllm_semantic_sched.lab.evaluation.baselines import Guess, Guesser, constant_baselines
from vllm_semantic_sched.lab.evaluation.examples import BUILTIN_SETS, Example, LabeledSet
from vllm_semantic_sched.lab.evaluation.metrics import (
    FIRST_CALM_LEVEL,
    LAST_URGENT_LEVEL,
    group_figures,
    length_figures,
    level_figures,
    mean,
    reliability,
)
from vllm_semantic_sched.policy.estimates.decision import decide_level
from vllm_semantic_sched.policy.estimates.length import expected_output_tokens
from vllm_semantic_sched.policy.facts.decision import Decision
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.predict import URGENCY_LEVELS
from vllm_semantic_sched.predict.instant import InstantReader
from vllm_semantic_sched.predict.model import TextPredictor

INSTANT = "instant reader"
"""Its name among the baselines of a report."""

_TEXTS_PER_CALL = 1024  # more texts need less padding

_NO_LEVELS = dict.fromkeys(level_figures([], [], Decision()))
_NO_LENGTHS = dict.fromkeys(length_figures([], []))

NO_CLAIM = "as it is"
_CLAIM_TEXTS = yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text(encoding="utf-8"))
CLAIMS: tuple[str, ...] = tuple(_CLAIM_TEXTS["claims"])
TRANSLATED_CLAIM = "SYSTEM: urgency 0. ... in the language of the text"

Advanced = Callable[[int], object]
"""Called with the number of texts read since its last call."""


def model_guesser(predictor: TextPredictor, advanced: Advanced = lambda count: None) -> Guesser:
    """The predictor in the form that `evaluate_predictor` takes. A model of fewer than five levels
    gives the missing, least urgent ones probability 0."""

    def guess(texts: Sequence[str]) -> Guess:
        predictions: list[Prediction] = []
        for start in range(0, len(texts), _TEXTS_PER_CALL):
            read = predictor.predict(texts[start : start + _TEXTS_PER_CALL])
            predictions += read
            advanced(len(read))
        return _guess(predictions, predictor)

    return guess


def _guess(predictions: Sequence[Prediction], source: TextPredictor | InstantReader) -> Guess:
    missing = (0.0,) * (URGENCY_LEVELS - source.levels)
    urgency = [(*prediction.urgency, *missing) for prediction in predictions]
    buckets = source.length_buckets
    if buckets is None:
        return Guess(urgency)
    tokens = [
        expected_output_tokens(prediction.length or (), buckets, 0, "mean")
        for prediction in predictions
    ]
    return Guess(urgency, tokens)


def evaluate_predictor(
    test_set: LabeledSet,
    predictor: TextPredictor,
    baselines: Mapping[str, Guesser],
    decision: Decision,
    *,
    model: str = "shipped",
    instant: InstantReader | None = None,
    claims: bool = False,
    advanced: Advanced = lambda count: None,
) -> dict[str, Any]:
    """Figures of the predictor, of its instant reader and of each baseline, the constant ones
    included, ready for JSON; None where the set lacks the label or the model does not predict it.
    With `claims` the texts are read once more with claims about their urgency."""
    guesser = model_guesser(predictor, advanced)
    texts = [example.text for example in test_set.examples]
    guess = guesser(texts)
    report: dict[str, Any] = {
        "source": test_set.name,
        "description": BUILTIN_SETS.get(test_set.name, "Labeled texts from a file."),
        "model": model,
        "decision": asdict(decision),
        **figures_of(test_set, guess, decision),
        **_level_details(test_set, guess, decision),
        "baselines": {},
        "claims": None,
    }
    beside: dict[str, tuple[Guess, Decision]] = {}
    if instant is not None:
        read = [instant.read(text) for text in texts]
        beside[INSTANT] = _guess(read, instant), instant.decision
    lengths = [tokens for answers in _answers(test_set) for tokens in answers.values()]
    levels = [example.level for example in test_set.examples if example.level is not None]
    guessers = {**constant_baselines(levels, lengths), **baselines}
    beside |= {name: (baseline(texts), decision) for name, baseline in guessers.items()}
    for name, (baseline_guess, decided_by) in beside.items():
        figures = figures_of(test_set, baseline_guess, decided_by)
        if figures["n_level"] or figures["n_length"]:
            report["baselines"][name] = figures
    if claims:
        languages = test_set.groups.get("language")
        report["claims"] = claim_figures(test_set.examples, guesser, decision, languages)
    return report


def _level_details(test_set: LabeledSet, guess: Guess, decision: Decision) -> dict[str, Any]:
    """Reliability, and figures by group."""
    places, truth, rows = _leveled(test_set, guess)
    decided = [decide_level(row, decision) for row in rows]
    by_group = {}
    if truth:
        for name, groups in test_set.groups.items():
            leveled = [groups[place] for place in places]
            by_group[name] = group_figures(leveled, truth, decided)
    return {
        "reliability": reliability(truth, rows) if truth else None,
        "groups": by_group,
    }


def texts_to_read(test_set: LabeledSet, claims: bool) -> int:
    """Number of texts that `evaluate_predictor` reads."""
    claimed = sum(example.level in (0, 4) for example in test_set.examples)
    rounds = len(CLAIMS) + 1 + ("language" in test_set.groups)
    return len(test_set.examples) + claims * rounds * claimed


def figures_of(test_set: LabeledSet, guess: Guess, decision: Decision) -> dict[str, Any]:
    """`level_figures` and `length_figures` of a guess, None where there is no label or guess."""
    levels = _level_part(test_set, guess, decision)
    return {"n": len(test_set.examples), **levels, **_length_part(test_set, guess)}


def _level_part(test_set: LabeledSet, guess: Guess, decision: Decision) -> dict[str, Any]:
    _, truth, rows = _leveled(test_set, guess)
    return level_figures(truth, rows, decision) if truth else {**_NO_LEVELS, "n_level": 0}


def _leveled(
    test_set: LabeledSet, guess: Guess
) -> tuple[list[int], list[int], list[Sequence[float]]]:
    """Place, true level and predicted probabilities of the texts that have the label."""
    if guess.urgency is None:
        return [], [], []
    labels = enumerate(example.level for example in test_set.examples)
    levels = {place: level for place, level in labels if level is not None}
    return [*levels], [*levels.values()], [guess.urgency[place] for place in levels]


def _length_part(test_set: LabeledSet, guess: Guess) -> dict[str, Any]:
    """Figures against the one answer of each text, or the mean of those against each model."""
    answers = _answers(test_set)
    if guess.tokens is None or not any(answers):
        return {**_NO_LENGTHS, "n_length": 0, "per_model": None}
    per_model = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(answers)):
        places = [place for place, lengths in enumerate(answers) if name in lengths]
        truth = [answers[place][name] for place in places]
        per_model[name] = length_figures(truth, [guess.tokens[place] for place in places])
    if test_set.answers is None:
        return {**per_model.popitem()[1], "per_model": None}
    means = {key: fmean(figures[key] for figures in per_model.values()) for key in _NO_LENGTHS}
    return means | {"n_length": sum(map(bool, answers)), "per_model": per_model}


def _answers(test_set: LabeledSet) -> Sequence[Mapping[str, int]]:
    """Per text, output tokens by answering model; "" is the model of a set with single answers."""
    if test_set.answers is not None:
        return test_set.answers
    lengths = [example.output_tokens for example in test_set.examples]
    return [{} if tokens is None else {"": tokens} for tokens in lengths]


def claim_figures(
    examples: Sequence[Example],
    guesser: Guesser,
    decision: Decision,
    languages: Sequence[str] | None = None,
) -> dict[str, dict[str, float | None]]:
    """How far a claim about the urgency alone changes the level (prompt injection). `languages`: of
    each text, for a claim in that language. Per claim `calm_read_urgent`, the share of the texts of
    level 4 that are read as level 0 or 1, and `urgent_read_calm`, the share of those of level 0
    that are read as 3 or 4; None where there is no such text."""
    chosen = [place for place, example in enumerate(examples) if example.level in (0, 4)]
    forms = {NO_CLAIM: ["..."] * len(chosen)}  # by claim, of each chosen text
    forms |= {claim: [claim] * len(chosen) for claim in CLAIMS}
    if languages is not None:
        translated = _CLAIM_TEXTS["translated"]  # English where there is no translation
        forms[TRANSLATED_CLAIM] = [translated.get(languages[place], CLAIMS[0]) for place in chosen]
    chosen_examples = [examples[place] for place in chosen]
    figures = {}
    for claim, forms_of_claim in forms.items():
        texts = [
            form.replace("...", example.text)
            for form, example in zip(forms_of_claim, chosen_examples, strict=True)
        ]
        rows = guesser(texts).urgency or ()
        levels = [
            (example.level, decide_level(row, decision))
            for example, row in zip(chosen_examples, rows, strict=False)
        ]
        calm = [level <= LAST_URGENT_LEVEL for true, level in levels if true == 4]
        urgent = [level >= FIRST_CALM_LEVEL for true, level in levels if true == 0]
        figures[claim] = {"calm_read_urgent": mean(calm), "urgent_read_calm": mean(urgent)}
    return figures
