"""The neural network: one DistilBERT encoder with an urgency head and a length head."""

from typing import Literal

import torch
from torch import Tensor, nn
from transformers import DistilBertConfig, DistilBertForSequenceClassification


class UrgencyLengthClassifier(DistilBertForSequenceClassification):
    """A DistilBERT sequence classifier for urgency with a second head for output length.

    The configuration's `num_labels` is the number of urgency levels and its `length_bucket_means`
    has one entry per length bucket. The length head reads the mean of the last hidden states over
    real tokens, since the encoder it starts from was pretrained for mean pooling; so does the
    urgency head unless the configuration's `pooling` is "attention": then it reads a weighted mean
    with weights of its own, or a few words about an emergency would be lost in a long text.
    """

    def __init__(self, config: DistilBertConfig) -> None:
        super().__init__(config)
        self.length_pre_classifier = nn.Linear(config.dim, config.dim)
        self.length_classifier = nn.Linear(config.dim, len(config.length_bucket_means))
        if getattr(config, "pooling", "mean") == "attention":
            self.add_attention()
        self.post_init()

    def add_attention(self) -> None:
        """Give the urgency head weights of its own for the tokens, at first all the same, unless
        it has them."""
        if hasattr(self, "token_weight"):
            return
        self.config.pooling = "attention"
        self.token_weight = nn.Linear(self.config.dim, 1, bias=False)
        nn.init.zeros_(self.token_weight.weight)

    def head(self, name: Literal["urgency", "length"]) -> nn.ModuleList:
        """The layers that belong to one head alone."""
        if name == "urgency":
            own = (self.pre_classifier, self.classifier, getattr(self, "token_weight", None))
            return nn.ModuleList(one for one in own if one is not None)
        return nn.ModuleList((self.length_pre_classifier, self.length_classifier))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of both heads: (batch, levels) and (batch, buckets).

        `input_ids` and `attention_mask` are (batch, tokens) integers; padding has mask 0.
        """
        states = self.distilbert(input_ids, attention_mask=attention_mask).last_hidden_state
        states = states.float()  # whatever the encoder computes in, the mean is exact
        mask = attention_mask.unsqueeze(-1).float()
        pooled = (states * mask).sum(1) / mask.sum(1).clamp(min=1.0)
        urgency = torch.relu(self.pre_classifier(self._weighted(states, mask, pooled)))
        length = torch.relu(self.length_pre_classifier(pooled))
        return (
            self.classifier(self.dropout(urgency)),
            self.length_classifier(self.dropout(length)),
        )

    def _weighted(self, states: Tensor, mask: Tensor, mean: Tensor) -> Tensor:
        """What the urgency head reads of the states (batch, tokens, dim): (batch, dim)."""
        if not hasattr(self, "token_weight"):
            return mean
        weights = self.token_weight(states).float().masked_fill(mask == 0, -torch.inf)
        return (states * torch.softmax(weights, dim=1)).sum(1)


def has_bfloat16() -> bool:
    """Whether this processor multiplies in bfloat16; emulated it is far slower than fp32."""
    # torch has no public name for this.
    return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())
