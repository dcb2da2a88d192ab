"""`semsched explain`: tables, JSON, and which model it loads."""

import json

import pytest

from vllm_semantic_sched.cli import main
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets, Prediction
from vllm_semantic_sched.policy.profile.formula import load_profile
from vllm_semantic_sched.predict.model import TextPredictor


class Alarm:
    """Level 0 is likely if a text says "fire", more so with "big"."""

    length_buckets = LengthBuckets((50,), (10.0, 200.0))

    def part_read(self, text) -> str:
        return text

    def predict(self, texts) -> list[Prediction]:
        return [self._one(text.split()) for text in texts]

    def _one(self, words) -> Prediction:
        urgent = 0.1 + 0.6 * ("fire" in words) + 0.2 * ("big" in words)
        urgent += 0.06 * ("[/b]" in words)
        return Prediction((urgent, 1 - urgent, 0.0), (0.5, 0.5))


@pytest.fixture
def alarm(monkeypatch) -> list:
    loaded = []

    def load(path=None, threads=1) -> Alarm:
        loaded.append(path)
        return Alarm()

    monkeypatch.setattr(TextPredictor, "load", load)
    return loaded


def test_the_command_prints_tables(alarm, capsys) -> None:
    assert main(["explain", "[/b] big fire \ud83d \u202e"]) == 0
    printed = capsys.readouterr().out
    for words in (
        "urgency level 0",
        "> 0",
        "[/b]",
        "fire",
        "mean 105",
        "50 - more",
        "lowest expected cost",
    ):
        assert words in printed, words


def test_words_that_change_little_are_hidden_and_bars_are_probabilities(
    alarm, monkeypatch, capsys
) -> None:
    assert main(["explain", "a big fire"]) == 0
    printed = capsys.readouterr().out
    assert f"engine profile: {load_profile('auto').source}" in " ".join(printed.split())
    _, words = printed.split("words that speak for")
    bars = {line.split()[0]: line.count("█") for line in words.splitlines() if "█" in line}
    assert bars == {"fire": round(0.6 * 24), "big": round(0.2 * 24)}, "`a` changes nothing"
    monkeypatch.setattr(Alarm, "_one", lambda self, words: Prediction((0.9, 0.1, 0.0), (0.5, 0.5)))
    assert main(["explain", "a big fire"]) == 0
    assert "none alone changes its probability by 0.05" in capsys.readouterr().out


def test_levels_beyond_the_last_tier_share_it(alarm, tmp_path, monkeypatch, capsys) -> None:
    small_talk = Prediction((0.0, 0.1, 0.9), (0.5, 0.5))
    monkeypatch.setattr(Alarm, "_one", lambda self, words: small_talk)
    policy = tmp_path / "mine.yaml"
    policy.write_text("levels: 2\ndefault_level: 1\ntiers: [{name: red}, {name: blue}]\n")
    assert main(["explain", "poem", "--policy", str(policy)]) == 0
    printed = capsys.readouterr().out
    assert "urgency level 1, blue" in printed
    rows = [line.split() for line in printed.splitlines()]
    marked = [words[:3] for words in rows if words[:1] == [">"]]
    assert marked == [[">", "1", "blue"], [">", "2", "blue"]]
    assert ["0", "red"] in [words[:2] for words in rows]


def test_the_command_prints_json(alarm, capsys) -> None:
    assert main(["explain", "big fire \ud83d", "--json", "--max-tokens", "5"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["level"] == 0 and answer["tokens"]["mean"] == 5
    assert answer["words"][0]["word"] == "fire"


def test_model_comes_from_the_option_or_the_policy(alarm, tmp_path) -> None:
    policy = tmp_path / "mine.yaml"
    policy.write_text("predictor: {model: /models/mine}\n")
    for arguments in (
        [],
        ["--policy", str(policy)],
        ["--predictor", "other", "--policy", str(policy)],
    ):
        assert main(["explain", "x", *arguments]) == 0
    assert alarm == [None, "/models/mine", "other"]


def test_unusable_option_fails_with_its_name(alarm, capsys) -> None:
    assert main(["explain", "x", "--policy", "emss"]) == 1
    assert "'emss'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "x", "--max-tokens", "0"])
    assert "--max-tokens: 0 is not a positive integer" in capsys.readouterr().err


def test_missing_model_fails_with_its_name(capsys) -> None:
    assert main(["explain", "x", "--predictor", "/no/such/model"]) == 1
    assert "/no/such/model" in capsys.readouterr().err


def test_the_shipped_model_is_explained(capsys) -> None:
    assert main(["explain", "my dad collapsed and is not breathing", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["level"] <= 1 and len(answer["words"]) == 7
    assert sum(answer["probabilities"]) == pytest.approx(1, abs=1e-4)


def test_what_is_read_of_a_long_text_is_shown(alarm, capsys, monkeypatch) -> None:
    monkeypatch.setattr(Alarm, "part_read", lambda self, text: "calm ... big fire ... calm")
    arguments = ["explain", f"{'calm words ' * 60} big fire {'calm words ' * 60}"]
    assert main([*arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["read"] == "calm ... big fire ... calm" and answer["word_count"] == 6
    assert answer["words"][0]["word"] == "fire"
    assert main(arguments) == 0
    assert "read of the text, which is long:\ncalm ... big fire" in capsys.readouterr().out
