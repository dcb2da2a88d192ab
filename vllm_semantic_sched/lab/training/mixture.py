"""The training mixture: messages with a level, prompts with a length, and both combined."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from vllm_semantic_sched.lab.datasets import (
    Split,
    TextLength,
    TriageVisit,
    instruction_pairs,
    medical_questions,
    split_of,
    triage_visits,
)
from vllm_semantic_sched.lab.evaluation.domain import WORD, Domain
from vllm_semantic_sched.lab.evaluation.examples import Example
from vllm_semantic_sched.lab.training import messages, visits
from vllm_semantic_sched.lab.training.compositions import Composer
from vllm_semantic_sched.lab.training.noise import (
    noisy,
    with_noise,
    with_question,
    with_task,
    without_marks,
)
from vllm_semantic_sched.lab.training.wording import (
    capital,
    choose,
    everyday_rows,
    surroundings,
    written_rows,
)

_Item = TypeVar("_Item")

# Texts in a round at scale 1: visits in the survey's own words and proportions, so that the model
# learns its base rates; as chart notes, which emergency departments write; and of each level in
# other voices, because in the survey's proportions no text would get level 0.
_PLAIN_VISITS = 32_000
_CHARTED_VISITS = 7000
_VOICED_VISITS = (600, 1500, 2000, 1500, 900)
# Messages written one by one, with a variety that wordings made of parts lack: English ones, and
# those of all other languages.
_WRITTEN = 14_000
_WRITTEN_ELSEWHERE = 30_000
_EVERYDAY = 66_000
_CLAIMED_ELSEWHERE = 0.05
_MESSAGES_PER_LEVEL = (2600, 2800, 2500, 2300, 1500)
_PROMPTS_OF_LAST_LEVEL = {
    messages.harmless_prompt: 3600,
    messages.framed_emergency: 3600,
    messages.lookalike: 1000,
    messages.source_code: 500,
}
_PROMPTS = 9600
_MEDICAL_QUESTIONS = 4500
_COMPOSED = 8000
_COMPOSITIONS = 105_000

# Not Alpaca, whose license forbids commercial use.
_PROMPT_FILES = ("dolly_3k.json",)
_FEWEST = 20  # records of a kind in a part
_QUESTION_STEP = 8  # one question of so many is a task in compositions: about as many as prompts
_HARMLESS_OF_DOMAIN = 0.4  # of a domain's last level: texts that ask for no help at all


@dataclass(frozen=True)
class Sources:
    """The records of one split, read once and rendered afresh every round."""

    visits: tuple[TriageVisit, ...]
    prompts: tuple[TextLength, ...]
    questions: tuple[TextLength, ...]
    written: tuple[Example, ...] = ()
    written_elsewhere: tuple[Example, ...] = ()
    everyday: tuple[Example, ...] = ()
    composer: Composer = field(default_factory=lambda: Composer({}, {}, ()))

    def part(self, share: float) -> Self:
        """About a share of the records of each kind, evenly spread, but no fewer than 20."""
        parts: dict[str, Any] = {}
        for name in ("visits", "prompts", "questions", "written", "written_elsewhere", "everyday"):
            records = getattr(self, name)
            step = min(round(1 / share), len(records) // _FEWEST)
            parts[name] = records[:: max(1, step)]
        return replace(self, **parts)

    @classmethod
    def read(cls, root: Path, split: Split) -> Self:
        """Read all sources below `root`; raises FileNotFoundError if one is missing."""
        pairs = instruction_pairs(root, _PROMPT_FILES)
        prompts = tuple(pair for pair in pairs if pair.split == split)
        written = {language: written_messages(split, language) for language in written_rows()}
        everyday = {language: everyday_texts(split, language) for language in everyday_rows()}
        both = {language: [*rows, *everyday[language]] for language, rows in written.items()}
        questions = tuple(pair for pair in medical_questions(root) if pair.split == split)
        asked = [pair.text for pair in (*prompts, *questions[::_QUESTION_STEP])]
        elsewhere = (rows for language, rows in written.items() if language != "en")
        return cls(
            visits=tuple(visit for visit in triage_visits(root) if visit.split == split),
            prompts=prompts,
            questions=questions,
            written=tuple(written["en"]),
            written_elsewhere=tuple(itertools.chain.from_iterable(elsewhere)),
            everyday=tuple(itertools.chain.from_iterable(everyday.values())),
            composer=Composer.of(split, both, asked),
        )


def written_messages(split: Split, language: str) -> list[Example]:
    """The messages written one by one in a language: four fifths in the training split, the others
    in the validation split, none in the test split."""
    return _of_split(written_rows()[language], split)


def everyday_texts(split: Split, language: str) -> list[Example]:
    """The same of everyday texts and of alarms and hints that sound like them."""
    return _of_split(everyday_rows().get(language, ()), split)


def _of_split(rows: Sequence[tuple[str, int]], split: Split) -> list[Example]:
    if split == "test":
        return []
    examples = (Example(text, level) for text, level in rows)
    return [row for row in examples if (split_of(row.text) == "train") == (split == "train")]


def written_texts() -> dict[str, list[str]]:
    """Texts of the training split by language."""
    texts = {}
    for language in written_rows():
        examples = written_messages("train", language) + everyday_texts("train", language)
        texts[language] = [example.text for example in examples]
    return texts


def training_round(sources: Sources, seed: int, scale: float = 1.0) -> list[Example]:
    """About 300,000 shuffled examples (times `scale`); another seed renders them differently."""
    rng = random.Random(seed)

    def some(items: Sequence[_Item], count: int) -> list[_Item]:
        """Each item as often as the others to within one."""
        if not items:
            return []
        whole, rest = divmod(round(count * scale), len(items))
        return [*items] * whole + rng.sample(items, rest)

    coded = sources.visits
    examples = [Example(visit.text, visit.level) for visit in some(coded, _PLAIN_VISITS)]
    charted = some(coded, _CHARTED_VISITS)
    examples += [Example(visits.chart_note(visit, rng), visit.level) for visit in charted]
    for level, count in enumerate(_VOICED_VISITS):
        voiced = some([visit for visit in coded if visit.level == level], count)
        texts = (visits.visit_message(visit, rng) for visit in voiced)
        examples += [Example(with_noise(text, rng), level) for text in texts]
    written = some(sources.written, _WRITTEN)
    examples += [Example(noisy(message.text, rng), message.level) for message in written]
    foreign = some(sources.written_elsewhere, _WRITTEN_ELSEWHERE)
    for message in [*foreign, *some(sources.everyday, _EVERYDAY)]:
        text = without_marks(message.text, rng)
        if rng.random() < _CLAIMED_ELSEWHERE:
            text = rng.choice(surroundings().claims) + text
        examples.append(Example(with_noise(text, rng), message.level))
    for level, count in enumerate(_MESSAGES_PER_LEVEL):
        texts = (messages.level_message(level, rng) for _ in range(round(count * scale)))
        examples += [Example(noisy(text, rng), level) for text in texts]
    for prompt, count in _PROMPTS_OF_LAST_LEVEL.items():
        texts = (prompt(rng) for _ in range(round(count * scale)))
        examples += [Example(noisy(text, rng), 4) for text in texts]
    for pairs, count in ((sources.prompts, _PROMPTS), (sources.questions, _MEDICAL_QUESTIONS)):
        drawn = some(pairs, count)
        examples += [Example(noisy(pair.text, rng), 4, pair.output_tokens) for pair in drawn]
    examples += [_composed_example(sources, rng) for _ in range(round(_COMPOSED * scale))]
    examples += sources.composer.draw(round(_COMPOSITIONS * scale), rng)
    rng.shuffle(examples)
    return examples


def domain_examples(domain: Domain, count: int, seed: int) -> list[Example]:
    """`count` shuffled examples of a domain, of each level as many as of the others to within one;
    ValueError if the domain has neither `examples` nor `wordings`."""
    if not domain.examples and not domain.wordings:
        raise ValueError(
            "the domain has no sentences to train from; give it `examples`, or train on labeled "
            "messages"
        )
    rng = random.Random(seed)
    levels = len(domain.levels)
    examples = []
    # Look-alikes of emergencies could be incidents elsewhere ("my server crashed").
    harmless = messages.harmless_prompt if domain.wordings else messages.everyday_prompt
    for number in range(count):
        level = number % levels
        if level == levels - 1 and rng.random() < _HARMLESS_OF_DOMAIN:
            text = harmless(rng)
        elif domain.wordings:
            text = messages.level_message(level, rng)
        else:
            text = _domain_message(domain, level, rng)
        examples.append(Example(noisy(text, rng), level))
    rng.shuffle(examples)
    return examples


def _composed_example(sources: Sources, rng: random.Random) -> Example:
    """A message and a request: urgency from the message, length from the request."""
    source = rng.random()
    if source < 0.5:
        level = rng.choices(range(5), (4, 3, 2, 2, 2))[0]
        message = messages.level_message(level, rng)
    elif source < 0.8 and sources.written:
        elsewhere = source > 0.7 and sources.written_elsewhere
        written = rng.choice(elsewhere or sources.written)
        level = written.level or 0
        message = written.text
    else:
        visit = rng.choice(sources.visits)
        level = visit.level
        message = visits.visit_message(visit, rng)
    kind = rng.random()
    if kind < 0.5:
        return Example(noisy(with_task(message, rng.choice(surroundings().tasks), rng), rng), level)
    pairs = sources.questions if kind < 0.8 else sources.prompts
    pair = rng.choice(pairs)
    return Example(noisy(with_question(message, pair.text, rng), rng), level, pair.output_tokens)


def _domain_message(domain: Domain, level: int, rng: random.Random) -> str:
    sentence = choose(rng.choice(domain.examples[level]), rng)
    sentence = WORD.sub(lambda match: rng.choice(domain.words[match[1]]), sentence)
    if rng.random() < 0.15:
        sentence = rng.choice(surroundings().openers_calm) + sentence
    return capital(sentence) if rng.random() < 0.5 else sentence
