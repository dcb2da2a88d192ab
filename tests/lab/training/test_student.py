"""From the packed multilingual encoder to a small student that computes nearly the same."""

import random
import struct

import numpy
import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertModel

from vllm_semantic_sched.lab.training.base import Model
from vllm_semantic_sched.lab.training.e5 import PackedEncoder, Pieces, read_encoder
from vllm_semantic_sched.lab.training.fit import Options
from vllm_semantic_sched.lab.training.student import (
    align,
    pooled,
    student_of,
    teacher_states,
)
from vllm_semantic_sched.lab.training.vocabulary import (
    SPECIAL,
    chosen_pieces,
    piece_tokenizer,
    save_tokenizer,
)
from vllm_semantic_sched.predict.model import WindowTokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyzñéыя"
WORDS = ("▁he", "▁not", "▁breath", "ing", "▁no", "▁respira", "▁он", "▁не", "▁дышит", "▁HELP")
TEXTS = (*SPECIAL, "▁", *LETTERS, *("▁" + letter for letter in LETTERS), *WORDS, "Q", "<mask>")
PIECES = Pieces(
    TEXTS,
    numpy.array([0.0] * 4 + [-9.0] * (len(TEXTS) - 4), dtype=numpy.float32)
    + numpy.array([3.0 if one in WORDS else 0.0 for one in TEXTS], dtype=numpy.float32),
    special=(0, 1, 2, 3),
)


def small_bert(layers: int = 4) -> BertModel:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(TEXTS),
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        pad_token_id=1,
        initializer_range=0.2,  # layers that do something
    )
    return BertModel(config, add_pooling_layer=False).eval()


def quantized(matrix: numpy.ndarray) -> tuple[bytes, numpy.ndarray]:
    """The 4-bit blocks of a matrix, and the values that they stand for."""
    blocks = matrix.reshape(-1, 32)
    scale = (numpy.abs(blocks).max(axis=1).clip(1e-3) / 7.0).astype("<f2")
    numbers = numpy.clip(numpy.round(blocks / scale.astype("f4")[:, None]) + 8, 0, 15).astype("u1")
    packed = numpy.empty(len(blocks), dtype=[("scale", "<f2"), ("nibbles", "u1", 16)])
    packed["scale"] = scale
    packed["nibbles"] = numbers[:, :16] | (numbers[:, 16:] << 4)
    values = (numbers.astype("f4") - 8) * scale.astype("f4")[:, None]
    return packed.tobytes(), values.reshape(matrix.shape)


SHORT_NAMES = {
    "attention.self.query": "q",
    "attention.self.key": "k",
    "attention.self.value": "v",
    "attention.output.dense": "ao",
    "attention.output.LayerNorm": "aln",
    "intermediate.dense": "fi",
    "output.dense": "fo",
    "output.LayerNorm": "oln",
}
SHORT_EMBEDDINGS = {
    "word_embeddings.weight": "emb.word",
    "position_embeddings.weight": "emb.pos",
    "token_type_embeddings.weight": "emb.type",
    "LayerNorm.weight": "emb.ln.w",
    "LayerNorm.bias": "emb.ln.b",
}


def short_name(name: str) -> str:
    if name.startswith("embeddings."):
        return SHORT_EMBEDDINGS[name.removeprefix("embeddings.")]
    _, _, layer, part = name.split(".", 3)
    part, kind = part.rsplit(".", 1)
    return f"l{layer}.{SHORT_NAMES[part]}.{kind[0]}"


def packed(bert: BertModel) -> tuple[bytes, dict[str, numpy.ndarray]]:
    """A file with the encoder, and the values that it holds."""
    config = bert.config
    data = b"E5S1" + struct.pack(
        "<I7ifi",
        1,
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.intermediate_size,
        config.vocab_size,
        config.max_position_embeddings,
        2,
        1e-12,
        32,
    )
    blob = [one.encode() for one in TEXTS]
    offsets = numpy.cumsum([0, *map(len, blob)]).astype("<u4")
    data += struct.pack("<5iQ", len(TEXTS), 0, 2, 1, 3, int(offsets[-1]))
    data += offsets.tobytes() + PIECES.scores.tobytes() + b"".join(blob)
    data += struct.pack("<iI", 1, 9) + b"x" * 9
    values, tensors = {}, {}
    for name, value in bert.state_dict().items():
        array = value.numpy()
        matrix = array.ndim == 2 and "position" not in name and "token_type" not in name
        tensors[short_name(name)], values[name] = (
            quantized(array) if matrix else (array.tobytes(), array)
        )
    names = [name.encode() for name in tensors]
    at = len(data) + 4 + sum(2 + len(name) + 21 for name in names)
    data += struct.pack("<i", len(names))
    for name, (whole, content) in zip(
        names, zip(values.values(), tensors.values(), strict=True), strict=True
    ):
        data += struct.pack("<H", len(name)) + name
        data += struct.pack("<BIQQ", 1, whole.size, at, len(content))
        at += len(content)
    return data + b"".join(tensors.values()), values


