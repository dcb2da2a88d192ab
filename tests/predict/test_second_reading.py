"""A second network reads doubtful texts, and the geometric mean of both counts."""

import pytest
import torch
from transformers import DistilBertConfig, PreTrainedTokenizerFast

from vllm_semantic_sched.lab.training.stored import save_network
from vllm_semantic_sched.predict import SECOND, SHIPPED_WEIGHTS, model_hash
from vllm_semantic_sched.predict.model import TextPredictor, WindowTokenizer, is_doubtful
from vllm_semantic_sched.predict.network import UrgencyLengthClassifier
from vllm_semantic_sched.predict.weights import load_network, load_second

CALM, SURE, ALARMED = (
    (0.02, 0.01, 0.0, 0.07, 0.9),
    (0.001, 0.001, 0, 0.1, 0.898),
    (0.8, 0.2, 0, 0, 0),
)


@pytest.fixture
def tokenizer():
    file = str(SHIPPED_WEIGHTS / "tokenizer.json")
    return WindowTokenizer(PreTrainedTokenizerFast(tokenizer_file=file, pad_token="<pad>"))


def network_of(layers: int) -> UrgencyLengthClassifier:
    shape = {"vocab_size": 60_000, "dim": 16, "hidden_dim": 32, "n_heads": 2, "num_labels": 5}
    buckets = {"length_bucket_edges": [10, 20], "length_bucket_means": [5.0, 15.0, 40.0]}
    return UrgencyLengthClassifier(DistilBertConfig(**shape, **buckets, n_layers=layers)).eval()


def test_only_doubtful_texts_are_read_again_and_the_mean_counts(tokenizer) -> None:
    (doubtful,) = tokenizer.encode(["he fell"])
    read: list[list[int]] = []

    def first(ids, mask):
        rows = [CALM if row[: len(doubtful)].tolist() == doubtful else SURE for row in ids]
        return torch.tensor(rows).clamp(min=1e-9).log(), None

    def second(ids, mask):
        read.extend(ids.tolist())
        return torch.tensor([ALARMED] * len(ids)).clamp(min=1e-9).log(), None

    predictor = TextPredictor(first, tokenizer, 5, None, _second=second)
    calm, alarmed = predictor.predict(["what is rain", "he fell"])
    assert read == [doubtful]
    assert calm.urgency == pytest.approx(SURE, abs=1e-4)
    # Geometric: one that is sure does not outvote the other.
    means = [one**0.4 * other**0.6 for one, other in zip(CALM, ALARMED, strict=True)]
    assert alarmed.urgency == pytest.approx([mean / sum(means) for mean in means], abs=1e-3)


@pytest.mark.parametrize(
    ("urgency", "doubtful"),
    [
        (CALM, True),
        (SURE, False),
        ((0.7, 0.1, 0.1, 0.05, 0.05), True),
        ((0.97, 0.02, 0.005, 0.003, 0.002), False),
        ((0.05, 0.15, 0.5, 0.25, 0.05), False),  # a visit of which little is known
    ],
)
def test_doubt_is_about_both_ends_of_the_levels(urgency, doubtful) -> None:
    assert is_doubtful(urgency) == doubtful


def test_second_network_shares_embeddings_of_the_first(tmp_path) -> None:
    torch.manual_seed(0)
    first, second = network_of(1), network_of(2)
    second.distilbert.embeddings = first.distilbert.embeddings
    save_network(first, SHIPPED_WEIGHTS, tmp_path)
    alone = model_hash(str(tmp_path))
    assert load_second(tmp_path, first) is None
    save_network(second, None, tmp_path / SECOND)
    assert (tmp_path / SECOND / "model.int8.safetensors").stat().st_size < 50_000
    both = model_hash(str(tmp_path))
    assert both != alone
    loaded = load_network(tmp_path)
    again = load_second(tmp_path, loaded)
    assert again.distilbert.embeddings is loaded.distilbert.embeddings
    ids = torch.tensor([[0, 900, 12_000, 2]])
    with torch.inference_mode():
        for one, other in zip(second(ids, ids > -1), again(ids, ids > -1), strict=True):
            assert torch.allclose(one, other, atol=0.05)
    config = tmp_path / SECOND / "config.json"
    config.write_text(config.read_text().replace('"n_layers": 2', '"n_layers": 3'))
    assert model_hash(str(tmp_path)) not in (alone, both)
