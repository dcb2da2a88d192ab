"""The training mixture: messages with a level, prompts with a length, and both combined."""

import csv
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from vllm_semantic_sched.datasets import (
    KtasVisit,
    Split,
    TextLength,
    TriageVisit,
    instruction_pairs,
    ktas_visits,
    medical_questions,
    split_of,
    triage_visits,
)
from vllm_semantic_sched.predict import render, voices
from vllm_semantic_sched.predict.wording_routine import (
    NO_RESOURCE,
    ONE_RESOURCE,
    SEVERAL_RESOURCES,
)
from vllm_semantic_sched.predict.wording_urgent import HIGH_RISK, IMMEDIATE

_Item = TypeVar("_Item")

WORDINGS = (IMMEDIATE, HIGH_RISK, SEVERAL_RESOURCES, ONE_RESOURCE, NO_RESOURCE)

# Visits in the survey's own words, in the survey's own proportions: what is read in them is then
# as likely as it is there (0.8 % at level 0, half at level 2).
_PLAIN_VISITS = 32_000
# Visits as charts note them, in the same proportions: such notes are written where visits are.
_CHARTED_VISITS = 7000
# Visits of each level in other voices. Whoever writes so is no sample of any emergency
# department, and a head trained on the survey's proportions would call nothing level 0.
_VOICED_VISITS = (600, 1500, 2000, 1500, 900)
# Messages written one by one, with the variety that wordings put together from parts lack.
_WRITTEN_MESSAGES = Path(__file__).with_name("written_messages.csv")
_WRITTEN = 8000
_MESSAGES_PER_LEVEL = (3300, 3500, 3100, 2900, 1900)
_HARMLESS = 3600
_FRAMED = 3600
_LOOKALIKES = 1000
_PROMPTS = 9600
_MEDICAL_QUESTIONS = 4500
_COMPOSED = 9000
# Shares of the messages and prompts that come late in a long text, behind a claim, and behind
# words that say nothing.
_LATE = 0.12
_CLAIMS = 0.03
_OPENED = 0.06


@dataclass(frozen=True, slots=True)
class Example:
    """A text with an urgency level (0-4), an output length in tokens, or both."""

    text: str
    level: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True)
class Sources:
    """The records of one split, read once and rendered afresh every round.

    No KTAS visit is trained on: so few are worth more as a check, so all of them are here,
    whatever the split.
    """

    visits: tuple[TriageVisit, ...]
    ktas: tuple[KtasVisit, ...]
    prompts: tuple[TextLength, ...]
    questions: tuple[TextLength, ...]
    written: tuple[Example, ...] = ()

    @classmethod
    def read(cls, root: Path, split: Split) -> "Sources":
        """Read all sources below `root`; raises DataNotFound if one is missing."""
        return cls(
            visits=tuple(visit for visit in triage_visits(root) if visit.split == split),
            ktas=tuple(ktas_visits(root)),
            prompts=tuple(pair for pair in instruction_pairs(root) if pair.split == split),
            questions=tuple(pair for pair in medical_questions(root) if pair.split == split),
            written=tuple(written_messages(split)),
        )

    @property
    def lengths(self) -> list[int]:
        """Output lengths of all prompts and questions, in tokens."""
        return [pair.output_tokens for pair in (*self.prompts, *self.questions)]


def written_messages(split: Split) -> list[Example]:
    """Messages written by hand for training, four fifths of them; the others are all in the
    validation split, for the set that predictors are tested on is another one."""
    with _WRITTEN_MESSAGES.open(encoding="utf-8", newline="") as file:
        rows = [Example(row["text"], int(row["level"])) for row in csv.DictReader(file)]
    if split == "test":
        return []
    return [row for row in rows if (split_of(row.text) == "train") == (split == "train")]


