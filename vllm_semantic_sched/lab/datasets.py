"""Readers of the optional data folder, for training, evaluation and load generation. Each takes the
folder's root (see `sim.data_folder`) and yields records in file order.

Files below the root (each folder's own SOURCE.txt gives origin and license):

    alpagasus/random_9k.json, alpagasus/dolly_3k.json   prompts with real responses
    alpaca_eval_outputs/alpaca_eval_outputs.jsonl       prompts with answers of 14 models
    medquad/medquad.jsonl                               medical questions, answer lengths
    nhamcs_ed_triage/*.csv                              emergency visits with triage level
    ktas/ktas_half.csv                                  emergency visits, expert level
"""

import csv
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Split = Literal["train", "validation", "test"]

# Output tokens per word of English prose, for the vocabularies of current chat models.
_TOKENS_PER_WORD = 1.3
_NHAMCS_SPLITS: dict[str, Split] = {"train": "train", "val": "validation", "test": "test"}


@dataclass(frozen=True)
class TextLength:
    """A prompt and the length of a real answer to it, in tokens (at least 1)."""

    text: str
    output_tokens: int

    @property
    def split(self) -> Split:
        """The part of the data this prompt belongs to."""
        return split_of(self.text)


@dataclass(frozen=True, slots=True)
class TriageVisit:
    """One emergency visit of the NHAMCS survey; missing facts are None, or "" for `injury`."""

    level: int  # the nurse's triage level minus one: 0 (immediate) to 4
    split: Split  # by hospital
    text: str
    age: int | None
    sex: str
    ambulance: bool
    pain: int | None
    injury: str
    reasons: tuple[str, ...]
    heart_rate: int | None
    systolic: int | None
    oxygen: int | None


def split_of(key: str) -> Split:
    """Assign `key` to a split, 80/10/10, by its MD5: the same on every machine and run."""
    tenth = int.from_bytes(hashlib.md5(key.encode("utf-8")).digest()[:8], "big") % 10
    parts: dict[int, Split] = {0: "test", 1: "validation"}
    return parts.get(tenth, "train")


def tokens_of_words(words: int) -> int:
    """Estimated tokens of a text of `words` words (at least 1)."""
    return max(1, round(words * _TOKENS_PER_WORD))


def instruction_pairs(
    root: Path, names: Sequence[str] = ("random_9k.json", "dolly_3k.json")
) -> Iterator[TextLength]:
    """Alpaca and Dolly instructions with the length of their real response; `names` picks one."""
    for name in names:
        for record in json.loads("".join(_lines(root / "alpagasus" / name))):
            prompt = str(record["instruction"]).strip()
            context = str(record.get("input") or "").strip()
            if context:
                prompt = f"{prompt}\n{context}"
            response = str(record["output"]).split()
            if prompt and response:
                yield TextLength(prompt, tokens_of_words(len(response)))


def alpaca_eval_answers(root: Path) -> Iterator[tuple[str, dict[str, int]]]:
    """AlpacaEval instructions and, by model, the tokens of 14 models' answers, if not empty."""
    path = root / "alpaca_eval_outputs" / "alpaca_eval_outputs.jsonl"
    for record in map(json.loads, _lines(path)):
        words = {model: len(answer.split()) for model, answer in record["outputs"].items()}
        tokens = {model: tokens_of_words(count) for model, count in words.items() if count}
        yield str(record["instruction"]).strip(), tokens


def medical_questions(root: Path) -> Iterator[TextLength]:
    """MedQuAD questions with the length of their answer; a question occurs only once."""
    seen: set[str] = set()
    for record in map(json.loads, _lines(root / "medquad" / "medquad.jsonl")):
        question = " ".join(str(record["question"]).replace(" ?", "?").split())
        if question and question not in seen and record["answer_words"] > 0:
            seen.add(question)
            yield TextLength(question, tokens_of_words(int(record["answer_words"])))


def triage_visits(root: Path) -> Iterator[TriageVisit]:
    """NHAMCS visits, without the hospitals whose share of level 0 is implausible."""
    paths = sorted((root / "nhamcs_ed_triage").glob("*.csv"))
    if not paths:
        raise FileNotFoundError(f"no CSV file in {root / 'nhamcs_ed_triage'}")
    for path in paths:
        for row in csv.DictReader(_lines(path)):
            if row["hosp_l1_outlier"] != "1":
                yield _triage_visit(row)


def ktas_visits(root: Path) -> Iterator[tuple[str, int]]:
    """The nurse's own words, if readable, and an expert panel's level (0-4) of each KTAS visit."""
    for row in csv.DictReader(_lines(root / "ktas" / "ktas_half.csv")):
        complaint = " ".join(row["Chief_complain"].split())
        if row["garbled"] != "1" and complaint:
            yield complaint, int(row["KTAS_expert"]) - 1


def _triage_visit(row: dict[str, str]) -> TriageVisit:
    reasons = (row[f"reason{place}"].strip() for place in range(1, 6))
    return TriageVisit(
        level=int(row["level"]) - 1,
        split=_NHAMCS_SPLITS[row["split"]],
        text=row["text"],
        age=_number(row["age"]),
        sex=row["sex"],
        ambulance=row["ambulance"].lower() == "yes",
        pain=_number(row["pain"]),
        injury=row["injury"],
        reasons=tuple(reason for reason in reasons if reason),
        heart_rate=_number(row["pulse"]),
        systolic=_number(row["sbp"]),
        oxygen=_number(row["spo2"]),
    )


def _number(value: str) -> int | None:
    try:
        return round(float(value.replace(",", ".")))
    except ValueError:
        return None


def _lines(path: Path) -> Iterator[str]:
    if not path.is_file():
        raise FileNotFoundError(f"data file not found: {path}")
    with path.open(encoding="utf-8", newline="") as lines:
        yield from lines
