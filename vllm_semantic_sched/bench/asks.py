"""What a user asks for, and how long the answer to it really was.

The ask decides the output length. A length drawn independently of the text would make every
length predictor useless, so each ask carries the length of its own answer: real pairs from
the data folder where there is one, else built-in asks with a range of lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_semantic_sched.datasets import TextLength, instruction_pairs, medical_questions

# A prompt above this many characters says more about long inputs than about scheduling, and
# would not fit the model of the default benchmark beside its answer.
_MAX_ASK_CHARACTERS = 600


@dataclass(frozen=True)
class BuiltinAsk:
    """A request for an answer of a certain extent, and its range of output tokens."""

    text: str
    low: int
    high: int


# Lengths in tokens at 1.3 tokens per English word: one sentence is 12 to 30 words, a short
# paragraph 40 to 80, a list of steps 90 to 160, a full guide 180 to 300. Style guides give
# these extents; no measured answer stands behind them, which is why the report says when
# they were used.
BUILTIN_ASKS = (
    BuiltinAsk("Reply in one sentence.", 16, 40),
    BuiltinAsk("Answer yes or no, with one reason.", 10, 30),
    BuiltinAsk("Just tell me where to call.", 8, 24),
    BuiltinAsk("What should I do right now?", 50, 105),
    BuiltinAsk("What could this be?", 60, 120),
    BuiltinAsk("Summarise what matters in a short paragraph.", 50, 105),
    BuiltinAsk("Give me a numbered list of steps.", 115, 210),
    BuiltinAsk("Explain the causes and the treatment options.", 150, 260),
    BuiltinAsk("Give me a detailed step-by-step guide.", 235, 384),
    BuiltinAsk("Tell me everything I should know, in detail.", 235, 384),
)


@dataclass(frozen=True)
class Ask:
    """An ask with the length of its answer in tokens."""

    text: str
    output_tokens: int


AskSource = Callable[[np.random.Generator], Ask]
"""Draws an ask."""


def ask_source(root: Path | None) -> tuple[AskSource, str]:
    """The best source there is, and a sentence that says which it is.

    Args:
        root: the data folder (`vllm_semantic_sched.datasets.data_root`), None without one.

    Raises:
        DataNotFound: the folder is there but lacks a file that is needed.
    """
    if root is None:
        return _builtin, "built-in asks, a range of lengths each (no data folder found)"
    # Half of each, at every level: urgency and output length are independent, as in the paper.
    # Were the least urgent also the shortest, any order by urgency would raise the mean
    # normalized waiting time, and the benchmark would measure that.
    pools = (_held_out(medical_questions(root)), _held_out(instruction_pairs(root)))

    def draw(rng: np.random.Generator) -> Ask:
        pool = pools[int(rng.integers(len(pools)))]
        pair = pool[int(rng.integers(len(pool)))]
        return Ask(pair.text, pair.output_tokens)

    return draw, (
        f"real held-out pairs ({len(pools[0])} medical questions, {len(pools[1])} instructions), "
        "each with the length of its own answer"
    )


def _builtin(rng: np.random.Generator) -> Ask:
    ask = BUILTIN_ASKS[int(rng.integers(len(BUILTIN_ASKS)))]
    return Ask(ask.text, int(rng.integers(ask.low, ask.high + 1)))


def _held_out(pairs: Iterable[TextLength]) -> list[TextLength]:
    """The pairs that no predictor of this project is trained on."""
    return [
        pair for pair in pairs if pair.split == "test" and len(pair.text) <= _MAX_ASK_CHARACTERS
    ]
