"""Measuring predictors: guesses, baselines, claims, and sets without some labels."""

import pytest
from predictor_examples import TwoLevels

from vllm_semantic_sched.lab.evaluation import measure
from vllm_semantic_sched.lab.evaluation.baselines import (
    MAJORITY,
    MEDIAN,
    TFIDF_LENGTHS,
    TFIDF_LEVELS,
    Guess,
    tfidf_baselines,
)
from vllm_semantic_sched.lab.evaluation.examples import Example, LabeledSet
from vllm_semantic_sched.lab.evaluation.measure import CLAIMS, NO_CLAIM, claim_figures
from vllm_semantic_sched.lab.evaluation.report import evaluation_page
from vllm_semantic_sched.lab.report.page import markdown
from vllm_semantic_sched.policy.facts.decision import Decision
from vllm_semantic_sched.policy.facts.prediction import Prediction


def test_claim_figures_follow_the_model():
    def believes(texts):
        urgent = (1.0, 0.0, 0.0, 0.0, 0.0)
        return Guess([urgent if "urgency 0" in text else urgent[::-1] for text in texts])

    texts = [Example("dying", 0), Example("a poem", 4), Example("a cough", 2)]
    figures = claim_figures(texts, believes, Decision())
    assert figures[NO_CLAIM] == {"calm_read_urgent": 0.0, "urgent_read_calm": 1.0}
    assert figures[CLAIMS[0]] == {"calm_read_urgent": 1.0, "urgent_read_calm": 0.0}


def test_baselines_need_two_different_labels():
    assert tfidf_baselines([Example("a word", 2), Example("another", 2, 9)]) == {}
    guessers = tfidf_baselines([Example("blue sky", 1, 10), Example("red earth", 3, 1000)])
    levels = guessers[TFIDF_LEVELS](["sky", "earth"]).urgency
    assert [row.index(max(row)) for row in levels] == [1, 3]
    assert sum(levels[0]) == pytest.approx(1) and levels[0][0] == 0
    short, long = guessers[TFIDF_LENGTHS](["sky", "earth"]).tokens
    assert 1 <= short < 100 < long


def test_guesses_keep_their_order_over_batches(monkeypatch):
    texts = ["not breathing", "a poem", "a sum", "breathing", "a poem"]
    counts = []
    monkeypatch.setattr(measure, "_TEXTS_PER_CALL", 2)
    guess = measure.model_guesser(TwoLevels(), counts.append)(texts)
    assert counts == [2, 2, 1]
    assert [row[0] for row in guess.urgency] == [0.99, 0.01, 0.01, 0.99, 0.01]
    assert all(len(row) == 5 for row in guess.urgency)
    assert guess.tokens == [10.0, 200.0, 10.0, 10.0, 200.0]


class Urgent(TwoLevels):
    """Reads every text as level 1; predicts no lengths."""

    length_buckets = None

    def predict(self, texts):
        return [Prediction((0.0, 1.0)) for _ in texts]


def test_a_model_without_lengths():
    labeled = LabeledSet("x", [Example("a", 1, 5), Example("b", None, 9)])
    result = measure.evaluate_predictor(labeled, Urgent(), {}, Decision())
    assert (result["n_level"], result["n_length"]) == (1, 0)
    assert result["kendall_tau"] is None
    assert set(result["baselines"]) == {MAJORITY, MEDIAN}


def test_all_texts_to_read_are_announced():
    examples = [Example("breathing", 0), Example("a poem", 4), Example("a cough", 2)]
    labeled, counts = LabeledSet("x", examples), []
    for claims in (False, True):
        counts.clear()
        measure.evaluate_predictor(
            labeled, TwoLevels(), {}, Decision(), claims=claims, advanced=counts.append
        )
        assert sum(counts) == measure.texts_to_read(labeled, claims)


class AlwaysCalm:
    """An instant reader that reads every text as level 1 of two, by a bound of its own."""

    levels = 2
    decision = Decision(bounds=(0.5,))
    length_buckets = TwoLevels.length_buckets

    def read(self, text: str) -> Prediction:
        return Prediction((0.4, 0.6), (1.0, 0.0))


def test_both_readers_are_reported():
    texts = [Example("not breathing\nat all", 0), Example("a poem", 1)]
    labeled = LabeledSet("two", texts)
    report = measure.evaluate_predictor(labeled, TwoLevels(), {}, Decision(), instant=AlwaysCalm())
    assert report["accuracy"] == 1.0
    assert report["baselines"][measure.INSTANT]["accuracy"] == 0.5
    assert f"| {measure.INSTANT}" in markdown(evaluation_page(report))
    without = measure.evaluate_predictor(labeled, TwoLevels(), {}, Decision())
    assert measure.INSTANT not in without["baselines"]
