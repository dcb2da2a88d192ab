"""The model that training starts from, and new heads for it."""

import re
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from torch import Tensor
from transformers import AutoTokenizer, BertModel, DistilBertConfig

from vllm_semantic_sched.policy.facts.prediction import LengthBuckets
from vllm_semantic_sched.predict import SHIPPED_WEIGHTS, URGENCY_LEVELS, weights_file
from vllm_semantic_sched.predict.network import UrgencyLengthClassifier
from vllm_semantic_sched.predict.text import WindowTokenizer
from vllm_semantic_sched.predict.weights import load_network
from vllm_semantic_sched.predict.window import DEFAULT_WINDOW

_BUCKETS = 9
_LAYER = re.compile(r"encoder\.layer\.(\d+)\.")


def load_base(name: str) -> tuple[Path, UrgencyLengthClassifier, WindowTokenizer]:
    """The tokenizer's folder, the network and the tokenizer that training starts from.

    Args:
        name: `shipped`, or a folder that `semsched train` wrote.

    Raises:
        FileNotFoundError: `name` is neither.
    """
    folder = base_folder(name)
    tokenizer = WindowTokenizer(AutoTokenizer.from_pretrained(folder), DEFAULT_WINDOW)
    return folder, load_network(folder), tokenizer


def base_folder(name: str) -> Path:
    """The folder of a stored network: `shipped`, or one that `semsched train` wrote.

    Raises:
        FileNotFoundError: it holds no network.
    """
    folder = SHIPPED_WEIGHTS if name == "shipped" else Path(name)
    if weights_file(folder) is None:
        raise FileNotFoundError(
            f"--base {name}: not shipped, or a folder that `semsched train` wrote"
        )
    return folder


def has_heads(network: UrgencyLengthClassifier) -> bool:
    """Whether the heads were trained: a bare encoder has one length bucket only."""
    return bool(network.config.length_bucket_edges)


def set_length_buckets(
    network: UrgencyLengthClassifier,
    lengths: Sequence[int],
    head: Literal["deep", "linear"] = "deep",
) -> None:
    """Give the network a new length head, for buckets at the quantiles of `lengths` (tokens)."""
    buckets = length_buckets(lengths, _BUCKETS)
    network.config.length_bucket_edges = list(buckets.edges)
    network.config.length_bucket_means = list(buckets.means)
    network.make_length_head(head)


def set_level_names(network: UrgencyLengthClassifier, names: Sequence[str]) -> None:
    """Store the names of the urgency levels, level 0 first, in the network's configuration."""
    network.config.id2label = dict(enumerate(names))
    network.config.label2id = {name: level for level, name in enumerate(names)}


def length_buckets(lengths: Sequence[int], count: int) -> LengthBuckets:
    """At most `count` buckets cut at quantiles of `lengths` in tokens (S3, Jin et al. 2023).

    Raises ValueError if there are no lengths.
    """
    if not lengths:
        raise ValueError("no lengths to make buckets of")
    ordered = sorted(lengths)
    quantiles = {ordered[len(ordered) * part // count] for part in range(1, count)}
    edges = tuple(sorted(edge for edge in quantiles if edge > ordered[0]))
    members: list[list[int]] = [[] for _ in range(len(edges) + 1)]
    for length in ordered:
        members[bucket_of(length, edges)].append(length)
    return LengthBuckets(edges, tuple(round(sum(part) / len(part), 1) for part in members))


def bucket_of(length: int, edges: Sequence[int]) -> int:
    """The bucket that `length` tokens fall into, given the increasing inner edges."""
    return bisect_right(edges, length)


def distilbert_from_bert(source: BertModel, layers: Sequence[int]) -> UrgencyLengthClassifier:
    """A network with random heads whose encoder is these layers of a BERT, in this order.

    DistilBERT is BERT without token types, so row 0 of the token-type table, which BERT adds
    everywhere, is added to the position table. With all layers both compute the same.
    """
    config = DistilBertConfig(
        vocab_size=source.config.vocab_size,
        max_position_embeddings=source.config.max_position_embeddings,
        n_layers=len(layers),
        n_heads=source.config.num_attention_heads,
        dim=source.config.hidden_size,
        hidden_dim=source.config.intermediate_size,
        activation=source.config.hidden_act,
        pad_token_id=source.config.pad_token_id,
        num_labels=URGENCY_LEVELS,
        length_bucket_edges=[],
        length_bucket_means=[20.0],  # one bucket until `set_length_buckets` replaces it
        window=DEFAULT_WINDOW,
        temperature=1.0,
        length_temperature=1.0,
    )
    network = UrgencyLengthClassifier(config)
    network.distilbert.load_state_dict(_distilbert_state(source.state_dict(), layers))
    return network


_RENAMED = (
    ("encoder.layer", "transformer.layer"),
    ("attention.self.query", "attention.q_lin"),
    ("attention.self.key", "attention.k_lin"),
    ("attention.self.value", "attention.v_lin"),
    ("attention.output.dense", "attention.out_lin"),
    ("attention.output.LayerNorm", "sa_layer_norm"),
    ("intermediate.dense", "ffn.lin1"),
    ("output.dense", "ffn.lin2"),
    ("output.LayerNorm", "output_layer_norm"),
)


def _distilbert_state(bert: dict[str, Tensor], layers: Sequence[int]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for name, value in bert.items():
        if name.startswith("pooler.") or name.endswith(("position_ids", "token_type_ids")):
            continue
        layer = _LAYER.match(name)
        if layer and int(layer[1]) not in layers:
            continue
        if layer:
            place = layers.index(int(layer[1]))
            name = f"encoder.layer.{place}.{name[layer.end() :]}"
        for old, new in _RENAMED:
            name = name.replace(old, new)
        state[name] = value
    token_types = state.pop("embeddings.token_type_embeddings.weight")
    positions = "embeddings.position_embeddings.weight"
    state[positions] = state[positions] + token_types[0]
    return state
