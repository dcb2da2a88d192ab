"""Texts of the benchmark's requests: a message of a known urgency and a question with a known
answer length.

A length drawn independently of the text would make every length predictor useless, so each question
carries the length of its own answer: real pairs from the data folder if there is one, otherwise
built-in questions with a range of lengths each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_semantic_sched.sim.datasets import TextLength, instruction_pairs, medical_questions

if TYPE_CHECKING:
    import numpy as np

_Choice = TypeVar("_Choice")

# A longer prompt says more about long inputs than about scheduling, and would not fit the model of
# the default benchmark together with its answer.
_MAX_QUESTION_CHARACTERS = 600

MAX_PROMPT_TOKENS = 400
"""Upper bound of message and question."""
CONTEXT_TOKENS = 1100
"""Upper bound of a long context."""

QuestionSource = Callable[["np.random.Generator"], TextLength]
"""Draws a question with the length of its answer."""


@functools.cache
def tables() -> dict[str, Any]:
    """`messages` by level, `slots`, `openings`, `endings` and `questions`."""
    import yaml

    return dict(yaml.safe_load(Path(__file__).with_name("texts.yaml").read_text()))


def write_message(level: int, rng: np.random.Generator) -> str:
    """Write a message whose true urgency is `level`, 0 to 4. Slots, openings and small changes of
    spelling vary the texts, so that two requests rarely have the same one."""
    by_level = tables()["messages"]
    if not 0 <= level < len(by_level):
        raise ValueError(f"urgency level must be 0 to {len(by_level) - 1}, got {level}")
    template: str = _choose(by_level[level], rng)
    slots = {name: _choose(words, rng) for name, words in tables()["slots"].items()}
    text = template.format(age=int(rng.integers(19, 88)), **slots)
    text = text[0].upper() + text[1:] if rng.random() < 0.7 else text
    opening = _choose(tables()["openings"], rng)
    if text[-1] not in "?!.":
        text += _choose(tables()["endings"], rng)
    style = rng.random()
    if style < 0.15:
        text = text.lower()
    elif style < 0.2:
        text = text.replace("'", "")
    return str(opening + text)


def write_context(rng: np.random.Generator) -> str:
    """Write about 1,000 tokens of a neutral call log, different every time. It says nothing about
    urgency or the length of the answer, and shares no prefix with another."""
    lines = (
        f"Line {int(rng.integers(10, 100))}: call {int(rng.integers(1000, 10000))} forwarded "
        f"to desk {int(rng.integers(1, 30))}."
        for _ in range(53)
    )
    return "Call log of today. " + " ".join(lines) + " End of the log."


def question_source(root: Path | None) -> tuple[QuestionSource, str]:
    """Return the best available source of questions, the data folder `root` or the built-in ones,
    and a sentence that describes it. DataNotFound if the folder lacks a required file."""
    if root is None:
        return _draw_builtin, "built-in questions, a range of lengths each (no data folder found)"
    # No predictor of this project is trained on these pairs. Half of each kind at every level:
    # urgency and output length are independent, as in the paper. If the least urgent requests were
    # also the shortest, any order by urgency would raise the mean normalized waiting time.
    pools = [
        [
            pair
            for pair in pairs
            if pair.split == "test" and len(pair.text) <= _MAX_QUESTION_CHARACTERS
        ]
        for pairs in (medical_questions(root), instruction_pairs(root))
    ]

    def draw(rng: np.random.Generator) -> TextLength:
        return _choose(_choose(pools, rng), rng)

    return draw, (
        f"real held-out pairs ({len(pools[0])} medical questions, {len(pools[1])} instructions), "
        "each with the length of its own answer"
    )


def _draw_builtin(rng: np.random.Generator) -> TextLength:
    question = _choose(tables()["questions"], rng)
    return TextLength(question["text"], int(rng.integers(question["low"], question["high"] + 1)))


def _choose(options: Sequence[_Choice], rng: np.random.Generator) -> _Choice:
    return options[int(rng.integers(len(options)))]
