"""The training loop: both heads together, on texts rendered afresh every round.

A text that has only a level or only a length contributes to one of the heads. The word
embeddings stay as pretrained: they are half of all parameters, and words that the training
texts lack must keep their place beside those they do not lack.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from vllm_semantic_sched.predict.buckets import bucket_of
from vllm_semantic_sched.predict.data import Example, Sources, training_round
from vllm_semantic_sched.predict.network import UrgencyLengthClassifier
from vllm_semantic_sched.predict.text import WindowTokenizer

_BATCH = 32
_ENCODER_RATE = 1.2e-4
_HEAD_RATE = 1e-3
_LENGTH_WEIGHT = 0.4
_WARMUP = 0.06
_IGNORED = -100


def fit(
    network: UrgencyLengthClassifier,
    tokenizer: WindowTokenizer,
    sources: Sources,
    *,
    seed: int,
    epochs: int,
    minutes: float | None = None,
    scale: float = 1.0,
    after_round: Callable[[], None] = lambda: None,
) -> None:
    """Train `network` in place for `epochs` rounds, or until `minutes` are over.

    The result depends on the arguments alone, except where `minutes` cuts it short.
    """
    network.distilbert.embeddings.requires_grad_(False)
    optimizer = torch.optim.AdamW(_parameter_groups(network), weight_decay=0.01, fused=True)
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    started = time.monotonic()
    network.train()
    step = 0
    for epoch in range(epochs):
        examples = training_round(sources, seed * 1000 + epoch, scale)
        steps = epochs * -(-len(examples) // _BATCH)
        batches = tqdm(
            _batches(examples, tokenizer, network.config.length_bucket_edges, seed + epoch),
            desc=f"round {epoch + 1}/{epochs}",
            total=steps // epochs,
            mininterval=5,
        )
        for ids, mask, levels, lengths in batches:
            progress = step / steps
            if minutes:
                progress = max(progress, (time.monotonic() - started) / 60 / minutes)
                if progress >= 1:
                    return
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * min(progress / _WARMUP, (1 - progress) / (1 - _WARMUP))
            loss = _loss(network, ids, mask, levels, lengths)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 50 == 0:
                batches.set_postfix(loss=f"{loss.item():.3f}")
        after_round()


def _loss(
    network: UrgencyLengthClassifier, ids: Tensor, mask: Tensor, levels: Tensor, lengths: Tensor
) -> Tensor:
    # bfloat16 halves the time where the processor has it; the weights stay fp32.
    with torch.autocast("cpu", torch.bfloat16):
        urgency, length = network(ids, mask)
    return _masked_cross_entropy(urgency, levels) + _LENGTH_WEIGHT * _masked_cross_entropy(
        length, lengths
    )


def _masked_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the labelled rows; 0 if there is none."""
    known = int((labels != _IGNORED).sum())
    total = functional.cross_entropy(logits.float(), labels, ignore_index=_IGNORED, reduction="sum")
    return total / max(1, known)


def _parameter_groups(network: UrgencyLengthClassifier) -> list[dict[str, Any]]:
    encoder = [value for value in network.distilbert.parameters() if value.requires_grad]
    heads = [value for name, value in network.named_parameters() if "distilbert." not in name]
    return [{"params": encoder, "lr": _ENCODER_RATE}, {"params": heads, "lr": _HEAD_RATE}]


def _batches(
    examples: Sequence[Example], tokenizer: WindowTokenizer, edges: Sequence[int], seed: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Batches of similar text length, in random order: little padding, no order effects."""
    rng = random.Random(seed)
    rows = tokenizer.encode([example.text for example in examples])
    order = sorted(range(len(rows)), key=lambda at: (len(rows[at]), rng.random()))
    batches = [order[at : at + _BATCH] for at in range(0, len(order), _BATCH)]
    rng.shuffle(batches)
    for batch in batches:
        ids, mask = tokenizer.pad([rows[at] for at in batch])
        chosen = [examples[at] for at in batch]
        levels = [_IGNORED if one.level is None else one.level for one in chosen]
        lengths = [
            _IGNORED if one.output_tokens is None else bucket_of(one.output_tokens, edges)
            for one in chosen
        ]
        yield ids, mask, torch.tensor(levels), torch.tensor(lengths)
