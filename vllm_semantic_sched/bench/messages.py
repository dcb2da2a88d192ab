"""Writes natural messages of a known urgency level.

The base texts are in `message_texts.py`. Slots, openings and small changes of typing give
many voices, so that two requests are rarely the same text.
"""

from __future__ import annotations

import numpy as np

from vllm_semantic_sched.bench.load import LEVELS
from vllm_semantic_sched.bench.message_texts import BY_LEVEL

_SLOTS: dict[str, tuple[str, ...]] = {
    "relative": (
        "my dad", "my mother", "my wife", "my husband", "my grandmother", "my brother",
        "my son", "my daughter", "my flatmate", "our neighbour", "my aunt", "my uncle",
    ),
    "place": (
        "the station", "the gym", "Oak Street", "the market", "the swimming pool", "the school",
        "the airport", "the car park", "the stadium", "the town hall", "the beach", "the office",
    ),
    "moment": (
        "this morning", "last night", "yesterday", "around noon", "before dawn", "lunchtime",
    ),
    "duration": (
        "twenty minutes", "half an hour", "an hour", "two hours", "three hours", "45 minutes",
    ),
}  # fmt: skip

# Where one may speak for another person, an opening names the voice. Nothing here carries
# a level of its own.
_OPENINGS = ("", "", "", "", "Hello, ", "Hi. ", "Hey, ", "Please read: ", "Question: ")
_ENDINGS = (".", ".", ".", "", "", "!", " ...")


def write_message(level: int, rng: np.random.Generator) -> str:
    """One message whose true urgency is `level` (0 to 4, 0 most urgent).

    Raises:
        ValueError: `level` is not one of the five.
    """
    if not 0 <= level < LEVELS:
        raise ValueError(f"urgency level must be 0 to {LEVELS - 1}, got {level}")
    text = _fill(_choose(BY_LEVEL[level], rng), rng)
    text = text[0].upper() + text[1:] if rng.random() < 0.7 else text
    opening = _choose(_OPENINGS, rng)
    if text[-1] not in "?!.":
        text += _choose(_ENDINGS, rng)
    style = rng.random()
    if style < 0.15:
        text = text.lower()
    elif style < 0.2:
        text = text.replace("'", "")
    return opening + text


def _fill(template: str, rng: np.random.Generator) -> str:
    values = {name: _choose(choices, rng) for name, choices in _SLOTS.items()}
    return template.format(age=int(rng.integers(19, 88)), **values)


def _choose(options: tuple[str, ...], rng: np.random.Generator) -> str:
    return options[int(rng.integers(len(options)))]