def training_round(sources: Sources, seed: int, scale: float = 1.0) -> list[Example]:
    """About 100,000 shuffled examples (times `scale`); another seed renders them differently."""
    rng = random.Random(seed)
    examples = _visit_examples(sources.visits, scale, rng)
    for written in _sample(sources.written, _WRITTEN * scale, rng):
        examples.append(Example(noisy(written.text, rng), written.level))
    for wording, count in zip(WORDINGS, _MESSAGES_PER_LEVEL, strict=True):
        for _ in range(round(count * scale)):
            examples.append(_message_example(wording.level, rng))
    for _ in range(round(_HARMLESS * scale)):
        examples.append(Example(noisy(render.harmless_prompt(rng), rng), 4))
    for _ in range(round(_FRAMED * scale)):
        matter = rng.choice(WORDINGS[:2])
        examples.append(Example(noisy(render.framed_emergency(matter, rng), rng), 4))
    for _ in range(round(_LOOKALIKES * scale)):
        examples.append(Example(noisy(render.lookalike(rng), rng), 4))
    examples += _length_examples(_sample(sources.prompts, _PROMPTS * scale, rng), rng)
    examples += _length_examples(_sample(sources.questions, _MEDICAL_QUESTIONS * scale, rng), rng)
    examples += _composed_examples(sources, round(_COMPOSED * scale), rng)
    rng.shuffle(examples)
    return examples


def noisy(text: str, rng: random.Random) -> str:
    """`text` as it arrives: late in a longer one, behind a claim, typed in haste, or as it is."""
    if rng.random() < _LATE:
        text = render.after_background(text, rng)
    if rng.random() < _CLAIMS:
        text = render.claiming(text, rng)
    if rng.random() < _OPENED:
        text = render.opened_neutrally(text, rng)
    return render.with_noise(text, rng)


def _visit_examples(
    visits: Sequence[TriageVisit], scale: float, rng: random.Random
) -> list[Example]:
    chosen = _sample(visits, _PLAIN_VISITS * scale, rng)
    examples = [Example(visit.text, visit.level) for visit in chosen]
    for visit in _sample(visits, _CHARTED_VISITS * scale, rng):
        examples.append(Example(render.chart_note(visit, rng), visit.level))
    for level, count in enumerate(_VOICED_VISITS):
        chosen = _sample([visit for visit in visits if visit.level == level], count * scale, rng)
        for visit in chosen:
            text = render.with_noise(render.visit_message(visit, rng), rng)
            examples.append(Example(text, level))
    return examples


def _message_example(level: int, rng: random.Random) -> Example:
    return Example(noisy(render.level_message(WORDINGS[level], rng), rng), level)


def _length_examples(pairs: Iterable[TextLength], rng: random.Random) -> list[Example]:
    return [Example(noisy(pair.text, rng), 4, pair.output_tokens) for pair in pairs]


def _composed_examples(sources: Sources, count: int, rng: random.Random) -> list[Example]:
    """Messages followed by a request: urgency from the message, length from the request."""
    examples = []
    for _ in range(count):
        source = rng.random()
        if source < 0.5:
            level = rng.choices(range(5), (4, 3, 2, 2, 2))[0]
            message = render.level_message(WORDINGS[level], rng)
        elif source < 0.75 and sources.written:
            written = rng.choice(sources.written)
            level, message = written.level or 0, written.text
        else:
            visit = rng.choice(sources.visits)
            level, message = visit.level, render.visit_message(visit, rng)
        tokens = None
        kind = rng.random()
        if kind < 0.5:
            text = voices.with_task(message, voices.pick(voices.TASKS, rng), rng)
        else:
            pair = rng.choice(sources.questions if kind < 0.8 else sources.prompts)
            text = voices.with_question(message, pair.text, rng)
            tokens = pair.output_tokens
        examples.append(Example(noisy(text, rng), level, tokens))
    return examples


def _sample(items: Sequence[_Item], count: float, rng: random.Random) -> list[_Item]:
    """`count` items, each as often as the others to within one."""
    wanted = round(count)
    if not items:
        return []
    whole, rest = divmod(wanted, len(items))
    return [*items] * whole + rng.sample(items, rest)
