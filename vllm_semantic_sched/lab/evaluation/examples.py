"""Labeled texts: reads them from CSV files and from the data folder."""

import csv
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_semantic_sched.lab.datasets import (
    alpaca_eval_answers,
    instruction_pairs,
    ktas_visits,
    medical_questions,
    triage_visits,
)
from vllm_semantic_sched.lab.evaluation.domain import Domain, load_domain
from vllm_semantic_sched.predict import URGENCY_LEVELS

BUILTIN_SETS = {
    "nhamcs-test": "Emergency visits of the NHAMCS survey, from hospitals kept for testing.",
    "ktas": "Complaints of the KTAS study as nurses wrote them, all that are readable; the level "
    "is an expert panel's.",
    "lengths-test": "Dolly and MedQuAD prompts kept for testing.",
    "alpaca-test": "A tenth of the Alpaca prompts, none of them trained on.",
    "dolly": "All Dolly prompts; those outside lengths-test may have been trained on.",
    "alpaca-eval": "AlpacaEval prompts, everyday ones of level 4, with the answers of 14 models; "
    "figures of lengths are means over the models, from the prompt alone.",
}
"""Test sets in the data folder, with a description for reports."""

_COLUMNS = ("text", "level", "output_tokens")


@dataclass(frozen=True, slots=True)
class Example:
    """A text with an urgency level (0-4), an output length in tokens, or both."""

    text: str
    level: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True)
class LabeledSet:
    """Labeled texts that predictors are measured on."""

    name: str
    examples: Sequence[Example]
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By `kind`, `language` or `English and others`, the group of each text."""
    answers: Sequence[Mapping[str, int]] | None = None
    """Per text, output tokens by answering model; then the examples carry no length."""


def read_examples(path: Path, domain: Domain | None = None) -> list[Example]:
    """The labeled texts of a CSV, see `read_labeled_set`."""
    return list(read_labeled_set(path, domain).examples)


def read_labeled_set(path: Path, domain: Domain | None = None) -> LabeledSet:
    """Read a CSV with the columns text, level and/or output_tokens, and optionally kind; or all of
    a folder, one for each language, like `es.csv`. ValueError names file, line, column and what is
    valid.

    `domain`: what labels mean; None for levels by number and the emergency domain's names.
    """
    files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path}: a folder without a CSV")
    rows = [(file.stem, *row) for file in files for row in _rows(file, domain)]
    languages, examples, kinds = zip(*rows, strict=True)
    groups: dict[str, Sequence[str]] = {}
    if None not in kinds:
        groups["kind"] = kinds
    if path.is_dir():
        groups["language"] = languages
        groups["English and others"] = [
            "English" if language == "en" else "others" for language in languages
        ]
    return LabeledSet(path.name, examples, groups)


def write_examples(examples: Sequence[Example], path: Path) -> None:
    """Write a CSV that `read_examples` reads back the same."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        writer.writerows(
            (example.text, example.level, example.output_tokens) for example in examples
        )


def builtin_set(name: str, root: Path | None) -> LabeledSet:
    """A test set out of the data folder, one of `BUILTIN_SETS`; FileNotFoundError if there is
    no data folder, or a file is missing in it."""
    if root is None:
        raise FileNotFoundError(
            f"{name} needs the data folder: pass --data-root or set SEMSCHED_DATA"
        )
    if name == "alpaca-eval":
        answered = list(alpaca_eval_answers(root))
        texts = [Example(text, URGENCY_LEVELS - 1) for text, _ in answered]
        return LabeledSet(name, texts, answers=[tokens for _, tokens in answered])
    if name == "nhamcs-test":
        visits = (visit for visit in triage_visits(root) if visit.split == "test")
        return LabeledSet(name, [Example(visit.text, visit.level) for visit in visits])
    if name == "ktas":
        return LabeledSet(name, [Example(text, level) for text, level in ktas_visits(root)])
    dolly = instruction_pairs(root, ("dolly_3k.json",))
    pairs = {
        "dolly": dolly,
        "alpaca-test": instruction_pairs(root, ("random_9k.json",)),
        "lengths-test": itertools.chain(dolly, medical_questions(root)),
    }[name]
    chosen = (pair for pair in pairs if name == "dolly" or pair.split == "test")
    return LabeledSet(name, [Example(pair.text, None, pair.output_tokens) for pair in chosen])


def _rows(path: Path, domain: Domain | None) -> Iterator[tuple[Example, str | None]]:
    """Each row's example, and its kind if there is such a column."""
    empty = True
    # -sig: spreadsheets begin a CSV with a mark that would become part of the first column's name
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        try:
            columns = reader.fieldnames or []
            if "text" not in columns or not {"level", "output_tokens"} & set(columns):
                raise ValueError(
                    f"{path}, line 1: needs the column text and level and/or output_tokens; it "
                    f"has {', '.join(columns) or 'none'}"
                )
            for row in reader:
                empty = False
                # The reader counts lines, and a text may span several: the row begins above it.
                breaks = sum(value.count("\n") for value in row.values() if isinstance(value, str))
                yield _row(row, f"{path}, line {reader.line_num - breaks}", domain)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text: {error}") from error
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.line_num}: not valid CSV: {error}") from error
    if empty:
        raise ValueError(f"{path} has no rows below its header")


def _row(
    row: Mapping[str | None, Any], where: str, domain: Domain | None
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
            level = _level_of(label, domain)
        except ValueError as error:
            raise ValueError(f"{where}, column level: {error}") from error
    if count:
        tokens = _integer(count)
        if tokens is None or tokens < 1:
            raise ValueError(f"{where}, column output_tokens: {count!r} is not a positive integer")
    kind = None
    if "kind" in row:
        kind = (row["kind"] or "").strip() or "(none)"
    return Example(text, level, tokens), kind


def _level_of(label: str, domain: Domain | None) -> int:
    """The level of a label, by the domain or, without one, by number 0 to 4 and the names of the
    emergency domain."""
    number = _integer(label)
    if domain is None and number is not None:
        if not 0 <= number < URGENCY_LEVELS:
            raise ValueError(f"{label} is not a level; valid: 0 to {URGENCY_LEVELS - 1}")
        return number
    if number is not None:
        label = str(number)  # without a fraction
    return (domain or _emergency()).level_of(label)


_emergency = functools.cache(functools.partial(load_domain, "emergency"))


def _integer(value: str) -> int | None:
    """The integer that `value` holds, None for any other text. Spreadsheets may write 3 as 3.0."""
    try:
        number = float(value)
    except ValueError:
        return None
    return int(number) if math.isfinite(number) and number == int(number) else None
