"""Reads a text at once: a linear model over the wordpieces of the network's tokenizer, fitted to
its probabilities (`training/distil.py`). Needs neither torch nor transformers."""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from vllm_semantic_sched.policy.facts.decision import Decision
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets, Prediction
from vllm_semantic_sched.predict import SHIPPED_WEIGHTS, buckets_of
from vllm_semantic_sched.predict.window import (
    DEFAULT_WINDOW,
    PART,
    cut_pieces,
    cut_text,
    unreadable,
)

INSTANT_FILE = "instant.npz"
PAIR_ROWS = 2**16  # that pairs of neighboring wordpieces are hashed to
# Between a sum, in which a long text is sure of everything, and a mean, in which a single word
# counts for nothing in it. Best on validation texts.
DAMPING = 0.25
# Bound of each level (`Decision.bounds`) of a reading. Below a half: to start a request too late
# costs more than to start it too early, which the predictor corrects soon.
_BOUND = 0.35
_SPECIAL = 2  # of the window, [CLS] and [SEP], which say nothing here

Floats = NDArray[numpy.float32]
Ints = NDArray[numpy.int64]


@dataclass(frozen=True)
class InstantTable:
    """The weights: rows of logits, one per urgency level, then one per length bucket. A text's
    logits are the sum of the rows of its n distinct wordpieces and pairs of neighbors (by a hash)
    over n ** `DAMPING`, plus the bias."""

    rows: Floats  # (wordpieces + `PAIR_ROWS`, levels + buckets)
    bias: Floats  # (levels + buckets,)
    levels: int  # number of urgency levels

    def save(self, folder: Path) -> None:
        """Write `INSTANT_FILE`: rows as int8 with one scale per column."""
        scale = numpy.maximum(numpy.abs(self.rows).max(axis=0), 1e-6) / 127.0
        numpy.savez_compressed(
            folder / INSTANT_FILE,
            rows=numpy.round(self.rows / scale).astype(numpy.int8),
            scale=scale.astype(numpy.float32),
            bias=self.bias.astype(numpy.float32),
            levels=numpy.int64(self.levels),
        )

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """The table in `folder`; None if it has none, ValueError if the file is damaged."""
        path = folder / INSTANT_FILE
        if not path.is_file():
            return None
        try:
            with numpy.load(path) as stored:
                rows = stored["rows"].astype(numpy.float32) * stored["scale"]
                return cls(rows, stored["bias"], int(stored["levels"]))
        except (KeyError, OSError, ValueError) as error:
            raise ValueError(f"{path}: not a table of the instant reader ({error})") from error


def pairs_of(pieces: Ints, vocabulary: int) -> Ints:
    """Places of the rows of pairs of neighbors; `vocabulary`: number of wordpieces."""
    mixed = (pieces[:-1] * 1_000_003) ^ (pieces[1:] * 253_921)
    return vocabulary + (((mixed * 73_856_093) >> 13) & (PAIR_ROWS - 1))


class Glance:
    """Judges the parts of a text of any length by an `InstantTable`: a sentence has little weight
    in a long one."""

    def __init__(self, table: InstantTable) -> None:
        self._urgency = numpy.ascontiguousarray(table.rows[:, : table.levels])
        self._bias = table.bias[: table.levels]
        self._numbers = numpy.arange(table.levels, dtype=numpy.float32)

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """The one of a trained model; None if it has no `InstantTable`."""
        table = InstantTable.load(folder)
        return None if table is None else cls(table)

    def chances(self, pieces: Ints, pairs: Ints | None = None) -> Floats:
        """Probabilities of the levels of each `PART` neighboring wordpieces: (parts, levels), one
        part less than wordpieces beyond a part. Unlike in the whole, a word counts as often as it
        occurs."""
        if pairs is None:
            pairs = pairs_of(pieces, len(self._urgency) - PAIR_ROWS)
        words = self._urgency.take(pieces, axis=0)
        words[1:] += self._urgency.take(pairs, axis=0)
        sums = words.cumsum(axis=0)
        parts = sums[PART - 1 :].copy()
        parts[1:] -= sums[:-PART]
        return _softmax(self._bias + parts / (2 * PART) ** DAMPING)

    def urgency(self, chances: Floats) -> Floats:
        """How urgent each part of `chances` is: its expected level, negated."""
        return -(chances @ self._numbers)


