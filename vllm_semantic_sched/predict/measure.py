"""Measures predictors on labelled texts: what `semsched evaluate` computes."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, get_args

from tqdm import tqdm

from vllm_semantic_sched.datasets import (
    DataNotFound,
    alpaca_eval_answers,
    instruction_pairs,
    ktas_visits,
    medical_questions,
    triage_visits,
)
from vllm_semantic_sched.policy.config.estimates import Decision
from vllm_semantic_sched.policy.estimates.decision import decide_level
from vllm_semantic_sched.predict.baselines import Guess, Guesser, constant_baselines
from vllm_semantic_sched.predict.buckets import expected_tokens
from vllm_semantic_sched.predict.data import Example
from vllm_semantic_sched.predict.metrics import (
    kind_figures,
    length_figures,
    level_figures,
    reliability,
)
from vllm_semantic_sched.predict.model import TextPredictor
from vllm_semantic_sched.predict.network import URGENCY_LEVELS

if TYPE_CHECKING:
    from vllm_semantic_sched.predict.domain import Domain

_PER_CALL = 256
_COLUMNS = ("text", "level", "output_tokens")

RULES: tuple[str, ...] = get_args(Decision.model_fields["rule"].annotation)
"""All rules of a decision: a report gives the figures of the others beside the policy's own."""

_NO_LEVELS = dict.fromkeys(level_figures([], [], Decision()))
_NO_LENGTHS = dict.fromkeys(length_figures([], []))


@dataclass(frozen=True)
class LabelledSet:
    """Labelled texts that predictors are measured on.

    Attributes:
        examples: the texts, each with a level, an output length, or both.
        kinds: the kind of each text, if the set tells kinds apart.
        answers: per text, the output tokens of each of several answering models; then the
            examples themselves carry no length.
    """

    name: str
    examples: Sequence[Example]
    kinds: Sequence[str] | None = None
    answers: Sequence[Mapping[str, int]] | None = None


@dataclass
class Evaluation:
    """What evaluating the model on one test set gave.

    Attributes:
        report: the figures, ready for JSON (`evaluate` says which).
        lengths: (true, predicted) output tokens of each text with a length; the true one is a
            mean where several models answered.
    """

    report: dict[str, Any]
    lengths: Sequence[tuple[float, float]]


def read_examples(path: Path, domain: Domain | None = None) -> list[Example]:
    """The labelled texts of a CSV with the columns text and level and/or output_tokens.

    Args:
        domain: what labels mean; None for levels by number and the emergency domain's names.

    Raises:
        ValueError: naming file, line, column and what is valid.
    """
    return [example for example, _ in _rows(path, domain)]


def read_labelled_set(path: Path, domain: Domain | None = None) -> LabelledSet:
    """Like `read_examples`, with the column `kind` if there is one; named after the file."""
    rows = list(_rows(path, domain))
    kinds = [kind for _, kind in rows if kind is not None]
    return LabelledSet(path.name, [example for example, _ in rows], kinds or None)


