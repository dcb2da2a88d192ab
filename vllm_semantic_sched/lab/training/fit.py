"""The training loop: both heads together, on examples that may be drawn afresh every round.

The word embeddings stay as pretrained: words that the training texts lack keep their place beside
the others. Levels and length buckets are ordered, so the loss is cross-entropy plus the squared
earth mover's distance between the cumulated distributions (Hou, Yu and Samaras, 2016). An urgency
level is one person's opinion, and the next person's is often the level beside it: a tenth of each
label goes there, or the heads would become overconfident on texts that they see many times.
"""

import math
import random
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from vllm_semantic_sched.lab.evaluation.examples import Example
from vllm_semantic_sched.lab.training.base import Model
from vllm_semantic_sched.predict.network import UrgencyLengthClassifier, has_bfloat16

_BATCH = 32
# On an accelerator: texts in a batch and rates, times these.
_LARGER = 16
_FASTER = 3.0
ENCODER_RATE = 1.2e-4
HEAD_RATE = 1e-3
# The same of a network that was trained before, which is to keep what it knows.
FURTHER_RATE = 5e-5
FURTHER_HEAD_RATE = 2e-4
# Rate of a layer over that of the layer above it: the lower ones hold what a word means in every
# language, which labels that are mostly English must not disturb.
_LAYER_DECAY = 0.85
_LENGTH_WEIGHT = 0.5
_DISTANCE_WEIGHT = 1.0
_SECOND_OPINION = 0.1
_TAUGHT = 0.5  # weight of a teacher's answers beside the labels
_LEFT_OUT = 0.05
_WARMUP = 0.06
_IGNORED = -100

LOSS_SHOWN = 50
"""Steps between two losses beside the progress bar."""


@dataclass(frozen=True)
class Options:
    """Where training starts, how long it takes, and where its result goes."""

    output: Path  # folder for the trained model
    base: str  # model to start from, see `base_folder`
    seed: int  # of weights, texts and their order
    epochs: int  # rounds over the texts
    minutes: float | None = None  # time limit
    threads: int = 1  # that torch may use


