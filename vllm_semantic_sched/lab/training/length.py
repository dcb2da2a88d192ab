"""Fits the length head to output lengths, in seconds and without touching the rest of the network.

A few hundred or thousand answers are too few to train a network on, and their lengths depend on
words ("list", "briefly") more than on meaning. So ridge regression predicts the logarithm of the
length from the encoder's mean state and the words (Cheng et al., "Wide & Deep Learning", 2016). A
discriminant with one common variance, fitted to texts that the regression had not seen, turns its
score into logits of the length buckets. The instant reader gets a regression on its own words.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from scipy import sparse
from sklearn.linear_model import Ridge
from sklearn.model_selection import KFold, cross_val_predict
from tqdm import tqdm

from vllm_semantic_sched.lab.evaluation.examples import Example
from vllm_semantic_sched.lab.training.base import Model, load_base, set_length_buckets
from vllm_semantic_sched.lab.training.fit import Options
from vllm_semantic_sched.lab.training.stored import Precision
from vllm_semantic_sched.predict import WEIGHTS_FILES
from vllm_semantic_sched.predict.instant import DAMPING, FeatureReader, InstantTable
from vllm_semantic_sched.predict.network import UrgencyLengthClassifier

_TEXTS_PER_PASS = 32
_STRENGTHS = (1.0, 2.0, 4.0, 8.0, 16.0)  # of the regression's penalty; the best on unseen parts
_PARTS = 5

Floats = NDArray[numpy.float64]
Ints = NDArray[numpy.int64]


class LengthHead(NamedTuple):
    """Logits of b buckets from k features: (features @ weights + offset) * slope + bias."""

    weights: Floats
    offset: float
    slope: Floats
    bias: Floats


def fit_length_head(options: Options, training: Sequence[Example]) -> None:
    """Write to `options.output` the base with a length head, also of its instant reader, fitted to
    the examples' `output_tokens`; the levels stay."""
    torch.set_num_threads(options.threads)
    model = load_base(options.base)
    network = model.network
    folder = model.folder
    instant = InstantTable.load(folder)  # before a model in the same folder replaces it
    texts = [example.text for example in training]
    lengths = [example.output_tokens or 1 for example in training]
    set_length_buckets(network, lengths, "linear")
    network.config.length_temperature = 1.0
    edges = network.config.length_bucket_edges
    words, states = _network_features(model, texts)
    spread = numpy.maximum(states.std(axis=0), 1e-6) * numpy.sqrt(states.shape[1])
    scale = numpy.concatenate((_word_scale(words), 1 / spread))
    both = sparse.hstack((words, sparse.csr_matrix(states))).tocsr()
    _set_head(network, _fit(both, scale, lengths, edges, options.seed))
    # The encoder is as it was, so what it was stored in still holds it.
    precision: Precision = "int8" if (folder / WEIGHTS_FILES["int8"]).is_file() else "fp16"
    model.save(options.output, precision, keeps_levels=True)
    if instant is None:
        return
    features = FeatureReader.load(folder)
    bags = _bags([features.features(features.cut(text)) for text in texts], features.rows, DAMPING)
    head = _fit(bags, _word_scale(bags), lengths, edges, options.seed)
    _renewed(instant, head).save(options.output)


def _network_features(model: Model, texts: Sequence[str]) -> tuple[Any, Floats]:
    """What the linear head reads of each text: a sparse (texts, wordpieces) and (texts, dim)."""
    network, tokenizer, _ = model
    rows = tokenizer.encode(texts)
    means = numpy.empty((len(texts), network.config.dim))
    order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
    network.eval()
    with torch.inference_mode(), tqdm(desc="texts read", mininterval=1) as bar:
        for start in range(0, len(order), _TEXTS_PER_PASS):
            part = order[start : start + _TEXTS_PER_PASS]
            ids, mask = tokenizer.pad([rows[place] for place in part])
            _, mean = network.states(ids, mask)
            means[part] = mean.numpy()
            bar.update(len(part))
    return _bags(rows, network.config.vocab_size, 0.5), means


