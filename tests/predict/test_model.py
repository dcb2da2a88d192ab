"""The shipped predictor: what it says about plain sentences, and that nothing breaks it."""

import pytest
import torch
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    PreTrainedTokenizerFast,
)

from vllm_semantic_sched.predict.model import SHIPPED_WEIGHTS, TextPredictor


@pytest.fixture(scope="module")
def predictor():
    return TextPredictor.load()


def expected_level(prediction):
    return sum(level * share for level, share in enumerate(prediction.urgency))


def test_one_distribution_per_text(predictor):
    texts = ["hello", "my chest hurts", "write a very long essay about the sea"] * 15
    predictions = predictor.predict(texts)
    assert len(predictions) == len(texts)
    for prediction in predictions:
        assert len(prediction.urgency) == predictor.levels == 5
        assert len(prediction.length) == len(predictor.length_buckets.means)
        assert sum(prediction.urgency) == pytest.approx(1, abs=1e-5)
        assert sum(prediction.length) == pytest.approx(1, abs=1e-5)
    assert predictor.predict([]) == []


def test_same_text_same_prediction(predictor):
    assert predictor.predict(["my chest hurts"]) == predictor.predict(["my chest hurts"])


def test_order_of_answers_is_order_of_texts(predictor):
    long, short = "she is not breathing, no pulse, please hurry " * 3, "write a poem"
    forth = predictor.predict([long, short])
    back = predictor.predict([short, long])
    for one, other in zip(forth, reversed(back), strict=True):
        assert one.urgency == pytest.approx(other.urgency, abs=0.05)


@pytest.mark.parametrize(
    "task",
    [
        "Write a poem about rain.",
        "What coloring of cat is almost always female?",
        "Summarize what matters in a short paragraph.",
    ],
)
def test_task_for_the_model_does_not_hide_an_emergency(predictor, task):
    text = "He's vomiting bright red blood, buckets of it, and just blacked out. " + task
    (prediction,) = predictor.predict([text])
    assert sum(prediction.urgency[:2]) > 0.9
    (calm,) = predictor.predict(["My cat sleeps all day. " + task])
    assert sum(calm.urgency[:2]) < 0.1


@pytest.mark.parametrize(
    "emergency",
    [
        "my dad collapsed and isn't breathing",
        "she is choking and turning blue what do i do",
        "house on fire, people trapped upstairs",
    ],
)
def test_emergencies_come_before_questions(predictor, emergency):
    calm = ["can you explain how vaccines work", "write a poem about rain", "what causes asthma?"]
    first, *others = predictor.predict([emergency, *calm])
    assert max(range(5), key=first.urgency.__getitem__) <= 1
    assert all(expected_level(first) + 2 < expected_level(other) for other in others)


def test_levels_are_ordered_by_need(predictor):
    texts = [
        "he is unconscious and has no pulse",
        "crushing chest pain and sweating, pain in the left arm",
        "I have had belly pain and vomiting since yesterday",
        "I twisted my ankle and it is a bit swollen",
        "I need a refill of my blood pressure pills",
    ]
    levels = [expected_level(prediction) for prediction in predictor.predict(texts)]
    assert levels == sorted(levels)


def test_long_answers_are_told_from_short_ones(predictor):
    def tokens(prediction):
        pairs = zip(prediction.length, predictor.length_buckets.means, strict=True)
        return sum(share * mean for share, mean in pairs)

    short, long = predictor.predict(
        [
            "Is the number 7 prime? Answer yes or no.",
            "Write a detailed essay on the French Revolution.",
        ]
    )
    assert tokens(short) * 2 < tokens(long)


@pytest.mark.parametrize(
    "text", ["", "   ", "😀" * 500, "\x00\x07\ufffd", "\ud83d", "x" * 100_000, "né 日本語 العربية"]
)
def test_any_string_is_accepted(predictor, text):
    (prediction,) = predictor.predict([text])
    assert sum(prediction.urgency) == pytest.approx(1, abs=1e-5)


def make_classifier(folder, **settings):
    torch.manual_seed(0)
    config = DistilBertConfig(
        vocab_size=60_000, dim=16, hidden_dim=32, n_layers=1, n_heads=2, **settings
    )
    DistilBertForSequenceClassification(config).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_file=str(SHIPPED_WEIGHTS / "tokenizer.json"), pad_token="<pad>"
    ).save_pretrained(folder)
    return str(folder)


def test_any_sequence_classifier_can_be_used(tmp_path):
    path = make_classifier(tmp_path, id2label={0: "now", 1: "soon", 2: "later"})
    predictor = TextPredictor.load(path)
    assert predictor.length_buckets is None and predictor.levels == 3
    (prediction,) = predictor.predict(["hello there " * 400])
    assert len(prediction.urgency) == 3 and prediction.length is None


@pytest.mark.parametrize(
    "settings",
    [
        {"num_labels": 1},
        {"num_labels": 9},
        {"num_labels": 3, "problem_type": "multi_label_classification"},
    ],
    ids=["regression", "nine labels", "multiple labels"],
)
def test_labels_that_are_no_levels_are_refused(tmp_path, settings):
    path = make_classifier(tmp_path, **settings)
    with pytest.raises(ValueError, match="2 to 5 exclusive labels"):
        TextPredictor.load(path)


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no-such-model"):
        TextPredictor.load(str(tmp_path / "no-such-model"))
