"""The model that training starts from, and new heads for it."""

import shutil
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

from transformers import AutoTokenizer

from vllm_semantic_sched.lab.training.stored import Precision, save_network
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets
from vllm_semantic_sched.predict import SECOND, SHIPPED_WEIGHTS, weights_file
from vllm_semantic_sched.predict.instant import Glance
from vllm_semantic_sched.predict.model import WindowTokenizer
from vllm_semantic_sched.predict.network import UrgencyLengthClassifier
from vllm_semantic_sched.predict.weights import load_network

_BUCKETS = 9


class Model(NamedTuple):
    """A network in training, its tokenizer, and the folder with the tokenizer's files."""

    network: UrgencyLengthClassifier
    tokenizer: WindowTokenizer
    folder: Path

    @property
    def has_heads(self) -> bool:
        """Whether the heads were trained: a bare encoder has one length bucket only."""
        return bool(self.network.config.length_bucket_edges)

    def save(self, folder: Path, precision: Precision = "int8", keeps_levels: bool = False) -> None:
        """Write network and tokenizer to `folder`, and with `keeps_levels` the second network."""
        save_network(self.network, self.folder, folder, precision)
        source = self.folder / SECOND
        target = folder / SECOND
        if not keeps_levels:
            shutil.rmtree(target, ignore_errors=True)
        elif source.is_dir() and source != target:
            shutil.copytree(source, target, dirs_exist_ok=True)


def load_base(name: str) -> Model:
    """The model that training starts from, see `base_folder`."""
    folder = base_folder(name)
    return Model(load_network(folder), load_tokenizer(folder), folder)


def load_tokenizer(folder: Path) -> WindowTokenizer:
    """The tokenizer whose files are in a model's folder."""
    return WindowTokenizer(AutoTokenizer.from_pretrained(folder), glance=Glance.load(folder))


def base_folder(name: str) -> Path:
    """The folder of a stored network: `shipped`, or one that `semsched train` wrote;
    FileNotFoundError if it holds no network."""
    folder = SHIPPED_WEIGHTS if name == "shipped" else Path(name)
    if weights_file(folder) is None:
        raise FileNotFoundError(f"--base {name}: not shipped, or a folder of `semsched train`")
    return folder


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
    """At most `count` buckets cut at quantiles of `lengths` in tokens (S3, Jin et al. 2023);
    ValueError without lengths."""
    if not lengths:
        raise ValueError("no lengths to make buckets of")
    ordered = sorted(lengths)
    quantiles = {ordered[len(ordered) * part // count] for part in range(1, count)}
    edges = tuple(sorted(quantiles - {ordered[0]}))
    members = groupby(ordered, partial(bisect_right, edges))
    return LengthBuckets(edges, tuple(round(fmean(part), 1) for _, part in members))
