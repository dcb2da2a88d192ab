"""The neural network: one DistilBERT encoder with an urgency head and a length head."""

from typing import Literal

import torch
from torch import Tensor, nn
from transformers import DistilBertConfig, DistilBertForSequenceClassification


class UrgencyLengthClassifier(DistilBertForSequenceClassification):
    """A DistilBERT sequence classifier for urgency with a second head for output length.

    The configuration's `num_labels` is the number of urgency levels; `length_bucket_means` has one
    entry per length bucket. Both heads read the mean of the last hidden states over real tokens,
    for which the encoder was pretrained. With `pooling` "attention" the urgency head weights the
    tokens itself, or a few words about an emergency would be lost in a long text. With
    `length_head` "linear" the length head has one score, of the mean and of the words themselves,
    for all its logits: what a few hundred answers can teach.
    """

    def __init__(self, config: DistilBertConfig) -> None:
        super().__init__(config)
        self.make_length_head(getattr(config, "length_head", "deep"))
        if getattr(config, "pooling", "mean") == "attention":
            self.add_attention()
        self.post_init()

    def add_attention(self) -> None:
        """Give the urgency head its own weights of tokens, at first all the same, unless it has."""
        if hasattr(self, "token_weight"):
            return
        self.config.pooling = "attention"
        self.token_weight = nn.Linear(self.config.dim, 1, bias=False)
        nn.init.zeros_(self.token_weight.weight)

    def make_length_head(self, kind: Literal["deep", "linear"]) -> None:
        """Replace the length head by an untrained one; the linear one is of zeros."""
        dim = self.config.dim
        buckets = len(self.config.length_bucket_means)
        self.config.length_head = kind
        self.length_words = None
        if kind == "linear":
            self.length_words = nn.Parameter(torch.zeros(self.config.vocab_size))
        hidden = 1 if kind == "linear" else dim
        self.length_pre_classifier = nn.Linear(dim, hidden)
        self.length_classifier = nn.Linear(hidden, buckets)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of both heads, (batch, levels) and (batch, buckets). Ids and mask are (batch,
        tokens) integers; padding has mask 0."""
        states, mean = self.states(input_ids, attention_mask)
        pooled = mean
        if hasattr(self, "token_weight"):
            weights = self.token_weight(states).float()
            weights = weights.masked_fill(attention_mask.unsqueeze(-1) == 0, -torch.inf)
            pooled = (states * torch.softmax(weights, dim=1)).sum(1)
        urgency = self.dropout(torch.relu(self.pre_classifier(pooled)))
        length = self.length_pre_classifier(mean)
        if self.length_words is None:
            length = self.dropout(torch.relu(length))
        else:
            words = (self.length_words[input_ids] * attention_mask).sum(1)
            length = length + (words / attention_mask.sum(1).clamp(min=1).sqrt()).unsqueeze(1)
        return self.classifier(urgency), self.length_classifier(length)

    def states(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """The last hidden states (batch, tokens, dim), and their mean over real tokens."""
        states = self.distilbert(input_ids, attention_mask=attention_mask).last_hidden_state
        states = states.float()  # whatever the encoder computes in, the mean is exact
        mask = attention_mask.unsqueeze(-1).float()
        return states, (states * mask).sum(1) / mask.sum(1).clamp(min=1.0)


def has_bfloat16() -> bool:
    """Whether this processor multiplies in bfloat16; emulated it is far slower than fp32."""
    # torch has no public name for this.
    return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())
