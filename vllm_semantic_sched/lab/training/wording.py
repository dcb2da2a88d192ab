"""Reads the example texts in `texts/` and fills in their alternatives and persons."""

import csv
import functools
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import yaml
from pydantic import Field

from vllm_semantic_sched.policy.config.section import Section, parse_section

_TEXTS = Path(__file__).with_name("texts")
_BY_LANGUAGE = ("written", "everyday", "compositions", "long")  # folders that wheels lack
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_AGES = {"{age}": (3, 90), "{young}": (1, 12), "{old}": (55, 92)}

_Texts = Annotated[tuple[str, ...], Field(min_length=1)]
_Turn = Annotated[str, Field(pattern=r"(?s)^[0-4] .")]
_File = TypeVar("_File", bound=Section)


class Wording(Section):
    """Sentences of one urgency level in six registers; texts/emergency.yaml describes them."""

    third: _Texts
    first: _Texts
    scene: _Texts
    clinical: _Texts
    told: _Texts
    handover: _Texts


class EmergencyTexts(Section):
    """Messages by urgency level, most urgent first (texts/emergency.yaml)."""

    immediate: Wording
    high_risk: Wording
    several_resources: Wording
    one_resource: Wording
    no_resource: Wording


class HarmlessTexts(Section):
    """Prompts of the least urgent level (texts/harmless.yaml)."""

    emergency_nouns: _Texts
    distractors: _Texts
    everyday: _Texts
    frames: _Texts
    broken_things: _Texts
    figures_of_speech: _Texts


class Surroundings(Section):
    """What surrounds a message (texts/surroundings.yaml)."""

    men: _Texts
    women: _Texts
    openers_calm: _Texts
    openers_alarmed: _Texts
    openers_neutral: _Texts
    questions: _Texts
    tasks: _Texts
    details: _Texts
    negations: _Texts
    negations_first: _Texts
    background: _Texts
    turns: _Texts
    claims: _Texts
    templates: _Texts
    systems: _Texts
    exchanges: tuple[tuple[str, str], ...]
    blocks: _Texts
    claimed: _Texts


class VisitTexts(Section):
    """Words for coded visits (texts/visits.yaml)."""

    vague: str
    everyday: dict[str, str]
    findings: dict[str, str]
    finding_forms: str
    people: tuple[tuple[_Texts, _Texts], ...]
    relative: str
    patient: str
    dispatcher: str
    pain: _Texts
    injured: _Texts
    poisoned: _Texts
    brought: _Texts


class Parts(Section):
    """Parts of compositions in one language (texts/compositions)."""

    tasks: _Texts  # everyday requests to an assistant
    joiners: _Texts  # phrases that run on from one topic to the next
    frames: _Texts  # texts in which an emergency in place of {matter} is not happening now
    over: _Texts  # user turns that end an emergency
    answers: _Texts  # user turns within one that say nothing by themselves
    assistant: _Texts  # an assistant's turns within one
    small_talk: _Texts  # everyday user turns
    systems: _Texts  # system prompts
    records: _Texts  # of other software, with what somebody typed as {text}
    pastes: _Texts  # pasted texts with what somebody typed beside them
    chats: tuple[tuple[_Turn, ...], ...]  # user turns, oldest first, each after its level and " "


class LongTexts(Section):
    """Long prompts (texts/long/parts.yaml)."""

    calm: _Texts  # full of words of emergencies, of which none happens now
    carriers: dict[str, _Texts]  # by language: other long texts, each unit on a line of its own


class Person(NamedTuple):
    """Whom a message is about, as the speaker calls them."""

    name: str
    male: bool

    @property
    def he(self) -> str:
        """The pronoun as a subject."""
        return "he" if self.male else "she"

    def fill(self, sentence: str) -> str:
        """`sentence` with {who}, {he}, {him} and {his} filled in."""
        him, his = ("him", "his") if self.male else ("her", "her")
        sentence = sentence.replace("{his}self", "{him}self")
        return fill(sentence, who=self.name, he=self.he, him=him, his=his)


