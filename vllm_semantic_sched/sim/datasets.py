"""Readers of the optional data folder used for training, evaluation and load generation.

Serving does not need it. Each reader takes the folder's root (see `data_root`) and yields plain
records in file order.

Expected files below the root (each folder's own SOURCE.txt gives origin and license):

    alpagasus/random_9k.json, alpagasus/dolly_3k.json   prompts with real responses
    alpaca_eval_outputs/alpaca_eval_outputs.jsonl       prompts with answers of 14 models
    medquad/medquad.jsonl                               medical questions, answer lengths
    nhamcs_ed_triage/*.csv                              emergency visits with triage level
    ktas/ktas_half.csv                                  emergency visits, expert level
"""

import csv
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Split = Literal["train", "validation", "test"]

TOKENS_PER_WORD = 1.3
"""Output tokens per word of English prose, for the vocabularies of current chat models."""

_DATA_VARIABLE = "SEMSCHED_DATA"
_NHAMCS_SPLITS: dict[str, Split] = {"train": "train", "val": "validation", "test": "test"}


class DataNotFound(FileNotFoundError):
    """The data folder, or a file that a reader needs in it, is not there."""


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
class PromptAnswers:
    """A prompt and the length of each model's real answer to it, in tokens (at least 1)."""

    text: str
    output_tokens: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class TriageVisit:
    """One emergency visit of the NHAMCS survey; missing facts are None, or "" for `injury`.

    `level` is the nurse's triage level minus one: 0 (immediate) to 4. `split` is by hospital.
    """

    level: int
    split: Split
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


@dataclass(frozen=True, slots=True)
class KtasVisit:
    """One visit of the KTAS study: an expert panel's level (0-4) and the nurse's own words."""

    level: int
    complaint: str


def data_root() -> Path | None:
    """The data folder: `SEMSCHED_DATA`, else `../shared/data` beside the project, else None."""
    configured = os.environ.get(_DATA_VARIABLE)
    if configured:
        root = Path(configured)
    else:
        root = Path(__file__).resolve().parents[3] / "shared" / "data"
    return root if root.is_dir() else None


def split_of(key: str) -> Split:
    """Assign `key` to a split, 80/10/10, by its MD5: the same on every machine and run."""
    tenth = int.from_bytes(hashlib.md5(key.encode("utf-8")).digest()[:8], "big") % 10
    if tenth == 0:
        return "test"
    return "validation" if tenth == 1 else "train"


def tokens_of_words(words: int) -> int:
    """Estimated tokens of a text of `words` words (at least 1)."""
    return max(1, round(words * TOKENS_PER_WORD))


def instruction_pairs(
    root: Path, names: Sequence[str] = ("random_9k.json", "dolly_3k.json")
) -> Iterator[TextLength]:
    """Alpaca and Dolly instructions with the length of their real response; `names` picks one."""
    for name in names:
        for record in json.loads(_existing(root / "alpagasus" / name).read_text("utf-8")):
            prompt = str(record["instruction"]).strip()
            context = str(record.get("input") or "").strip()
            if context:
                prompt = f"{prompt}\n{context}"
            response = str(record["output"]).split()
            if prompt and response:
                yield TextLength(prompt, tokens_of_words(len(response)))


def alpaca_eval_answers(root: Path) -> Iterator[PromptAnswers]:
    """AlpacaEval instructions with the lengths of 14 models' answers, without empty answers."""
    path = _existing(root / "alpaca_eval_outputs" / "alpaca_eval_outputs.jsonl")
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            words = {model: len(answer.split()) for model, answer in record["outputs"].items()}
            tokens = {model: tokens_of_words(count) for model, count in words.items() if count}
            yield PromptAnswers(str(record["instruction"]).strip(), tokens)


def medical_questions(root: Path) -> Iterator[TextLength]:
    """MedQuAD questions with the length of their answer; a question occurs only once."""
    seen: set[str] = set()
    with _existing(root / "medquad" / "medquad.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            question = " ".join(str(record["question"]).replace(" ?", "?").split())
            if question and question not in seen and record["answer_words"] > 0:
                seen.add(question)
                yield TextLength(question, tokens_of_words(int(record["answer_words"])))


def triage_visits(root: Path) -> Iterator[TriageVisit]:
    """NHAMCS visits, without the hospitals whose share of level 0 is implausible."""
    paths = sorted((root / "nhamcs_ed_triage").glob("*.csv"))
    if not paths:
        raise DataNotFound(f"no CSV file in {root / 'nhamcs_ed_triage'}")
    for path in paths:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if row["hosp_l1_outlier"] != "1":
                    yield _triage_visit(row)


def ktas_visits(root: Path) -> Iterator[KtasVisit]:
    """KTAS visits whose complaint is readable."""
    path = _existing(root / "ktas" / "ktas_half.csv")
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            complaint = " ".join(row["Chief_complain"].split())
            if row["garbled"] != "1" and complaint:
                yield KtasVisit(int(row["KTAS_expert"]) - 1, complaint)


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


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise DataNotFound(f"data file not found: {path}")
    return path