def fit(
    model: Model,
    round_examples: Callable[[int], Sequence[Example]],
    options: Options,
    *,
    encoder_rate: float = ENCODER_RATE,
    head_rate: float = HEAD_RATE,
    frozen: int = 0,
    teacher: UrgencyLengthClassifier | None = None,
    after_round: Callable[[], object] = lambda: None,
) -> None:
    """Train the network in place for the rounds of `options`, or until its minutes are over.

    Args:
        round_examples: the examples of a round, given its number; as many in every round.
        encoder_rate: learning rate of the encoder's highest layer.
        head_rate: learning rate of the heads.
        frozen: number of the encoder's lowest layers that stay as they are.
        teacher: network with the same tokenizer and heads.
        after_round: called after each complete round.
    """
    on_accelerator = torch.cuda.is_available()
    place = torch.device("cuda" if on_accelerator else "cpu")
    network, tokenizer, _ = model
    network.to(place).train()
    if teacher is not None:
        teacher.to(place).eval()
    size = _BATCH
    if on_accelerator:
        size *= _LARGER
        encoder_rate *= _FASTER
    optimizer = _optimizer(network, encoder_rate, head_rate, frozen)
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    started = time.monotonic()
    step = 0
    rounds = options.epochs
    for epoch in range(rounds):
        examples = round_examples(epoch)
        per_round = -(-len(examples) // size)
        batches = _batches(examples, model, size, options.seed + epoch)
        bar = tqdm(batches, f"round {epoch + 1}/{rounds}", per_round, mininterval=5)
        for batch in bar:
            spent = (time.monotonic() - started) / 60 / (options.minutes or math.inf)
            progress = max(step / (rounds * per_round), spent)
            if progress >= 1:
                network.to("cpu")
                return
            for group, full in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = full * min(progress / _WARMUP, (1 - progress) / (1 - _WARMUP))
            loss = _loss(
                network, [tensor.to(place) for tensor in batch], tokenizer.unknown, teacher
            )
            take_step(optimizer, loss, [*network.parameters()])
            step += 1
            if step % LOSS_SHOWN == 0:
                bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
        after_round()
    network.to("cpu")


def take_step(optimizer: torch.optim.Optimizer, loss: Tensor, weights: list[nn.Parameter]) -> None:
    """One step down the gradient of `loss`, of norm 1 at most over all weights."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    optimizer.step()
    optimizer.zero_grad()


def autocast(kind: str = "cpu") -> torch.autocast:
    """Computes in bfloat16 where the device has it; the weights stay fp32."""
    return torch.autocast(kind, torch.bfloat16, enabled=kind != "cpu" or has_bfloat16())


def average(
    network: UrgencyLengthClassifier, weights: Mapping[str, Tensor], share: float = 0.5
) -> None:
    """Move the network by `share` of the way to `weights`, another state of it: halfway between a
    model and itself fine-tuned to a few texts lies one better on such texts than either, which
    forgets less (Wortsman et al., "Robust fine-tuning of zero-shot models", 2022)."""
    own = network.state_dict()
    network.load_state_dict({name: (1 - share) * own[name] + share * weights[name] for name in own})


def _ordinal_loss(logits: Tensor, labels: Tensor, beside: float) -> Tensor:
    """Mean over the labeled rows of (rows, classes), or 0; classes beside a label get `beside`."""
    known = labels != _IGNORED
    if not known.any():
        return logits.sum() * 0.0
    logits = logits[known].float()
    labels = labels[known]
    own = functional.one_hot(labels, logits.shape[1])
    distance = _earth_movers_distance(torch.softmax(logits, dim=1), own)
    targets = shared_with_neighbors(labels, logits.shape[1], beside) if beside else labels
    return functional.cross_entropy(logits, targets) + _DISTANCE_WEIGHT * distance


def shared_with_neighbors(labels: Tensor, classes: int, share: float) -> Tensor:
    """Labels as distributions (rows, classes), `share` of each in equal parts on the classes beside
    the label. There are at least two classes."""
    own = functional.one_hot(labels, classes).float()
    beside = torch.zeros_like(own)
    beside[:, 1:] += own[:, :-1]
    beside[:, :-1] += own[:, 1:]
    return (1 - share) * own + share * beside / beside.sum(dim=1, keepdim=True)


def _earth_movers_distance(own: Tensor, aim: Tensor) -> Tensor:
    """Mean over the rows of the squared distance between distributions (rows, classes)."""
    return (own.cumsum(dim=1) - aim.cumsum(dim=1)).square().sum(dim=1).mean()


def _optimizer(
    network: UrgencyLengthClassifier, encoder_rate: float, head_rate: float, frozen: int
) -> torch.optim.Optimizer:
    network.distilbert.embeddings.requires_grad_(False)
    layers = network.distilbert.transformer
    layers.requires_grad_(True)
    layers.layer[:frozen].requires_grad_(False)
    heads = [value for name, value in network.named_parameters() if "distilbert." not in name]
    groups = [{"params": heads, "lr": head_rate}]
    groups += [
        {"params": [*layer.parameters()], "lr": encoder_rate * _LAYER_DECAY**depth}
        for depth, layer in enumerate(reversed(layers.layer[frozen:]))
    ]
    return torch.optim.AdamW(groups, weight_decay=0.01, fused=True)


def batches_by_length(
    rows: Sequence[Sequence[int]], size: int, rng: random.Random
) -> list[list[int]]:
    """Places of rows of similar length, in random order: little padding, no order effects."""
    order = sorted(range(len(rows)), key=lambda place: (len(rows[place]), rng.random()))
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    rng.shuffle(batches)
    return batches


def _batches(
    examples: Sequence[Example], model: Model, size: int, seed: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Ids and mask (texts, tokens), level and length bucket (texts,) of each batch."""
    edges = model.network.config.length_bucket_edges
    rows = model.tokenizer.encode([example.text for example in examples])
    for batch in batches_by_length(rows, size, random.Random(seed)):
        chosen = [examples[place] for place in batch]
        levels = [_IGNORED if example.level is None else example.level for example in chosen]
        buckets = [length_bucket(example, edges) for example in chosen]
        lengths = [_IGNORED if bucket is None else bucket for bucket in buckets]
        ids, mask = model.tokenizer.pad([rows[place] for place in batch])
        yield ids, mask, torch.tensor(levels), torch.tensor(lengths)


def length_bucket(example: Example, edges: Sequence[int]) -> int | None:
    """The bucket of the example's length, given the inner edges; None without a length."""
    return None if example.output_tokens is None else bisect_right(edges, example.output_tokens)


def _loss(
    network: UrgencyLengthClassifier,
    batch: Sequence[Tensor],
    unknown: int,
    teacher: UrgencyLengthClassifier | None,
) -> Tensor:
    ids, mask, levels, lengths = batch
    gone = (torch.rand(ids.shape, device=ids.device) < _LEFT_OUT) & (mask > 0)
    gone[:, 0] = False  # the first token stands for no word
    with autocast(ids.device.type):
        urgency, length = network(ids.masked_fill(gone, unknown), mask)
    loss = _ordinal_loss(urgency, levels, _SECOND_OPINION)
    loss = loss + _LENGTH_WEIGHT * _ordinal_loss(length, lengths, 0.0)
    if teacher is None:
        return loss
    with torch.no_grad(), autocast(ids.device.type):
        answers, sizes = teacher(ids, mask)
    taught = taught_loss(urgency, answers) + _LENGTH_WEIGHT * taught_loss(length, sizes)
    return (1 - _TAUGHT) * loss + _TAUGHT * taught


def taught_loss(logits: Tensor, answers: Tensor) -> Tensor:
    """Mean over the rows of (rows, classes) of the divergence from a teacher's distribution, plus
    the squared earth mover's distance to it. `answers`: the teacher's logits."""
    own = torch.log_softmax(logits.float(), dim=1)
    aim = torch.log_softmax(answers.float(), dim=1)
    distance = _earth_movers_distance(own.exp(), aim.exp())
    divergence = functional.kl_div(own, aim, reduction="batchmean", log_target=True)
    return divergence + _DISTANCE_WEIGHT * distance