def read(folder, bert: BertModel) -> PackedEncoder:
    """The encoder out of a file, and `bert` with the values that the file holds."""
    data, values = packed(bert)
    (folder / "encoder.bin").write_bytes(data)
    bert.load_state_dict({name: torch.from_numpy(value) for name, value in values.items()})
    return read_encoder(folder / "encoder.bin")


def last_states(encoder, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return encoder(ids, attention_mask=mask).last_hidden_state[mask.bool()]


def test_packed_encoder_computes_what_bert_computes(tmp_path) -> None:
    bert = small_bert()
    encoder = read(tmp_path, bert)
    assert tuple(encoder.pieces.texts) == TEXTS and encoder.pieces.special == (0, 1, 2, 3)
    ids = torch.randint(0, len(TEXTS), (2, 21), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    whole = encoder.with_vocabulary(range(len(TEXTS))).distilbert
    assert (last_states(whole, ids, mask) - last_states(bert, ids, mask)).abs().max() < 1e-4
    part = encoder.with_vocabulary([0, 1, 2, 3, 40, 7]).distilbert
    some, same = torch.tensor([[0, 4, 5, 2]]), torch.tensor([[0, 40, 7, 2]])
    seen = torch.ones_like(some)
    assert torch.equal(last_states(part, some, seen), last_states(whole, same, seen))


def test_student_starts_from_evenly_spaced_layers(tmp_path) -> None:
    bert = small_bert(4)
    teacher = read(tmp_path, bert).with_vocabulary(range(len(TEXTS)))
    student = student_of(teacher, 2).eval()
    bert.encoder.layer = torch.nn.ModuleList([bert.encoder.layer[0], bert.encoder.layer[3]])
    ids = torch.arange(12).reshape(2, 6)
    mask = torch.ones_like(ids)
    ours = last_states(student.distilbert, ids, mask)
    assert (ours - last_states(bert, ids, mask)).abs().max() < 1e-4


def test_other_files_are_refused(tmp_path) -> None:
    (tmp_path / "other.bin").write_bytes(b"GGUF" * 10)
    with pytest.raises(ValueError, match="not a packed E5 encoder"):
        read_encoder(tmp_path / "other.bin")


def test_vocabulary_keeps_letters_and_what_each_language_needs() -> None:
    ids = chosen_pieces(
        PIECES, ["he breath"], {"es": ["no respira"], "ru": ["он не дышит"]}, size=len(TEXTS) - 6
    )
    kept = [TEXTS[at] for at in ids]
    assert tuple(kept[:4]) == SPECIAL
    assert set(LETTERS) < set(kept)
    assert {"▁he", "▁breath", "▁no", "▁он"} < set(kept)
    assert "▁HELP" not in kept and "Q" not in kept  # texts are lowercased


def test_tokenizer_lowercases_and_knows_its_special_tokens(tmp_path) -> None:
    save_tokenizer(piece_tokenizer(PIECES, range(len(TEXTS))), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.tokenize("He NOT  breathing") == ["▁he", "▁not", "▁breath", "ing"]
    assert tokenizer("ё木").input_ids[0] == 0 and tokenizer("木").input_ids == [0, 4, 3, 2]
    assert WindowTokenizer(tokenizer).encode([""]) == [[0, 2]]


def test_student_learns_what_the_teacher_computes(tmp_path) -> None:
    teacher = read(tmp_path, small_bert(4)).with_vocabulary(range(len(TEXTS)))
    save_tokenizer(piece_tokenizer(PIECES, range(len(TEXTS))), tmp_path)
    tokenizer = WindowTokenizer(AutoTokenizer.from_pretrained(tmp_path))
    rng = random.Random(0)
    texts = ["".join(rng.choices(LETTERS + "   ", k=20)) for _ in range(192)]
    prefix = tokenizer.encode(["query: "])[0][1:-1]
    student = student_of(teacher, 2)
    ids, mask = tokenizer.pad(tokenizer.encode(texts[:20]))

    def distance() -> float:
        with torch.inference_mode():
            states = student.eval().distilbert(ids, attention_mask=mask).last_hidden_state
        aim = teacher_states(teacher, ids, mask, prefix)[-1]
        return float((pooled(states, mask) - pooled(aim, mask)).square().mean())

    before = distance()
    words = student.distilbert.embeddings.word_embeddings.weight.clone()
    options = Options(tmp_path, "unused", seed=0, epochs=0)
    align(Model(student, tokenizer, tmp_path), teacher, texts, options, epochs=5)
    assert distance() < 0.7 * before
    assert torch.equal(student.distilbert.embeddings.word_embeddings.weight, words)
