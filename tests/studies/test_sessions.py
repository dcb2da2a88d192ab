"""The study of sessions, with a reader that knows a few words, and the chats that it reads."""

from pathlib import Path

import pytest
import sessions

from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.predict.window import cut_text

DATA = Path(__file__).parents[1] / "data" / "sessions"
EMERGENCY, FOLLOWS, OVER, CALM = "he collapsed", "yes, 61", "the ambulance is here", "a good film?"
CHATS = [
    sessions.Chat("en", "running", ((0, EMERGENCY), (0, FOLLOWS), (0, FOLLOWS))),
    sessions.Chat("en", "resolved", ((0, EMERGENCY), (0, FOLLOWS), (4, OVER), (4, CALM))),
    sessions.Chat("de", "calm", ((4, CALM), (4, FOLLOWS))),
]


class Reader:
    """Reads an emergency until the chat says that it is over."""

    def predict(self, texts):
        readings = []
        for text in texts:
            said = cut_text(text, 126)
            level = 0 if EMERGENCY in said and OVER not in said else 4
            readings.append(Prediction(tuple(float(each == level) for each in range(5))))
        return readings


def test_each_way_is_measured_on_the_same_turns() -> None:
    read = sessions.measure(Reader(), CHATS)
    shares = {
        way: sessions.figures_of(CHATS, levels, "kind")["all"] for way, levels in read.items()
    }
    for way, level_0, over in (
        ("each turn alone", [3, 0], [2, 0]),
        ("session", [3, 3], [2, 0]),
        ("whole chat", [3, 3], [2, 0]),
        ("alone, with a floor", [3, 3], [2, 2]),
    ):
        figures = shares[way]
        assert (figures.level_0, figures.over) == (level_0, over), way
        assert figures.level_4[0] == 3 and figures.level_1 == [0, 0]
    groups = sessions.figures_of(CHATS, read["session"], "language")
    assert groups.keys() == {"all", "en", "de"} and groups["de"].level_4 == [1, 0]
    assert groups["all"].row()["level_0"] == "100.0 % (3/3)"
    assert groups["de"].row()["level_0"] == "-"


@pytest.mark.parametrize("path", sorted(DATA.glob("*.yaml")), ids=lambda path: path.stem)
def test_chats_have_turns_with_levels(path) -> None:
    chats = [chat for chat in sessions.read_chats(DATA) if chat.language == path.stem]
    assert len(chats) >= 40
    for chat in chats:
        assert 3 <= len(chat.turns) <= 7
        assert all(0 <= level <= 4 and text.strip() for level, text in chat.turns)
        urgent = any(level <= sessions.URGENT for level, _ in chat.turns)
        assert urgent == (chat.kind not in ("calm", "invented"))
