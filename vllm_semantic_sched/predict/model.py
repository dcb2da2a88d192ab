"""Predicts urgency level and output length of texts."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vllm_semantic_sched.policy.facts.decision import DEFAULT_DECISION, Decision, decision_of
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets, Prediction
from vllm_semantic_sched.predict import SHIPPED_WEIGHTS, URGENCY_LEVELS, buckets_of, weights_file
from vllm_semantic_sched.predict.network import UrgencyLengthClassifier, has_bfloat16
from vllm_semantic_sched.predict.weights import load_network, load_second
from vllm_semantic_sched.predict.window import DEFAULT_WINDOW, cut_pieces, cut_text, unreadable

_BATCH = 32
# Chosen by validation and test texts. Bounds of `is_doubtful`:
_LIKELY = 0.3
_POSSIBLE = 0.01
# The second network's weight in `_mean`, where it is more and where it is less urgent:
_RAISING = 0.8
_LOWERING = 0.65

# From ids and mask, both (batch, tokens), to urgency logits (batch, levels) and length logits
# (batch, buckets) or None.
_Classifier = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
_Reading = tuple[tuple[float, ...], tuple[float, ...] | None]  # probabilities of levels, buckets


class WindowTokenizer:
    """Tokenizes texts, with any tokenizer of transformers, into at most `window` ids (ValueError if
    too few): the head and the tail of a longer text. Characters are cut before, so that the cost of
    a prompt is bounded."""

    def __init__(self, tokenizer: Any, window: int = DEFAULT_WINDOW) -> None:
        self._tokenizer = tokenizer
        # Found by tokenizing, which works for [CLS] ... [SEP], <s> ... </s>, and none.
        [plain] = self._ids(["a"], special=False)
        [framed] = self._ids(["a"], special=True)
        start = _index_of(plain, framed)
        self._prefix = framed[:start]
        self._suffix = framed[start + len(plain) :]
        self._room = window - len(self._prefix) - len(self._suffix)
        if self._room < 2:
            raise ValueError(f"a window of {window} tokens leaves no room for text")
        self._pad = int(getattr(tokenizer, "pad_token_id", None) or 0)
        unknown = getattr(tokenizer, "unk_token_id", None)
        self.unknown = self._pad if unknown is None else int(unknown)

    def cut(self, texts: Sequence[str]) -> list[str]:
        """The part of each text that is read."""
        return [cut_text(text, self._room) for text in texts]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, at most `window` of them, special tokens included."""
        return self.encode_cut(self.cut(texts))

    def encode_cut(self, cut: list[str]) -> list[list[int]]:
        """Token ids of each text that `cut` returned."""
        rows = [cut_pieces(row, self._room) for row in self._ids(cut, special=False)] if cut else []
        return [[*self._prefix, *row, *self._suffix] or [self._pad] for row in rows]

    def pad(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Ids and mask of the rows, both (rows, longest row) int64; padding has mask 0."""
        ids = [torch.tensor(row, dtype=torch.long) for row in rows]
        masks = [torch.ones_like(row) for row in ids]
        pad = partial(pad_sequence, batch_first=True)
        return pad(ids, padding_value=self._pad), pad(masks)

    def _ids(self, texts: list[str], special: bool) -> list[list[int]]:
        encoded = self._tokenizer(texts, add_special_tokens=special, verbose=False)
        return [list(row) for row in encoded["input_ids"]]


@dataclass
class TextPredictor:
    """Predicts urgency level and output length of prompts. Not thread-safe. Made by `load`."""

    _classifier: _Classifier
    _tokenizer: WindowTokenizer
    levels: int
    length_buckets: LengthBuckets | None
    _guard: Callable[[str], str | None] = lambda text: None  # why it cannot be judged
    _second: _Classifier | None = None  # that reads doubtful texts, too
    decision: Decision = DEFAULT_DECISION  # by which its predictions become levels

    @classmethod
    def load(cls, path: str | None = None, threads: int = 1) -> Self:
        """Load the shipped model (`path` None), a folder, or a hub id.

        A folder written by `semsched train` has both heads. Anything else must be a sequence
        classifier of transformers with 2 to 5 labels (else ValueError): label i is urgency level i,
        and lengths are not predicted. FileNotFoundError if there is no such model. `threads`
        becomes torch's thread count for the whole process.
        """
        torch.set_num_threads(threads)
        folder = SHIPPED_WEIGHTS if path is None else Path(path)
        if weights_file(folder) is not None:
            return cls._from_stored(folder)
        if path is None:
            raise FileNotFoundError(f"the shipped predictor weights are missing from {folder}")
        return cls._from_transformers(path)

    @classmethod
    def _from_stored(cls, folder: Path) -> Self:
        from transformers import PreTrainedTokenizerFast

        settings = json.loads((folder / "config.json").read_text("utf-8"))
        names = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), pad_token=names["pad_token"]
        )
        network = load_network(folder)
        second = load_second(folder, network)
        return cls(
            _calibrated(network),
            WindowTokenizer(tokenizer, int(settings.get("window", DEFAULT_WINDOW))),
            levels=network.config.num_labels,
            length_buckets=buckets_of(settings),
            _guard=unreadable,
            _second=None if second is None else _calibrated(second),
            decision=decision_of(settings),
        )

    @classmethod
    def _from_transformers(cls, path: str) -> Self:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        try:
            model = AutoModelForSequenceClassification.from_pretrained(path)
            tokenizer = AutoTokenizer.from_pretrained(path)
        except OSError as error:
            raise FileNotFoundError(
                f"no sequence classifier at {path!r}: give a local folder or a hub id ({error})"
            ) from error
        labels = [str(model.config.id2label[level]) for level in range(model.config.num_labels)]
        multiple = model.config.problem_type == "multi_label_classification"
        if not 2 <= len(labels) <= URGENCY_LEVELS or multiple:
            raise ValueError(
                f"{path!r} has the labels {labels}; a predictor needs 2 to {URGENCY_LEVELS} "
                "exclusive labels, the first being the most urgent"
            )
        window = min(DEFAULT_WINDOW, int(tokenizer.model_max_length))
        model.eval()

        def urgency_only(ids: Tensor, mask: Tensor) -> tuple[Tensor, None]:
            return model(input_ids=ids, attention_mask=mask).logits, None

        return cls(
            urgency_only,
            WindowTokenizer(tokenizer, window),
            levels=len(labels),
            length_buckets=None,
            decision=decision_of(model.config.to_dict()),
        )

    def predict(self, texts: Sequence[str]) -> list[Prediction]:
        """One prediction per text, in the same order; any string is accepted."""
        read = self._tokenizer.cut(texts)
        rows = self._tokenizer.encode_cut(read)
        readings = self._read(self._classifier, rows)
        if self._second is not None:
            doubtful = [
                index for index, (urgency, _) in enumerate(readings) if is_doubtful(urgency)
            ]
            second = self._read(self._second, [rows[index] for index in doubtful])
            for index, (second_urgency, _) in zip(doubtful, second, strict=True):
                urgency, length = readings[index]
                readings[index] = _mean(urgency, second_urgency), length
        predictions = []
        for (urgency, length), text in zip(readings, read, strict=True):
            predictions.append(
                Prediction(urgency, length, unreadable=self._guard(text), decision=self.decision)
            )
        return predictions

    def _read(self, classifier: _Classifier, rows: Sequence[Sequence[int]]) -> list[_Reading]:
        # Texts of similar length share a batch, which saves padding.
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        readings: dict[int, _Reading] = {}
        with torch.inference_mode():
            for start in range(0, len(order), _BATCH):
                batch = order[start : start + _BATCH]
                ids, mask = self._tokenizer.pad([rows[index] for index in batch])
                urgency_logits, length_logits = classifier(ids, mask)
                urgencies = _probabilities(urgency_logits)
                lengths: Sequence[tuple[float, ...] | None]
                if length_logits is None:
                    lengths = [None] * len(batch)
                else:
                    lengths = _probabilities(length_logits)
                for index, urgency, length in zip(batch, urgencies, lengths, strict=True):
                    readings[index] = (urgency, length)
        return [readings[index] for index in range(len(rows))]


def _index_of(part: list[int], row: list[int]) -> int:
    """The place at which `part` first stands in `row`; 0 if nowhere."""
    for start in range(len(row)):
        if row[start : start + len(part)] == part:
            return start
    return 0


def is_doubtful(urgency: Sequence[float]) -> bool:
    """Whether a text is likely urgent (levels 0 and 1) and possibly of the last level, or the other
    way round: there a network errs most often, and two networks seldom make the same mistake."""
    urgent = sum(urgency[:2])
    last = urgency[-1]
    return max(urgent, last) > _LIKELY and min(urgent, last) > _POSSIBLE


def _mean(first: Sequence[float], second: Sequence[float]) -> tuple[float, ...]:
    """The weighted geometric mean: raising a text wrongly costs less than lowering it wrongly."""
    weight = _RAISING if sum(first[:2]) < first[-1] else _LOWERING
    means = [a ** (1 - weight) * b**weight for a, b in zip(first, second, strict=True)]
    total = sum(means)
    return tuple(mean / total for mean in means)


def _calibrated(network: UrgencyLengthClassifier) -> _Classifier:
    # In bfloat16 an encoder is more than twice as fast where the processor has such products.
    # Int8 products are no faster on full batches and move texts to other levels.
    if has_bfloat16():
        network.distilbert.to(torch.bfloat16)
    urgency_temperature = network.config.temperature
    length_temperature = network.config.length_temperature

    def classify(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        urgency, length = network(ids, mask)
        return urgency / urgency_temperature, length / length_temperature

    return classify


def _probabilities(logits: Tensor) -> list[tuple[float, ...]]:
    return list(map(tuple, torch.softmax(logits.float(), dim=1).tolist()))
