"""Measures predictors on labelled texts: what `semsched evaluate` computes."""

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm_semantic_sched.datasets import (
    DataNotFound,
    instruction_pairs,
    medical_questions,
    triage_visits,
)
from vllm_semantic_sched.policy.prediction import LengthBuckets
from vllm_semantic_sched.predict.baselines import Guess
from vllm_semantic_sched.predict.buckets import expected_tokens
from vllm_semantic_sched.predict.data import Example
from vllm_semantic_sched.predict.metrics import kendall_tau, urgency_report
from vllm_semantic_sched.predict.model import TextPredictor
from vllm_semantic_sched.predict.network import URGENCY_LEVELS

Guesser = Callable[[Sequence[str]], Guess]


def read_examples(path: Path) -> list[Example]:
    """The labelled texts of a CSV; raises ValueError that names the line and the column."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        columns = reader.fieldnames or []
        if "text" not in columns or not {"level", "output_tokens"} & set(columns):
            raise ValueError(
                f"{path} needs the column text and level or output_tokens; it has {columns}"
            )
        examples = []
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            level = _integer(row.get("level"), "level", where)
            if level is not None and not 0 <= level < URGENCY_LEVELS:
                raise ValueError(f"{where}: level must be 0 to {URGENCY_LEVELS - 1}, not {level}")
            tokens = _integer(row.get("output_tokens"), "output_tokens", where)
            examples.append(Example(row["text"], level, tokens))
    if not examples:
        raise ValueError(f"{path} has no rows")
    return examples


def builtin_examples(name: str, root: Path | None) -> list[Example]:
    """The test split of the emergency visits ("nhamcs-test") or of the prompts with lengths."""
    if root is None:
        raise DataNotFound("no data folder: pass --data-root DIR or set SEMSCHED_DATA")
    if name == "nhamcs-test":
        visits = (visit for visit in triage_visits(root) if visit.split == "test")
        return [Example(visit.text, visit.level) for visit in visits]
    pairs = (*instruction_pairs(root), *medical_questions(root))
    return [Example(pair.text, None, pair.output_tokens) for pair in pairs if pair.split == "test"]


def evaluate(examples: Sequence[Example], guesses: dict[str, Guesser]) -> dict[str, Any]:
    """Figures of each guesser on the examples that carry the label in question."""
    report: dict[str, Any] = {}
    levelled = [example for example in examples if example.level is not None]
    sized = [example for example in examples if example.output_tokens is not None]
    if levelled:
        truth = [example.level for example in levelled if example.level is not None]
        texts = [example.text for example in levelled]
        report["urgency"] = {
            name: urgency_report(truth, guess(texts).urgency, URGENCY_LEVELS)
            for name, guess in guesses.items()
        }
        frequent = max(range(URGENCY_LEVELS), key=truth.count)
        constant = [tuple(float(level == frequent) for level in range(URGENCY_LEVELS))]
        report["urgency"]["most frequent level"] = urgency_report(
            truth, constant * len(truth), URGENCY_LEVELS
        )
    if sized:
        lengths = [example.output_tokens or 0 for example in sized]
        report["length"] = {"same length for all": _length_figures(lengths, [1.0] * len(lengths))}
        for name, guess in guesses.items():
            expected = guess([example.text for example in sized]).tokens
            if expected is not None:
                report["length"][name] = _length_figures(lengths, expected)
    return report


def _length_figures(lengths: Sequence[int], expected: Sequence[float]) -> dict[str, float]:
    return {"n": len(lengths), "kendall_tau": kendall_tau(lengths, expected)}


def guesser(predictor: TextPredictor) -> Guesser:
    """The predictor in the form that `evaluate` takes."""

    def guess(texts: Sequence[str]) -> Guess:
        predictions = predictor.predict(texts)
        missing = (0.0,) * (URGENCY_LEVELS - predictor.levels)
        tokens = None
        buckets: LengthBuckets | None = predictor.length_buckets
        if buckets is not None:
            tokens = [expected_tokens(one.length or (), buckets) for one in predictions]
        return Guess([(*one.urgency, *missing) for one in predictions], tokens)

    return guess


def _integer(value: str | None, column: str, where: str) -> int | None:
    if value is None or not value.strip():
        return None
    try:
        return int(value)
    except ValueError as error:
        raise ValueError(f"{where}: {column} must be a whole number, not {value!r}") from error
