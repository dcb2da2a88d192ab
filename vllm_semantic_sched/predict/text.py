"""Turns prompt text into the token ids that the network reads."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_semantic_sched.predict.window import DEFAULT_WINDOW, cut_pieces, cut_text


class WindowTokenizer:
    """Tokenizes texts, with any tokenizer of transformers, into at most `window` ids (ValueError if
    too few): the head and the tail of a longer text. Characters are cut before, so that the cost of
    a prompt is bounded."""

    def __init__(self, tokenizer: Any, window: int = DEFAULT_WINDOW) -> None:
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
        longest = max(len(row) for row in rows)
        ids = torch.full((len(rows), longest), self._pad, dtype=torch.long)
        mask = torch.zeros((len(rows), longest), dtype=torch.long)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = torch.tensor(row, dtype=torch.long)
            mask[place, : len(row)] = 1
        return ids, mask

    def _ids(self, texts: list[str], special: bool) -> list[list[int]]:
        encoded = self._tokenizer(texts, add_special_tokens=special, verbose=False)
        return [list(row) for row in encoded["input_ids"]]
