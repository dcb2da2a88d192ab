"""The part of a prompt that both readers see: a clean head and tail of bounded length."""

import re
from typing import TypeVar

DEFAULT_WINDOW = 128
"""Wordpieces read of a prompt, special tokens included."""

_CHARACTERS_PER_PIECE = 8
_TEMPLATE_MARKER = re.compile(
    r"<\|[^|<>]{1,40}\|>|</?s>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>|\[(?:CLS|SEP|PAD)\]",
    re.IGNORECASE,
)

_Piece = TypeVar("_Piece", int, str)


def clean(text: str) -> str:
    """`text` without chat-template markers and runs of white space; role names such as "user" stay,
    since they cannot be told from words."""
    return " ".join(_TEMPLATE_MARKER.sub(" ", text).split())


def cut_text(text: str, room: int) -> str:
    """The head and the tail of a clean `text`, enough for `room` wordpieces. Cuts before cleaning,
    so that the cost of a text is bounded."""
    half = room * _CHARACTERS_PER_PIECE // 2
    if len(text) > 4 * half:
        text = f"{text[: 2 * half]} {text[-2 * half :]}"
    # Lone surrogates, which come from broken decoding, cannot be encoded.
    text = clean(text.encode("utf-8", "replace").decode("utf-8"))
    return text if len(text) <= 2 * half else f"{text[:half]} {text[-half:]}"


def cut_pieces(pieces: list[_Piece], room: int) -> list[_Piece]:
    """The first and the last of more than `room` wordpieces, `room` in all."""
    if len(pieces) <= room:
        return pieces
    tail = room // 2
    return pieces[: room - tail] + pieces[-tail:]
