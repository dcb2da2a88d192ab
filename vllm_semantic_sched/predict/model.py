"""Predicts urgency level and output length of texts."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vllm_semantic_sched.policy.facts.decision import DEFAULT_DECISION, Decision, decision_of
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets, Prediction
from vllm_semantic_sched.predict import SHIPPED_WEIGHTS, URGENCY_LEVELS, buckets_of, weights_file
from vllm_semantic_sched.predict.instant import Glance
from vllm_semantic_sched.predict.network import UrgencyLengthClassifier, has_bfloat16
from vllm_semantic_sched.predict.weights import load_network, load_second
from vllm_semantic_sched.predict.window import (
    DEFAULT_WINDOW,
    chosen_places,
    cut_pieces,
    cut_text,
    said_text,
    unreadable,
)

_BATCH = 32
# Rows in a batch have at most so many times the wordpieces of its shortest, and so many more: a
# further batch costs about as much as these.
_SIMILAR = 1.3
_SPARED = 8
_GAP = "..."  # stands for what is left out of a long text
_GAPS = 4  # of these at most, as a rule
_SENTENCE_ENDS = ".!?。！？।۔؟…■;:"
# Bounds of `is_doubtful`.
_LIKELY = 0.3
_POSSIBLE = 0.01
_SECOND_WEIGHT = 0.6  # of the second network in the mean of both

# From ids and mask, both (batch, tokens), to urgency logits (batch, levels) and length logits
# (batch, buckets) or None.
_Classifier = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
_Reading = tuple[tuple[float, ...], tuple[float, ...] | None]  # probabilities of levels, buckets


class WindowTokenizer:
    """Tokenizes texts, with any tokenizer of transformers, into at most `window` ids (ValueError if
    too few): of a longer text the head, the tail and the parts between them that `glance` finds
    most urgent, in their order; without a `glance` head and tail alone. The cost of a prompt is
    bounded."""

    def __init__(
        self, tokenizer: Any, window: int = DEFAULT_WINDOW, glance: Glance | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._glance = glance
        # Found by tokenizing, which works for [CLS] ... [SEP], <s> ... </s>, and none.
        [plain] = self._ids(["a"], special=False)
        [framed] = self._ids(["a"], special=True)
        start = _index_of(plain, framed)
        self._prefix = framed[:start]
        self._suffix = framed[start + len(plain) :]
        self._room = window - len(self._prefix) - len(self._suffix)
        if self._room < 2:
            raise ValueError(f"a window of {window} tokens leaves no room for text")
        if glance is not None:
            [self._gap] = self._ids([_GAP], special=False)
            ends = tokenizer.convert_tokens_to_ids(list(_SENTENCE_ENDS))
            self._ends = numpy.array([one for one in ends if one is not None])
        self._pad = int(getattr(tokenizer, "pad_token_id", None) or 0)
        unknown = getattr(tokenizer, "unk_token_id", None)
        self.unknown = self._pad if unknown is None else int(unknown)

    def clean(self, texts: Sequence[str]) -> list[str]:
        """What of each text may be read."""
        if self._glance is None:
            return [cut_text(text, self._room) for text in texts]
        return list(map(said_text, texts))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, at most `window` of them, special tokens included."""
        return self.encode_clean(self.clean(texts))

    def encode_clean(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text that `clean` returned."""
        rows = map(self._cut, self._ids(texts, special=False)) if texts else ()
        return [[*self._prefix, *row, *self._suffix] or [self._pad] for row in rows]

    def _cut(self, row: list[int]) -> list[int]:
        """The ids of a text that are read, `_room` at most."""
        # A small window has no room for more than head and tail.
        if self._glance is None or len(row) <= self._room or self._room < DEFAULT_WINDOW // 2:
            return cut_pieces(row, self._room)
        pieces = numpy.asarray(row, dtype=numpy.int64)
        urgency = self._glance.urgency(self._glance.chances(pieces))
        is_end = numpy.isin(pieces, self._ends)
        places = chosen_places(urgency, is_end, self._room - _GAPS * len(self._gap))
        kept: list[int] = []
        before = -1
        for place in places:
            if place != before + 1:
                kept += self._gap
            kept.append(row[place])
            before = place
        return kept[: self._room]

    def part_read(self, text: str) -> str:
        """What is read of a text: the text itself if that is all."""
        [row] = self._ids(self.clean([text]), special=False)
        kept = self._cut(row)
        return text if kept == row else str(self._tokenizer.decode(kept))

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
            WindowTokenizer(
                tokenizer, int(settings.get("window", DEFAULT_WINDOW)), Glance.load(folder)
            ),
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

    def part_read(self, text: str) -> str:
        """What the network sees of a text: the text itself if that is all."""
        return self._tokenizer.part_read(text)

    def predict(self, texts: Sequence[str]) -> list[Prediction]:
        """One prediction per text, in the same order; any string is accepted."""
        read = self._tokenizer.clean(texts)
        rows = self._tokenizer.encode_clean(read)
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
        readings: dict[int, _Reading] = {}
        with torch.inference_mode():
            for batch in _batches(list(map(len, rows))):
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


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Places of rows that share a batch: of similar length, which saves padding."""
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (
            len(batch) == _BATCH or lengths[place] > _SIMILAR * lengths[batch[0]] + _SPARED
        ):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


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
    """The weighted geometric mean: a network that is sure does not outvote the other."""
    pairs = zip(first, second, strict=True)
    means = [one ** (1 - _SECOND_WEIGHT) * other**_SECOND_WEIGHT for one, other in pairs]
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
