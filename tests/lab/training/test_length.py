"""The linear length head: closed form, in the network and in the instant reader."""

import numpy
import pytest
import torch

from vllm_semantic_sched.lab.evaluation.examples import Example
from vllm_semantic_sched.lab.training.base import set_length_buckets
from vllm_semantic_sched.lab.training.fit import Options
from vllm_semantic_sched.lab.training.length import _discriminant, fit_length_head
from vllm_semantic_sched.policy.estimates.length import expected_output_tokens
from vllm_semantic_sched.predict.instant import InstantReader
from vllm_semantic_sched.predict.model import TextPredictor
from vllm_semantic_sched.predict.weights import load_network

_SHORT, _LONG = "name one", "write an essay on"
_TOPICS = ("rivers", "bread", "old maps", "glass", "a quiet street", "birds", "salt", "the moon")


def examples(lengths=(5, 200)):
    return [
        Example(f"{start} {topic} {number}", None, tokens + number)
        for start, tokens in zip((_SHORT, _LONG), lengths, strict=True)
        for number, topic in enumerate(_TOPICS * 3)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    fit_length_head(Options(folder, "shipped", seed=1, epochs=0), examples())
    return folder


def tokens(prediction, buckets):
    return expected_output_tokens(prediction.length, buckets, 0, "mean")


def test_both_readers_learn_which_words_ask_for_long_answers(model):
    network, instant = TextPredictor.load(str(model)), InstantReader.load(str(model))
    texts = [f"{_SHORT} island", f"{_LONG} islands"]
    for predictions in (network.predict(texts), [instant.read(text) for text in texts]):
        short, long = (tokens(one, network.length_buckets) for one in predictions)
        assert short < 40 < 150 < long


def test_levels_stay_those_of_the_base(model):
    texts = ["my dad is not breathing", "write a poem about spring", "the server is down"]
    for before, after in (
        (TextPredictor.load(), TextPredictor.load(str(model))),
        (InstantReader.load(), InstantReader.load(str(model))),
    ):
        for text in texts:
            old, new = (
                one.predict([text])[0] if isinstance(one, TextPredictor) else one.read(text)
                for one in (before, after)
            )
            assert new.urgency == pytest.approx(old.urgency, abs=1e-3)


def test_a_deep_head_replaces_a_linear_one(model):
    network = load_network(model)
    assert network.length_words is not None
    set_length_buckets(network, [5, 50, 500])
    ids = torch.tensor([[1, 2, 3]])
    _, length = network(ids, torch.ones_like(ids))
    assert network.length_words is None
    assert length.shape == (1, 3)
    assert not any("length_words" in name for name in network.state_dict())


def test_answers_of_one_length_make_one_bucket(tmp_path):
    same = [Example(one.text, None, 7) for one in examples()]
    fit_length_head(Options(tmp_path, "shipped", seed=1, epochs=0), same)
    predictor = TextPredictor.load(str(tmp_path))
    assert tokens(predictor.predict(["anything"])[0], predictor.length_buckets) == 7


def test_a_higher_score_never_means_a_shorter_answer():
    rng = numpy.random.default_rng(3)
    scores = rng.normal(size=200)
    buckets = rng.permutation(numpy.arange(200) % 5)  # says nothing: the means are out of order
    slope, bias = _discriminant(scores, buckets, 5)
    logits = numpy.linspace(-3, 3, 50)[:, None] * slope + bias
    shares = numpy.exp(logits - logits.max(axis=1, keepdims=True))
    expected = (shares / shares.sum(axis=1, keepdims=True)) @ numpy.arange(5)
    assert (numpy.diff(expected) >= -1e-12).all()
