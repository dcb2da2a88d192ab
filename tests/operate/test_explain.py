"""Explanations: level, costs and time follow from the policy, and the deciding words come first."""

import pytest

from vllm_semantic_sched.operate.explain import explain
from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.facts.decision import DEFAULT_DECISION, Decision
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets, Prediction
from vllm_semantic_sched.policy.profile.formula import load_profile

PROFILE = load_profile("default")


class Alarm:
    """Level 0 is likely if a text says "fire", more so with "big"; counts its calls and texts."""

    length_buckets = LengthBuckets((50,), (10.0, 200.0))

    def __init__(self, decision: Decision = DEFAULT_DECISION) -> None:
        self.calls: list[list[str]] = []
        self.decision = decision

    def part_read(self, text) -> str:
        return text

    def predict(self, texts) -> list[Prediction]:
        self.calls.append(list(texts))
        return [self._one(text.split()) for text in texts]

    def _one(self, words) -> Prediction:
        urgent = 0.1 + 0.6 * ("fire" in words) + 0.2 * ("big" in words)
        return Prediction((urgent, 1 - urgent, 0.0), (0.5, 0.5), decision=self.decision)


def explained(text: str, max_tokens=None, reader=None, **policy):
    return explain(text, reader or Alarm(), parse_policy(policy), PROFILE, max_tokens)


def test_deciding_words_come_first() -> None:
    result = explained("there is a big fire here")
    assert [(one.word, one.position) for one in result.words[:2]] == [("fire", 4), ("big", 3)]
    assert result.words[0].probability == pytest.approx(0.6)
    assert result.words[0].log_odds > result.words[1].log_odds > 0
    assert all(one.log_odds == 0 for one in result.words[2:])
    assert result.occluded == result.word_count == 6


def test_the_rule_is_the_models_and_the_costs_are_the_policys() -> None:
    text = "a big box"  # 0.3 for level 0
    dear = explained(text, decision={"missed_cost": [4.0, 2.0, 1.0]})
    assert dear.level == 0 and dear.costs == pytest.approx((0.7, 1.2, 0.3 * 8 + 0.7 * 2))
    calm = explained(text, reader=Alarm(Decision(bounds=(0.5, 0.5))))
    assert calm.level == 1
    assert explained("a box", levels=1, default_level=0).level == 0


def test_words_speak_for_the_decided_level_and_all_more_urgent_ones() -> None:
    text = "a big box"  # 0.3 for level 0, 0.7 for level 1
    urgent = explained(text, reader=Alarm(Decision(bounds=(0.3, 0.5))))
    assert (urgent.level, urgent.weighed, urgent.rule) == (0, 0, "level 0 has 0.3, bound 0.3")
    assert urgent.words[0].word == "big" and urgent.words[0].log_odds > 0
    both = explained(text, reader=Alarm(Decision(bounds=(0.5, 0.5))))
    assert (both.weighed, both.rule) == (1, "levels 0 to 1 together have 1, bound 0.5")
    assert both.words[0].probability == pytest.approx(0.0)


def test_words_speak_for_the_last_level_alone() -> None:
    """It and all more urgent ones together are certain."""

    class Calm(Alarm):
        def _one(self, words) -> Prediction:
            share = 0.9 if "please" in words else 0.6
            return Prediction((0.0, 1 - share, share), (0.5, 0.5), decision=self.decision)

    result = explained("a poem please", reader=Calm(Decision(bounds=(0.5, 0.5))))
    assert (result.level, result.words[0].word) == (2, "please")
    assert result.words[0].probability == pytest.approx(0.3)
    assert result.rule == "no level reaches its bound (0.5, 0.5)"


def test_lengths_and_time() -> None:
    result = explained("fire")
    assert [(one.shortest, one.longest) for one in result.lengths] == [(1, 49), (50, None)]
    assert result.tokens["mean"] == 105 and result.tokens["p90"] > result.tokens["mean"]
    capped = explained("fire", max_tokens=20)
    assert capped.tokens == {"mean": 20, "median": 20, "p90": 20}
    assert 0 < capped.remaining_seconds < result.remaining_seconds


def test_a_long_text_costs_a_bounded_number_of_predictions() -> None:
    predictor = Alarm()
    text = " ".join(["fire", *(f"word{number}" for number in range(20_000)), "big"])
    result = explained(text, reader=predictor)
    (texts,) = predictor.calls
    assert len(texts) == 130 and result.occluded == 128 and result.word_count == 20_002
    assert {one.position for one in result.words[:2]} == {0, 20_001}


@pytest.mark.parametrize("text", ["", " \n", "x"])
def test_tiny_text_is_explained(text) -> None:
    result = explained(text)
    assert len(result.words) == len(text.split())


def test_notes_name_the_parts_that_the_policy_does_not_use() -> None:
    assert explained("x").notes == ()
    assert "level has no effect" in explained("x", base="sjf").notes[0]
    assert "length has no effect" in explained("x", base="priority").notes[0]
    assert "own order" in explained("x", base="fcfs").notes[0]
    assert "does not read" in explained("x", predictor={"enabled": False}).notes[0]


class Instant:
    """Sure of level 0, and of a short answer."""

    length_buckets = Alarm.length_buckets

    def read(self, text: str) -> Prediction:
        return Prediction((0.95, 0.05, 0.0), (1.0, 0.0))

    def strongest(self, text: str, level: int, count: int) -> list[tuple[str, float]]:
        return [(f"{text} {level}", 2.0)]


def test_instant_reader_is_shown_beside_the_predictor() -> None:
    assert explained("a box").instant is None
    for may, preempts_as in (("preempt", 0), ("start", None)):
        policy = parse_policy({"predictor": {"instant": may}})
        part = explain("a box", Alarm(), policy, PROFILE, None, Instant()).instant
        assert part is not None
        assert (part.level, part.tokens, part.preempts_as) == (0, 10, preempts_as)
        assert part.pieces == (("a box 0", 2.0),)