def _bags(rows: Sequence[Sequence[int] | Ints], columns: int, damping: float) -> Any:
    """Sparse (texts, columns): how often each occurs, over (places in the text) ** damping."""
    counts = numpy.array([len(row) for row in rows])
    values = numpy.repeat(1.0 / numpy.maximum(1, counts) ** damping, counts)
    ends = numpy.concatenate(([0], counts.cumsum()))
    places = numpy.concatenate([numpy.asarray(row, dtype=numpy.int64) for row in rows])
    bags = sparse.csr_matrix((values, places, ends), shape=(len(rows), columns))
    bags.sum_duplicates()
    return bags


def _word_scale(bags: Any) -> Floats:
    """Weight of each column before the penalty: rare words tell more, single ones nothing. The mean
    row has norm 1."""
    texts = numpy.asarray((bags > 0).sum(axis=0)).ravel()
    scale = numpy.where(texts > 1, 1 + numpy.log((1 + bags.shape[0]) / (1 + texts)), 0.0)
    squares = bags.multiply(bags) @ numpy.square(scale)
    return numpy.asarray(scale / max(1e-9, float(numpy.sqrt(squares).mean())))


def _fit(
    features: Any, scale: Floats, lengths: Sequence[int], edges: Sequence[int], seed: int
) -> LengthHead:
    """Ridge regression of the logarithms of `lengths` on the scaled features, of the strength that
    predicts unseen parts best, and the discriminant of the buckets."""
    features = features @ sparse.diags(scale)
    truth = numpy.log(lengths)
    folds = KFold(min(_PARTS, len(lengths)), shuffle=True, random_state=seed)
    unseen = {
        strength: cross_val_predict(Ridge(strength), features, truth, cv=folds)
        for strength in _STRENGTHS
    }
    best = min(_STRENGTHS, key=lambda strength: numpy.square(unseen[strength] - truth).mean())
    ridge = Ridge(best).fit(features, truth)
    buckets = numpy.searchsorted(edges, lengths, side="right")
    slope, bias = _discriminant(unseen[best], buckets, len(edges) + 1)
    return LengthHead(ridge.coef_ * scale, float(ridge.intercept_), slope, bias)


def _discriminant(scores: Floats, buckets: Ints, count: int) -> tuple[Floats, Floats]:
    """Slope and bias of the logits of `count` buckets over a score that is normal in each of them,
    with a mean that rises and a common variance."""
    means = numpy.array([scores[buckets == bucket].mean() for bucket in range(count)])
    variance = max(1e-6, float(numpy.square(scores - means[buckets]).mean()))
    means = numpy.maximum.accumulate(means)
    shares = numpy.bincount(buckets, minlength=count) / len(buckets)
    return means / variance, numpy.log(shares) - numpy.square(means) / (2 * variance)


def _set_head(network: UrgencyLengthClassifier, head: LengthHead) -> None:
    state = {
        "length_words": head.weights[: network.config.vocab_size],
        "length_pre_classifier.weight": head.weights[None, network.config.vocab_size :],
        "length_pre_classifier.bias": [head.offset],
        "length_classifier.weight": head.slope[:, None],
        "length_classifier.bias": head.bias,
    }
    own = network.state_dict()
    for name, value in state.items():
        own[name].copy_(torch.as_tensor(numpy.asarray(value), dtype=torch.float32))


def _renewed(table: InstantTable, head: LengthHead) -> InstantTable:
    bias = head.offset * head.slope + head.bias
    rows = numpy.hstack((table.rows[:, : table.levels], numpy.outer(head.weights, head.slope)))
    both = numpy.concatenate((table.bias[: table.levels], bias))
    return InstantTable(rows.astype(numpy.float32), both.astype(numpy.float32), table.levels)
