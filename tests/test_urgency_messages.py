"""The hand-written evaluation messages are usable: enough of each level, none twice."""

import csv
from collections import Counter
from pathlib import Path

MESSAGES = Path(__file__).parent / "data" / "urgency_messages.csv"


def test_every_level_has_enough_distinct_messages():
    with MESSAGES.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file, strict=True)
        assert reader.fieldnames == ["text", "level"]
        rows = list(reader)
    assert all(row["text"] and row["text"] == row["text"].strip() for row in rows)
    assert len({row["text"].casefold() for row in rows}) == len(rows) >= 220
    per_level = Counter(row["level"] for row in rows)
    assert set(per_level) == set("01234")
    assert min(per_level.values()) >= 40
