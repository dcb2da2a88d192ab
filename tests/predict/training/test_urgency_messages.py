"""The hand-written evaluation messages are usable: enough of each level and kind, none twice."""

import csv
import re
from collections import Counter
from pathlib import Path

from vllm_semantic_sched.predict.training.mixture import written_messages

MESSAGES = Path(__file__).parents[2] / "data" / "urgency_messages.csv"
# What makes a message hard to read; "calm" is something grave told calmly, "child" is a child
# writing, "fire" is also smoke and gas, "overdose" is also poison, "past" is about an old event.
HARD_MEDICAL = {"calm", "child", "overdose", "violence", "fire", "suicide", "allergy", "negation"}
NO_REQUEST_FOR_HELP = {
    "news",
    "fiction",
    "homework",
    "technical",
    "smalltalk",
    "medical-info",
    "nonmedical",
}
HARD = HARD_MEDICAL | NO_REQUEST_FOR_HELP | {"past"}


def messages() -> list[dict[str, str]]:
    with MESSAGES.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file, strict=True)
        assert reader.fieldnames == ["text", "level", "kind"]
        return list(reader)


def test_every_level_has_enough_distinct_messages():
    rows = messages()
    assert all(row["text"] and row["text"] == row["text"].strip() for row in rows)
    assert len({row["text"].casefold() for row in rows}) == len(rows) >= 430
    per_level = Counter(row["level"] for row in rows)
    assert set(per_level) == set("01234")
    assert min(per_level.values()) >= 80


def test_every_hard_kind_occurs_often_enough():
    rows = messages()
    per_kind = Counter(row["kind"] for row in rows)
    assert set(per_kind) == HARD | {"plain"}
    assert min(per_kind[kind] for kind in HARD) >= 8


def test_what_asks_for_no_help_has_the_last_level():
    for row in messages():
        if row["kind"] in NO_REQUEST_FOR_HELP:
            assert row["level"] == "4", row["text"]
        if row["kind"] == "calm":
            assert row["level"] in "01", row["text"]


def test_no_written_training_message_resembles_one_of_these():
    def fives(text: str) -> set[tuple[str, ...]]:
        words = re.sub(r"\W+", " ", text.lower()).split()
        return {tuple(words[at : at + 5]) for at in range(len(words) - 4)}

    evaluated = set().union(*(fives(row["text"]) for row in messages()))
    texts = {row["text"].casefold() for row in messages()}
    for split in ("train", "validation"):
        for example in written_messages(split):
            assert example.text.casefold() not in texts
            assert len(fives(example.text) & evaluated) < 2, example.text