class FeatureReader:
    """Turns texts into places of rows in an `InstantTable`."""

    def __init__(self, tokenizer: Tokenizer, window: int = DEFAULT_WINDOW) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._room = window - _SPECIAL
        self.pieces = tokenizer.get_vocab_size()
        self.rows = self.pieces + PAIR_ROWS  # of a table

    @classmethod
    def load(cls, folder: Path) -> Self:
        """The reader of a trained model."""
        settings = json.loads((folder / "config.json").read_text("utf-8"))
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return cls(tokenizer, int(settings.get("window", DEFAULT_WINDOW)))

    def cut(self, text: str) -> str:
        """The part of a text that is read; any string is accepted."""
        return cut_text(text, self._room)

    def features(self, cut: str) -> Ints:
        """Places of the distinct wordpieces and pairs of a text that `cut` returned, ascending."""
        return numpy.unique(numpy.concatenate(self.read(cut)[1:]))

    def names(self, text: str) -> dict[int, str]:
        """The wordpieces and pairs of a text by the place of their row."""
        encoding, pieces, pairs = self.read(self.cut(text))
        words = cut_pieces(encoding.tokens, self._room)
        both = [f"{word} {following}" for word, following in itertools.pairwise(words)]
        return dict(zip([*pairs.tolist(), *pieces.tolist()], [*both, *words], strict=True))

    def read(self, cut: str) -> tuple[Encoding, Ints, Ints]:
        """The encoding of a text that `cut` returned, and the places of the rows of its wordpieces
        and of their pairs, in their order."""
        # A word has at least one wordpiece, so that these have all that are read.
        words = cut_pieces(cut.split(" "), self._room)
        encoding = self._tokenizer.encode(" ".join(words), add_special_tokens=False)
        pieces = numpy.asarray(cut_pieces(encoding.ids, self._room), dtype=numpy.int64)
        return encoding, pieces, pairs_of(pieces, self.pieces)


class InstantReader:
    """Predicts urgency level and output length of one text in a fraction of a millisecond.
    Thread-safe."""

    def __init__(
        self,
        features: FeatureReader,
        table: InstantTable,
        length_buckets: LengthBuckets,
    ) -> None:
        if len(table.rows) != features.rows:
            raise ValueError(f"{len(table.rows)} rows for {features.rows} wordpieces and pairs")
        self._features, self._table = features, table
        self._glance = Glance(table)
        self.levels, self.length_buckets = table.levels, length_buckets
        self.decision = Decision(bounds=(_BOUND,) * (table.levels - 1))

    @classmethod
    def load(cls, path: str | None = None) -> Self | None:
        """The reader beside the shipped model (`path` None) or in a folder; None if there is none,
        as for a hub id. ValueError if its table does not fit the model."""
        folder = SHIPPED_WEIGHTS if path is None else Path(path)
        table = InstantTable.load(folder)
        if table is None:
            return None
        settings = json.loads((folder / "config.json").read_text("utf-8"))
        buckets = buckets_of(settings)
        if len(table.bias) != table.levels + len(buckets.means):
            raise ValueError(
                f"{folder / INSTANT_FILE}: {len(table.bias)} outputs for {table.levels} levels and "
                f"{len(buckets.means)} length buckets"
            )
        return cls(FeatureReader.load(folder), table, buckets)

    @classmethod
    def load_beside(cls, path: str | None, buckets: LengthBuckets | None) -> Self | None:
        """The reader of a predictor with these length buckets; see `load`. ValueError also if its
        length buckets are others."""
        reader = cls.load(path)
        if reader is not None and reader.length_buckets != buckets:
            raise ValueError("its length buckets are not the predictor's")
        return reader

    def read(self, text: str) -> Prediction:
        """Predict one text; any string is accepted."""
        cut = self._features.cut(text)
        _, pieces, pairs = self._features.read(cut)
        table = self._table
        places = numpy.unique(numpy.concatenate((pieces, pairs)))
        logits = table.bias + table.rows[places].sum(axis=0) / max(1, len(places)) ** DAMPING
        return Prediction(
            urgency=tuple(_softmax(logits[: self.levels]).tolist()),
            length=tuple(_softmax(logits[self.levels :]).tolist()),
            unreadable=unreadable(cut),
            part=self._urgent_part(pieces, pairs),
            decision=self.decision,
        )

    def _urgent_part(self, pieces: Ints, pairs: Ints) -> tuple[float, ...] | None:
        """Probabilities of the levels of the part with the lowest expected level; None if the text
        is no longer than a part."""
        if len(pieces) <= PART:
            return None
        chances = self._glance.chances(pieces, pairs)
        return tuple(chances[self._glance.urgency(chances).argmax()].tolist())

    def same_shape(self, other: Prediction) -> bool:
        """Whether a prediction has as many levels and length buckets as this reader's."""
        shape = self.levels, len(self._table.bias) - self.levels
        return (len(other.urgency), len(other.length or ())) == shape

    def strongest(self, text: str, level: int, count: int) -> list[tuple[str, float]]:
        """The `count` wordpieces and pairs that weigh most for or against a level, heaviest first:
        what each adds to its logit less the mean of what it adds to the others'."""
        names = self._features.names(text)
        rows = self._table.rows[list(names), : self.levels] / max(1, len(names)) ** DAMPING
        others = (rows.sum(axis=1) - rows[:, level]) / max(1, self.levels - 1)
        pairs = zip(names.values(), map(float, rows[:, level] - others), strict=True)
        return sorted(pairs, key=lambda pair: -abs(pair[1]))[:count]


def _softmax(logits: Floats) -> Floats:
    """Softmax over the last axis."""
    powers = numpy.exp(logits - logits.max(axis=-1, keepdims=True))
    chances: Floats = powers / powers.sum(axis=-1, keepdims=True)
    return chances
