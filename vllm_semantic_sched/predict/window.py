"""The part of a prompt that both readers see: a clean head and tail of bounded length, of a chat
what the user says, the newest turn first."""

import re
from typing import TypeVar

DEFAULT_WINDOW = 128
"""Wordpieces read of a prompt, special tokens included."""

_CHARACTERS_PER_PIECE = 8
# Of a prompt that is longer, head and tail: the cost of a text must be bounded.
_LONGEST_PROMPT = 16_000
_TEMPLATE_MARKER = re.compile(
    r"<[|｜][^|｜<>]{1,40}[|｜]>|</?s>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>"
    r"|\[(?:CLS|SEP|PAD)\]",
    re.IGNORECASE,
)
# What begins a turn, and who speaks: chat templates with their markers, without them (a tokenizer
# may leave those out), and logs of a chat.
_SPEAKER = re.compile(
    r"<[|｜](?:im_start|start_header_id|start)[|｜]>\s*(\w+)(?:<[|｜](?:end_header_id|message)[|｜]>)?"
    r"|<start_of_turn>(\w+)"
    r"|<[|｜](user|assistant|system|tool)[|｜]>"
    r"|(\[/?INST\])"
    r"|(<</?SYS>>)"
    r"|(?:^|\n)(user|assistant|system|model)\n"
    r"|(?:^|\s)(user|human|assistant|ai|bot|system)\s*:(?=\s|$)",
    re.IGNORECASE,
)
_USERS = frozenset({"user", "human", "[inst]", "<</sys>>"})

_Piece = TypeVar("_Piece", int, str)


def user_turns(text: str) -> list[str]:
    """What the user says in a chat, the newest turn first; the whole text if it is no chat.

    What stands before the first turn counts as the user's and comes last: there a user says what is
    to be done with a pasted chat.
    """
    turns: list[str] = []
    speaker, start = "user", 0
    found = False
    for match in _SPEAKER.finditer(text):
        found = True
        if speaker in _USERS:
            turns.append(text[start : match.start()])
        speaker = next(name for name in match.groups() if name is not None).lower()
        start = match.end()
    if not found:
        return [text]
    if speaker in _USERS:
        turns.append(text[start:])
    return [turn for turn in reversed(turns) if clean(turn)] or [text]


def clean(text: str) -> str:
    """`text` without chat-template markers and runs of white space."""
    return " ".join(_TEMPLATE_MARKER.sub(" ", text).split())


def cut_text(text: str, room: int) -> str:
    """The head and the tail of what the user says, clean, enough for `room` wordpieces."""
    half = room * _CHARACTERS_PER_PIECE // 2
    if len(text) > _LONGEST_PROMPT:
        text = f"{text[: _LONGEST_PROMPT // 2]} {text[-_LONGEST_PROMPT // 2 :]}"
    # Lone surrogates, which come from broken decoding, cannot be encoded.
    text = text.encode("utf-8", "replace").decode("utf-8")
    text = clean(" ".join(user_turns(text)))
    return text if len(text) <= 2 * half else f"{text[:half]} {text[-half:]}"


def cut_pieces(pieces: list[_Piece], room: int) -> list[_Piece]:
    """The first and the last of more than `room` wordpieces, `room` in all."""
    if len(pieces) <= room:
        return pieces
    tail = room // 2
    return pieces[: room - tail] + pieces[-tail:]
