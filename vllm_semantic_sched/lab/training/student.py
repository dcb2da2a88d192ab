"""Makes a DistilBERT of half the encoder's layers that computes nearly the same.

The student starts from every second layer of the teacher and learns to reproduce its hidden states,
token by token, on text of all languages (as TinyBERT: Jiao et al., 2020). So a sentence in any
language stays near its translations while the heads learn English triage.
"""

import copy
import random
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from vllm_semantic_sched.lab.training.base import Model
from vllm_semantic_sched.lab.training.e5 import QUERY_PREFIX
from vllm_semantic_sched.lab.training.fit import (
    LOSS_SHOWN,
    Options,
    autocast,
    batches_by_length,
    take_step,
)
from vllm_semantic_sched.predict.network import UrgencyLengthClassifier

_BATCH = 48
_EPOCHS = 2
_RATE = 3e-4
_WARMUP = 0.05
_POOLED_WEIGHT = 2.0


def student_of(teacher: UrgencyLengthClassifier, count: int) -> UrgencyLengthClassifier:
    """A network of `count` layers with random heads, from evenly spaced layers of the teacher."""
    config = copy.deepcopy(teacher.config)
    config.n_layers = count
    student = UrgencyLengthClassifier(config)
    student.distilbert.embeddings.load_state_dict(teacher.distilbert.embeddings.state_dict())
    last = teacher.config.n_layers - 1
    for place, layer in enumerate(student.distilbert.transformer.layer):
        source = teacher.distilbert.transformer.layer[round(place * last / (count - 1))]
        layer.load_state_dict(source.state_dict())
    return student


def align(
    model: Model,
    teacher: UrgencyLengthClassifier,
    texts: Sequence[str],
    options: Options,
    epochs: int = _EPOCHS,
) -> None:
    """Train the layers of the model, a student, in place to reproduce the teacher's hidden states.
    The teacher sees `QUERY_PREFIX` before each text."""
    student, tokenizer, _ = model
    prefix = tokenizer.encode([QUERY_PREFIX])[0][1:-1]
    student.distilbert.embeddings.requires_grad_(False)
    weights = list(student.distilbert.transformer.parameters())
    optimizer = torch.optim.AdamW(weights, lr=_RATE, weight_decay=0.01, fused=True)
    rows = tokenizer.encode(texts)
    rng = random.Random(options.seed)
    per_epoch = -(-len(rows) // _BATCH)
    student.train()
    for epoch in range(epochs):
        batches = batches_by_length(rows, _BATCH, rng)
        bar = tqdm(batches, f"round {epoch + 1}/{epochs}", mininterval=5)
        for number, batch in enumerate(bar):
            progress = (epoch * per_epoch + number) / (epochs * per_epoch)
            rate = _RATE * min(1.0, progress / _WARMUP, (1 - progress) / (1 - _WARMUP))
            for group in optimizer.param_groups:
                group["lr"] = rate
            ids, mask = tokenizer.pad([rows[place] for place in batch])
            with autocast():
                loss = _distance(student, teacher_states(teacher, ids, mask, prefix), ids, mask)
            take_step(optimizer, loss, weights)
            if (number + 1) % LOSS_SHOWN == 0:
                bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    student.eval()


def pooled(states: Tensor, mask: Tensor) -> Tensor:
    """Mean of the states (texts, tokens, width) over real tokens: (texts, width)."""
    real = mask.unsqueeze(-1).float()
    return (states.float() * real).sum(1) / real.sum(1).clamp(min=1.0)


def teacher_states(
    teacher: UrgencyLengthClassifier, ids: Tensor, mask: Tensor, prefix: Sequence[int]
) -> list[Tensor]:
    """Hidden states of every layer (texts, tokens, width), without those of the prefix."""
    middle = torch.tensor(list(prefix), dtype=torch.long).expand(len(ids), -1)
    whole = torch.cat((ids[:, :1], middle, ids[:, 1:]), dim=1)
    seen = torch.cat((mask[:, :1], torch.ones_like(middle), mask[:, 1:]), dim=1)
    with torch.inference_mode():
        output = teacher.distilbert(whole, attention_mask=seen, output_hidden_states=True)
    kept = [0, *range(1 + len(prefix), whole.shape[1])]
    return [state[:, kept].clone() for state in output.hidden_states]


def _distance(
    student: UrgencyLengthClassifier, aims: Sequence[Tensor], ids: Tensor, mask: Tensor
) -> Tensor:
    """Mean squared difference of the states of every second layer, and of the sentence vectors.
    `aims`: the teacher's states of every layer."""
    states = student.distilbert(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    step = (len(aims) - 1) // (len(states) - 1)
    real = mask.bool()
    layers = [
        functional.mse_loss(state[real].float(), aim[real].float())
        for state, aim in zip(states[1:], aims[step::step], strict=True)
    ]
    vectors = functional.cosine_similarity(pooled(states[-1], mask), pooled(aims[-1], mask))
    # The last layer counts as much as all others together.
    return layers[-1] + sum(layers[:-1]) / (len(layers) - 1) + _POOLED_WEIGHT * (1 - vectors).mean()