def write_examples(examples: Sequence[Example], path: Path) -> None:
    """Write a CSV that `read_examples` reads back the same."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        writer.writerows((one.text, one.level, one.output_tokens) for one in examples)


def builtin_set(name: str, root: Path | None) -> LabelledSet:
    """A test set out of the data folder, one of `evaluate.BUILTIN`.

    Raises:
        DataNotFound: there is no data folder, or a file is missing in it.
    """
    if root is None:
        raise DataNotFound(f"{name} needs the data folder: pass --data-root or set SEMSCHED_DATA")
    if name == "alpaca-eval":
        answered = list(alpaca_eval_answers(root))
        texts = [Example(one.text) for one in answered]
        return LabelledSet(name, texts, answers=[one.output_tokens for one in answered])
    return LabelledSet(name, list(_builtin_examples(name, root)))


def _builtin_examples(name: str, root: Path) -> Iterator[Example]:
    if name == "nhamcs-test":
        visits = (visit for visit in triage_visits(root) if visit.split == "test")
        return (Example(visit.text, visit.level) for visit in visits)
    if name == "ktas":
        return (Example(visit.complaint, visit.level) for visit in ktas_visits(root))
    if name == "dolly":
        pairs = list(instruction_pairs(root, ("dolly_3k.json",)))
    elif name == "alpaca-test":
        pairs = [one for one in instruction_pairs(root, ("random_9k.json",)) if one.split == "test"]
    elif name == "lengths-test":
        both = (*instruction_pairs(root), *medical_questions(root))
        pairs = [pair for pair in both if pair.split == "test"]
    else:
        raise ValueError(f"{name!r} is no built-in test set")
    return (Example(pair.text, None, pair.output_tokens) for pair in pairs)


def model_guesser(predictor: TextPredictor, label: str) -> Guesser:
    """The predictor in the form that `evaluate` takes; progress is shown on a terminal.

    A model of fewer than five levels never says the missing, least urgent ones.
    """

    def guess(texts: Sequence[str]) -> Guess:
        missing = (0.0,) * (URGENCY_LEVELS - predictor.levels)
        buckets = predictor.length_buckets
        urgency: list[tuple[float, ...]] = []
        tokens: list[float] = []
        with tqdm(total=len(texts), desc=label, unit="text", disable=None) as progress:
            for start in range(0, len(texts), _PER_CALL):
                predictions = predictor.predict(texts[start : start + _PER_CALL])
                urgency += [(*one.urgency, *missing) for one in predictions]
                if buckets is not None:
                    tokens += [expected_tokens(one.length or (), buckets) for one in predictions]
                progress.update(len(predictions))
        return Guess(urgency, None if buckets is None else tokens)

    return guess


def evaluate(
    test_set: LabelledSet, model: Guesser, baselines: Mapping[str, Guesser], decision: Decision
) -> Evaluation:
    """Figures of the model, and of each baseline and the constant ones beside it.

    Every key is always there: None where the set has no such label or the guesser does not
    predict it.

    Args:
        decision: how every guesser's probabilities become a level.
    """
    texts = [example.text for example in test_set.examples]
    guess = model(texts)
    report = _figures(test_set, guess, decision)
    for rule in RULES:
        if rule != decision.rule:
            other = decision.model_copy(update={"rule": rule})
            report[rule] = _level_part(test_set, guess, other)
    report["kinds"] = report["reliability"] = None
    at, truth, rows = _levelled(test_set, guess)
    if truth:
        report["reliability"] = reliability(truth, rows)
        if test_set.kinds is not None:
            decided = [decide_level(row, decision) for row in rows]
            report["kinds"] = kind_figures([test_set.kinds[place] for place in at], truth, decided)
    every_length = [tokens for answers in _answers(test_set) for tokens in answers.values()]
    beside = {**constant_baselines(truth, every_length), **baselines}
    report["baselines"] = {}
    for name, baseline in beside.items():
        figures = _figures(test_set, baseline(texts), decision)
        if figures["n_level"] or figures["n_length"]:
            report["baselines"][name] = figures
    return Evaluation(report, _lengths(test_set, guess))


def _figures(test_set: LabelledSet, guess: Guess, decision: Decision) -> dict[str, Any]:
    levels = _level_part(test_set, guess, decision)
    return {"n": len(test_set.examples), **levels, **_length_part(test_set, guess)}


def _level_part(test_set: LabelledSet, guess: Guess, decision: Decision) -> dict[str, Any]:
    _, truth, rows = _levelled(test_set, guess)
    return level_figures(truth, rows, decision) if truth else {**_NO_LEVELS, "n_level": 0}


def _levelled(
    test_set: LabelledSet, guess: Guess
) -> tuple[list[int], list[int], list[Sequence[float]]]:
    """Place, true level and predicted probabilities of the texts that have the label."""
    if guess.urgency is None:
        return [], [], []
    triples = [
        (place, example.level, row)
        for place, (example, row) in enumerate(zip(test_set.examples, guess.urgency, strict=True))
        if example.level is not None
    ]
    return (
        [place for place, _, _ in triples],
        [level for _, level, _ in triples],
        [row for _, _, row in triples],
    )


def _length_part(test_set: LabelledSet, guess: Guess) -> dict[str, Any]:
    """Figures against the one answer of each text, or the mean of those against each model."""
    answers = _answers(test_set)
    if guess.tokens is None or not any(answers):
        return {**_NO_LENGTHS, "n_length": 0, "per_model": None}
    per_model = {}
    for name in dict.fromkeys(name for one in answers for name in one):
        pairs = [
            (one[name], tokens)
            for one, tokens in zip(answers, guess.tokens, strict=True)
            if name in one
        ]
        per_model[name] = length_figures([true for true, _ in pairs], [own for _, own in pairs])
    if test_set.answers is None:
        return {**per_model.popitem()[1], "per_model": None}
    means = {
        key: fmean(figures[key] for figures in per_model.values())
        for key in _NO_LENGTHS
        if key != "n_length"
    }
    return {"n_length": sum(map(bool, answers)), **means, "per_model": per_model}


def _lengths(test_set: LabelledSet, guess: Guess) -> list[tuple[float, float]]:
    if guess.tokens is None:
        return []
    return [
        (fmean(one.values()), tokens)
        for one, tokens in zip(_answers(test_set), guess.tokens, strict=True)
        if one
    ]


def _answers(test_set: LabelledSet) -> Sequence[Mapping[str, int]]:
    """Per text, output tokens by who answered; a set of single answers has one nameless one."""
    if test_set.answers is not None:
        return test_set.answers
    return [
        {} if one.output_tokens is None else {"": one.output_tokens} for one in test_set.examples
    ]


def _rows(path: Path, domain: Domain | None) -> Iterator[tuple[Example, str | None]]:
    """Each row's example, and its kind if there is such a column."""
    empty = True
    # -sig: spreadsheets begin a CSV with a mark that would become part of the first column's name
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        level_of = _level_reader(domain)
        try:
            columns = reader.fieldnames or []
            if "text" not in columns or not {"level", "output_tokens"} & set(columns):
                raise ValueError(
                    f"{path}, line 1: needs the column text and level and/or output_tokens; it "
                    f"has {', '.join(columns) or 'none'}"
                )
            for row in reader:
                empty = False
                yield _row(row, f"{path}, line {_first_line(reader, row)}", level_of)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text: {error}") from error
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.line_num}: no valid CSV: {error}") from error
    if empty:
        raise ValueError(f"{path} has no rows below its header")


