"""Turns prompt text into the token ids that the predictor reads."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

DEFAULT_WINDOW = 128
"""Wordpieces the network sees of a prompt, special tokens included."""

_CHARACTERS_PER_TOKEN = 8
_TEMPLATE_MARKER = re.compile(
    r"<\|[^|<>]{1,40}\|>|</?s>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>|\[(?:CLS|SEP|PAD)\]",
    re.IGNORECASE,
)


def clean(text: str) -> str:
    """`text` without chat-template markers and runs of white space; role names such as "user" stay,
    since they cannot be told from words."""
    return " ".join(_TEMPLATE_MARKER.sub(" ", text).split())


class WindowTokenizer:
    """Tokenizes texts into at most `window` ids: the head and the tail of a longer text.

    Characters are cut before tokenizing, so that the cost of a prompt is bounded.
    """

    def __init__(self, tokenizer: Any, window: int = DEFAULT_WINDOW) -> None:
        """`tokenizer` is any tokenizer of transformers; raises ValueError on a tiny window."""
        self._tokenizer = tokenizer
        # Found by tokenizing, which works for [CLS] ... [SEP], <s> ... </s>, and none.
        plain = self._ids(["a"], special=False)[0]
        framed = self._ids(["a"], special=True)[0]
        start = next((at for at in range(len(framed)) if framed[at : at + len(plain)] == plain), 0)
        self._prefix = framed[:start]
        self._suffix = framed[start + len(plain) :]
        self._room = window - len(self._prefix) - len(self._suffix)
        if self._room < 2:
            raise ValueError(f"a window of {window} tokens leaves no room for text")
        pad = getattr(tokenizer, "pad_token_id", None)
        self._pad = 0 if pad is None else int(pad)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, at most `window` of them, special tokens included."""
        ids = self._ids([self._cut(text) for text in texts], special=False) if texts else []
        return [[*self._prefix, *self._fit(row), *self._suffix] or [self._pad] for row in ids]

    def pad(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Ids and mask of the rows, both (rows, longest row) int64; padding has mask 0."""
        longest = max(len(row) for row in rows)
        ids = torch.full((len(rows), longest), self._pad, dtype=torch.long)
        mask = torch.zeros((len(rows), longest), dtype=torch.long)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = torch.tensor(row, dtype=torch.long)
            mask[place, : len(row)] = 1
        return ids, mask

    def _cut(self, text: str) -> str:
        half = self._room * _CHARACTERS_PER_TOKEN // 2
        # Lone surrogates, which come from broken decoding, cannot be encoded.
        if len(text) > 4 * half:
            text = f"{text[: 2 * half]} {text[-2 * half :]}"
        text = clean(text.encode("utf-8", "replace").decode("utf-8"))
        return text if len(text) <= 2 * half else f"{text[:half]} {text[-half:]}"

    def _fit(self, row: list[int]) -> list[int]:
        if len(row) <= self._room:
            return row
        tail = self._room // 2
        return row[: self._room - tail] + row[-tail:]

    def _ids(self, texts: list[str], special: bool) -> list[list[int]]:
        encoded = self._tokenizer(texts, add_special_tokens=special, verbose=False)
        return [list(row) for row in encoded["input_ids"]]
