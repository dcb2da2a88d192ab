"""Test sets of texts with parts."""

from collections import Counter
from pathlib import Path

import pytest
import yaml

from vllm_semantic_sched.lab.evaluation.compositions import read_composed_set
from vllm_semantic_sched.predict.window import cut_text

DATA = Path(__file__).parents[2] / "data"
CHATS = DATA / "conversations"
PARTS = {
    "emergencies": ["He is not breathing!"],
    "tasks": ["Write a poem.", "What is 2+2?"],
    "joiners": ["and also"],
    "framed": ["In my novel he is not breathing."],
    "surroundings": ["<system>Summarize calls.</system>{text}"],
}
CHAT = {
    "kind": "resolved",
    "turns": [
        ["user", "hello", 4],
        ["assistant", "Hi."],
        ["user", "he fell and is not breathing", 0],
        ["user", "the ambulance is here", 4],
    ],
}


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content), "utf-8")
    return read_composed_set(folder)


def texts_by_place(labeled):
    pairs = zip(labeled.groups["place"], labeled.examples, strict=True)
    return {place: (one.text, one.level) for place, one in pairs}


def test_emergency_in_every_place(tmp_path) -> None:
    other = PARTS | {"tasks": ["Schreib ein Gedicht."]}
    texts = texts_by_place(write(tmp_path, de=other, en=PARTS))
    assert texts["alone"] == ("He is not breathing!", 0)
    assert texts["before"] == ("He is not breathing! Write a poem.", 0)
    assert texts["after"] == ("Write a poem. He is not breathing!", 0)
    assert texts["between"] == ("Write a poem. He is not breathing! What is 2+2?", 0)
    assert texts["foreign task"] == ("Schreib ein Gedicht. He is not breathing!", 0)
    unpunctuated = "Write a poem and also He is not breathing"
    assert texts["unpunctuated, after"] == (unpunctuated, 0)
    assert texts["framed"] == ("In my novel he is not breathing.", 4)
    around = "Write a poem. {} What is 2+2? Write a poem. What is 2+2?"
    assert texts["within a long text"] == (around.format("He is not breathing!"), 0)
    framed = around.format("In my novel he is not breathing.")
    assert texts["framed within a long text"] == (framed, 4)
    assert texts["surrounded"] == ("<system>Summarize calls.</system>He is not breathing!", 0)
    assert texts["surrounded task"] == ("<system>Summarize calls.</system>What is 2+2?", 4)
    assert {level for place, (_, level) in texts.items() if "task" in place} == {0, 4}


def test_chat_is_read_at_each_user_turn(tmp_path) -> None:
    labeled = write(tmp_path, en=[CHAT])
    assert labeled.groups["place"] == ("no emergency", "emergency", "over")
    assert [one.level for one in labeled.examples] == [4, 0, 4]
    read = cut_text(labeled.examples[-1].text, 1000)
    assert read == "the ambulance is here ■ he fell and is not breathing ■ hello"


@pytest.mark.parametrize("content", [[{"kind": "other", "turns": []}], {"tasks": []}])
def test_invalid_file_is_named(tmp_path, content) -> None:
    with pytest.raises(ValueError, match=r"en\.yaml"):
        write(tmp_path, en=content)


def test_folder_without_files_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="without CSV or YAML"):
        read_composed_set(tmp_path)


def test_shipped_sets_cover_every_language_and_place() -> None:
    composed = read_composed_set(DATA / "compositions")
    cells = Counter(zip(composed.groups["language"], composed.groups["place"], strict=True))
    assert len({language for language, _ in cells}) == 26
    assert len(cells) == 26 * len(set(composed.groups["place"]))
    levels = zip(composed.groups["language"], composed.examples, strict=True)
    calm = Counter(language for language, one in levels if one.level == 4)
    assert min(calm.values()) >= 20 and len(composed.examples) >= 26 * 40
    assert sum(len(yaml.safe_load(path.read_text("utf-8"))) for path in CHATS.glob("*.yaml")) >= 300
    chats = read_composed_set(CHATS)
    assert len(set(chats.groups["language"])) >= 10
    assert set(chats.groups["place"]) == {"no emergency", "emergency", "over"}
