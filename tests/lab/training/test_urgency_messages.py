"""The hand-written evaluation messages are usable: enough of each language, level and kind, none
twice, none trained on."""

import csv
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from vllm_semantic_sched.lab.training.mixture import everyday_texts, written_messages
from vllm_semantic_sched.lab.training.wording import composition_parts, written_rows

DATA = Path(__file__).parents[2] / "data"
MESSAGES = DATA / "urgency"
LANGUAGES = sorted(path.stem for path in MESSAGES.glob("*.csv"))
# What makes a message hard to read; "calm" is something grave told calmly, "child" is a child
# writing, "fire" is also smoke and gas, "overdose" is also poison, "past" is about an old event,
# "hearsay" is told by someone who was told, "document" only pastes or quotes an emergency, or hides
# one behind a long paste, and "chat" has it in some turn of a conversation.
MEDICAL = {
    *("calm", "child", "overdose", "violence", "fire", "suicide", "allergy", "negation", "short"),
    *("hearsay", "carbon-monoxide", "stroke", "sepsis", "pregnancy", "drowning", "past"),
}
NO_REQUEST_FOR_HELP = {"news", "fiction", "homework", "technical", "smalltalk", "medical-info"}
ENGLISH_ONLY = {"chat", "document", "nonmedical"}
OTHERS_ONLY = {"clinical", "code-switched", "transliterated"}


def messages(language: str) -> list[dict[str, str]]:
    with (MESSAGES / f"{language}.csv").open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file, strict=True)
        assert reader.fieldnames == ["text", "level", "kind"]
        return list(reader)


def test_there_are_as_many_languages_as_in_training():
    assert len(LANGUAGES) >= 20
    assert set(LANGUAGES) == set(written_rows())


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_language_has_enough_messages_of_each_level(language):
    least, of_a_level = (600, 100) if language == "en" else (50, 5)
    rows = messages(language)
    assert all(row["text"] and row["text"] == row["text"].strip() for row in rows)
    assert len({row["text"].casefold() for row in rows}) == len(rows) >= least
    per_level = Counter(row["level"] for row in rows)
    assert set(per_level) == set("01234")
    assert min(per_level.values()) >= of_a_level


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_language_has_enough_messages_to_train_on(language):
    assert len(written_rows()[language]) >= 250


def test_every_hard_kind_occurs_often_enough():
    english = Counter(row["kind"] for row in messages("en"))
    assert set(english) == MEDICAL | NO_REQUEST_FOR_HELP | ENGLISH_ONLY | {"plain"}
    assert min(english.values()) >= 8
    others = Counter(
        row["kind"] for language in LANGUAGES if language != "en" for row in messages(language)
    )
    assert set(others) == MEDICAL | NO_REQUEST_FOR_HELP | OTHERS_ONLY | {"plain"}
    assert min(others.values()) >= 8


def test_what_asks_for_no_help_has_the_last_level():
    for row in (row for language in LANGUAGES for row in messages(language)):
        if row["kind"] in NO_REQUEST_FOR_HELP | {"nonmedical"}:
            assert row["level"] == "4", row["text"]


def evaluation_texts(language: str) -> list[str]:
    """Messages, parts of compositions and user turns of chats."""
    texts = [row["text"] for row in messages(language)]
    parts = yaml.safe_load((DATA / "compositions" / f"{language}.yaml").read_text("utf-8"))
    texts += [
        text for name in ("emergencies", "tasks", "framed", "surroundings") for text in parts[name]
    ]
    chats = DATA / "conversations" / f"{language}.yaml"
    if chats.exists():
        turns = [
            turn for chat in yaml.safe_load(chats.read_text("utf-8")) for turn in chat["turns"]
        ]
        texts += [turn[1] for turn in turns if turn[0] == "user"]
    return texts


def everyday_evaluation_texts(language: str) -> list[str]:
    with (DATA / "everyday" / f"{language}.csv").open(newline="", encoding="utf-8") as file:
        return [row["text"] for row in csv.DictReader(file)]


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_written_training_message_resembles_one_of_these(language):
    # Words of these languages are not set apart: characters in their place, two for a word.
    unspaced = language in ("ja", "th", "zh")
    five_words, word = (10, 2) if unspaced else (5, 1)

    def runs(text: str, length: int = five_words) -> set[tuple[str, ...]]:
        plain = re.sub(r"[\s.,:;!?…\"'()।؟،۔。、！？「」]+", " ", text.lower())
        parts = plain.replace(" ", "") if unspaced else plain.split()
        return {tuple(parts[at : at + length]) for at in range(len(parts) - length + 1)}

    evaluated = set().union(*(runs(row["text"]) for row in messages(language)))
    composed = set().union(*map(runs, evaluation_texts(language)))
    everyday = everyday_evaluation_texts(language)
    vocabularies: dict[tuple[str, ...], list[set[tuple[str, ...]]]] = {}  # by each of their words
    for text in (*evaluation_texts(language), *everyday):
        vocabulary = runs(text, word)
        for member in vocabulary:
            vocabularies.setdefault(member, []).append(vocabulary)
    texts = {row["text"].casefold() for row in messages(language)}
    parts = composition_parts()[language]
    for split in ("train", "validation"):
        for example in everyday_texts(split, language):
            words = runs(example.text, word)
            if len(words) >= 5:
                assert not _resembles_one(words, vocabularies), example.text
        for example in written_messages(split, language):
            assert example.text.casefold() not in texts
            own, words = runs(example.text), runs(example.text, word)
            assert len(own & evaluated) < 2, example.text
            _assert_apart(own, composed, example.text)
            if len(words) >= 5:
                assert not _resembles_one(words, vocabularies), example.text
    turns = (turn[2:] for chat in parts.chats for turn in chat)
    spoken = (*parts.over, *parts.answers, *parts.assistant, *parts.small_talk, *turns)
    for text in (
        *parts.tasks,
        *parts.frames,
        *parts.records,
        *parts.pastes,
        *parts.systems,
        *spoken,
    ):
        _assert_apart(runs(text), composed, text)


def _resembles_one(
    words: set[tuple[str, ...]], vocabularies: dict[tuple[str, ...], list[set[tuple[str, ...]]]]
) -> bool:
    """Whether of the words in this text or another, three of five are in both. Such a text has so
    many words of this one that it cannot lack all of the rarest."""
    count = len(words)
    least = (3 * count + 4) // 5
    rarest = sorted(words, key=lambda word: len(vocabularies.get(word, ())))[: count - least + 1]
    for word in rarest:
        for others in vocabularies.get(word, ()):
            common = len(words & others)
            if 5 * common >= 3 * (count + len(others) - common):
                return True
    return False


def _assert_apart(own: set[tuple[str, ...]], others: set[tuple[str, ...]], text: str) -> None:
    # Parts are short and of common phrases: some of them, but not half of a text.
    assert len(own & others) < max(2, 0.5 * len(own)), text