def has_texts_by_language() -> bool:
    """Whether the texts in each language are there; wheels lack them."""
    return all((_TEXTS / name).is_dir() for name in _BY_LANGUAGE)


@functools.cache
def wordings() -> tuple[Wording, ...]:
    """The wording of each urgency level, level 0 first."""
    texts = read_texts(_TEXTS / "emergency.yaml", EmergencyTexts)
    return tuple(getattr(texts, name) for name in EmergencyTexts.model_fields)


@functools.cache
def reasons() -> Mapping[str, tuple[str, str]]:
    """Everyday words and chart shorthand for the survey's coded reasons for a visit: alternatives
    joined by `|`, empty where the file has none."""
    return {row["reason"]: (row["everyday"], row["chart"]) for row in _rows(_TEXTS / "reasons.csv")}


@functools.cache
def written_rows() -> Mapping[str, Sequence[tuple[str, int]]]:
    """Text and urgency level of the messages that were written one by one, by ISO 639-1 code of
    their language."""
    paths = sorted((_TEXTS / "written").glob("*.csv"))
    return {path.stem: [(row["text"], int(row["level"])) for row in _rows(path)] for path in paths}


@functools.cache
def everyday_rows() -> Mapping[str, Sequence[tuple[str, int]]]:
    """The same of what people send beside requests for help (small talk, posts, orders), of alarms
    that machines send, and of pleas in hints, which sound alike."""
    paths = sorted((_TEXTS / "everyday").glob("*.csv"))
    return {path.stem: [(row["text"], int(row["level"])) for row in _rows(path)] for path in paths}


@functools.cache
def long_texts() -> LongTexts:
    """Parts of long prompts."""
    return read_texts(_TEXTS / "long" / "parts.yaml", LongTexts)


@functools.cache
def composition_parts() -> Mapping[str, Parts]:
    """The parts of compositions by ISO 639-1 code of their language."""
    paths = sorted((_TEXTS / "compositions").glob("*.yaml"))
    return {path.stem: read_texts(path, Parts) for path in paths}


def choose(sentence: str, rng: random.Random) -> str:
    """`sentence` with each `[a|b]` replaced by one of its alternatives, innermost first."""
    while match := _CHOICE.search(sentence):
        picked = rng.choice(match.group(1).split("|"))
        sentence = sentence[: match.start()] + picked + sentence[match.end() :]
    return " ".join(sentence.split())


def fill(form: str, /, **words: str) -> str:
    """`form` with each `{name}` replaced by the word of that name, one name after the other."""
    for name, word in words.items():
        form = form.replace(f"{{{name}}}", word)
    return form


def person(rng: random.Random) -> Person:
    """Someone at random, with an age in some cases."""
    male = rng.random() < 0.5
    name = rng.choice(surroundings().men if male else surroundings().women)
    for age, (least, most) in _AGES.items():
        name = name.replace(age, str(rng.randint(least, most)))
    return Person(name, male)


def capital(sentence: str) -> str:
    """`sentence` with its first letter in upper case."""
    return sentence[:1].upper() + sentence[1:]


def read_texts(path: Path, section: type[_File]) -> _File:
    """Read a YAML file of texts. PolicyError with the file if a key is unknown or missing, or a
    list is empty."""
    # The C parser where PyYAML has one: these files are long.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return parse_section(section, yaml.load(path.read_text("utf-8"), Loader=loader), path.name)


harmless = functools.cache(functools.partial(read_texts, _TEXTS / "harmless.yaml", HarmlessTexts))
surroundings = functools.cache(
    functools.partial(read_texts, _TEXTS / "surroundings.yaml", Surroundings)
)
visit_texts = functools.cache(functools.partial(read_texts, _TEXTS / "visits.yaml", VisitTexts))


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