def _first_line(reader: csv.DictReader[str], row: Mapping[str, Any]) -> int:
    """Where the row begins; the reader only counts lines read, and a text may span several."""
    breaks = sum(value.count("\n") for value in row.values() if isinstance(value, str))
    return reader.line_num - breaks


def _row(
    row: Mapping[str | None, Any], where: str, level_of: Callable[[str], int]
) -> tuple[Example, str | None]:
    if None in row:
        raise ValueError(
            f"{where}: more fields than the header has columns; put a text with commas in quotes"
        )
    text = row["text"] or ""
    if not text.strip():
        raise ValueError(f"{where}, column text: empty")
    level = tokens = None
    label = (row.get("level") or "").strip()
    count = (row.get("output_tokens") or "").strip()
    if not label and not count:
        raise ValueError(f"{where}: neither a level nor output_tokens is given")
    if label:
        try:
            level = level_of(label)
        except ValueError as error:
            raise ValueError(f"{where}, column level: {error}") from error
    if count:
        tokens = _whole(count)
        if tokens is None or tokens < 1:
            raise ValueError(
                f"{where}, column output_tokens: {count!r} is no whole number from 1 on"
            )
    kind = (row["kind"] or "").strip() or "(none)" if "kind" in row else None
    return Example(text, level, tokens), kind


def _level_reader(domain: Domain | None) -> Callable[[str], int]:
    """What turns a label into a level: the domain alone if one is given, since it may read
    numbers its own way; else 0 to 4 as they stand and names by the emergency domain."""

    def level_of(label: str) -> int:
        nonlocal domain
        number = _whole(label)
        if domain is None and number is not None:
            if not 0 <= number < URGENCY_LEVELS:
                raise ValueError(f"{label} is no level; valid: 0 to {URGENCY_LEVELS - 1}")
            return number
        if domain is None:
            from vllm_semantic_sched.predict.domain import load_domain

            domain = load_domain("emergency")
        return domain.level_of(label if number is None else str(number))

    return level_of


def _whole(value: str) -> int | None:
    """The whole number that is written there, if one is; tables write 3 as 3.0 at times."""
    try:
        number = float(value)
    except ValueError:
        return None
    return int(number) if math.isfinite(number) and number == int(number) else None
