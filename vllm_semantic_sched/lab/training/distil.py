"""Trains the instant reader to give the probabilities of the network (knowledge distillation)."""

from collections.abc import Sequence
from pathlib import Path

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.predict.instant import DAMPING, FeatureReader, InstantTable
from vllm_semantic_sched.predict.model import TextPredictor

_EPOCHS = 6
_LEAST_STEPS = 400
_BATCH = 512
_RATE = 0.02
_LENGTH_WEIGHT = 0.5
_TEXTS_PER_CALL = 2048


def distil(
    network: Path,
    texts: Sequence[str],
    output: Path,
    *,
    seed: int,
    start: InstantTable | None = None,
) -> None:
    """Train the instant reader of the network in the folder `network` on its predictions of
    `texts`, drawn in an order by `seed`, and write the table to `output`. It starts from the table
    `start`, if that has the same outputs, else from zero."""
    predictor = TextPredictor.load(str(network), torch.get_num_threads())
    targets: list[Prediction] = []
    for first in range(0, len(texts), _TEXTS_PER_CALL):
        targets += predictor.predict(texts[first : first + _TEXTS_PER_CALL])
    features = FeatureReader.load(network)
    output.mkdir(parents=True, exist_ok=True)
    fit_table(features, texts, targets, seed=seed, start=start).save(output)


def renewed(table: InstantTable, levels: int | None, buckets: int | None) -> InstantTable:
    """`table` with zeros for the heads that begin anew, given their number of outputs; None for a
    head that stays."""
    heads = []
    for old, count in ((slice(0, table.levels), levels), (slice(table.levels, None), buckets)):
        weights = numpy.vstack((table.rows[:, old], table.bias[old]))
        kept = weights if count is None else numpy.zeros((len(weights), count), numpy.float32)
        heads.append(kept)
    both = numpy.hstack(heads)
    return InstantTable(both[:-1], both[-1], heads[0].shape[1])


def fit_table(
    features: FeatureReader,
    texts: Sequence[str],
    targets: Sequence[Prediction],
    *,
    seed: int,
    start: InstantTable | None = None,
) -> InstantTable:
    """The table whose probabilities are closest to `targets`, by cross-entropy of both heads."""
    bags = [features.features(features.cut(text)) for text in texts]
    levels = torch.tensor([target.urgency for target in targets])
    lengths = torch.tensor([target.length or () for target in targets])
    outputs = levels.shape[1] + lengths.shape[1]
    rows = torch.zeros(features.rows, outputs)
    bias = torch.zeros(outputs)
    if start is not None and start.rows.shape == rows.shape and start.levels == levels.shape[1]:
        rows = torch.from_numpy(start.rows.copy())
        bias = torch.from_numpy(start.bias.copy())
    weights = [rows.requires_grad_(), bias.requires_grad_()]
    optimizer = torch.optim.Adam(weights, lr=_RATE, betas=(0.9, 0.99))
    rng = numpy.random.default_rng(seed)
    batch = min(_BATCH, max(16, len(texts) // 100))
    epochs = max(_EPOCHS, -(-_LEAST_STEPS * batch // len(texts)))
    steps = epochs * -(-len(texts) // batch)
    step = 0
    for _ in range(epochs):
        order = rng.permutation(len(texts))
        for first in range(0, len(order), batch):
            chosen = order[first : first + batch]
            logits = _logits([bags[place] for place in chosen], rows, bias)
            urgency, length = logits.split([levels.shape[1], lengths.shape[1]], dim=1)
            loss = functional.cross_entropy(urgency, levels[chosen])
            if lengths.shape[1]:
                loss = loss + _LENGTH_WEIGHT * functional.cross_entropy(length, lengths[chosen])
            optimizer.zero_grad()
            loss.backward()
            for group in optimizer.param_groups:
                group["lr"] = _RATE * (1 - step / steps)
            optimizer.step()
            step += 1
    return InstantTable(rows.detach().numpy(), bias.detach().numpy(), levels.shape[1])


def _logits(bags: Sequence[NDArray[numpy.int64]], rows: Tensor, bias: Tensor) -> Tensor:
    """Logits of texts with these features: (texts, outputs)."""
    counts = torch.tensor([len(bag) for bag in bags])
    offsets = torch.cat((torch.zeros(1, dtype=torch.long), counts.cumsum(0)[:-1]))
    places = torch.from_numpy(numpy.concatenate(bags))
    sums = functional.embedding_bag(places, rows, offsets, mode="sum")
    return sums / counts.clamp(min=1).float().pow(DAMPING)[:, None] + bias
