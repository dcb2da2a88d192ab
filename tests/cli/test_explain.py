"""`semsched explain`: tables, JSON, and which model it loads."""

import json

import pytest

from vllm_semantic_sched.cli import main
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets, Prediction
from vllm_semantic_sched.predict.model import TextPredictor


class Alarm:
    """Level 0 is likely if a text says "fire", more so with "big"."""

    length_buckets = LengthBuckets((50,), (10.0, 200.0))

    def predict(self, texts) -> list[Prediction]:
        return [self._one(text.split()) for text in texts]

    def _one(self, words) -> Prediction:
        urgent = 0.1 + 0.6 * ("fire" in words) + 0.2 * ("big" in words)
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
    for words in ("urgency level 0", "> 0", "[/b]", "fire", "mean 105", "50 - more", "least_cost"):
        assert words in printed, words


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
    for arguments in ([], ["--policy", str(policy)], ["--model", "other", "--policy", str(policy)]):
        assert main(["explain", "x", *arguments]) == 0
    assert alarm == [None, "/models/mine", "other"]


def test_unusable_option_fails_with_its_name(alarm, capsys) -> None:
    assert main(["explain", "x", "--policy", "emss"]) == 1
    assert "'emss'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "x", "--max-tokens", "0"])
    assert "--max-tokens: 0 is not a positive integer" in capsys.readouterr().err


def test_missing_model_fails_with_its_name(capsys) -> None:
    assert main(["explain", "x", "--model", "/no/such/model"]) == 1
    assert "/no/such/model" in capsys.readouterr().err


def test_the_shipped_model_is_explained(capsys) -> None:
    assert main(["explain", "my dad collapsed and is not breathing", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["level"] <= 1 and len(answer["words"]) == 7
    assert sum(answer["probabilities"]) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(("urgent", "raises_to"), [(0.99, 0), (0.9, None)])
def test_second_look_shows_parts_and_what_raised_the_level(
    alarm, capsys, monkeypatch, tmp_path, urgent, raises_to
) -> None:
    text = f"{'calm words ' * 60} big fire {'calm words ' * 60}"
    monkeypatch.setattr(Alarm, "_one", lambda self, words: reading(words, text.split(), urgent))
    arguments = ["explain", text]
    assert main([*arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    found = [part for part in answer["second_look"] if "big fire" in part["text"]]
    assert {part["raises_to"] for part in found} == {raises_to}
    assert answer["level"] == (1 if raises_to is None else raises_to)
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert f"urgency level {answer['level']}" in printed and "second look" in printed
    policy = tmp_path / "once.yaml"
    policy.write_text("predictor: {second_look: false}\n")
    assert main([*arguments, "--json", "--policy", str(policy)]) == 0
    assert not json.loads(capsys.readouterr().out)["second_look"]


def reading(words: list[str], whole: list[str], urgent: float) -> Prediction:
    """The fire is lost in the whole text."""
    urgent = urgent if "fire" in words and len(words) < len(whole) // 2 else 0.0
    return Prediction((urgent, 1 - urgent), (0.5, 0.5))
