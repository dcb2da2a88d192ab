"""The paper's workload: bursts of requests of mixed urgency, open loop.

A burst of randint(0, `max_burst`) requests arrives every `gap` seconds, all at one moment, until
there are enough (paper, section 5.1). All are drawn before the first is sent, so that every
scheduler gets the same texts, lengths and arrival times. A text has a message of a known urgency
and a question with the length of its own answer, without which every length predictor would be
useless: real pairs from the data folder or built-in questions with a range of lengths each. With
`WorkloadConfig.prompts` the text is the newest turn of a chat, and the lengths of prompts and
answers are drawn, or those of a trace.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_semantic_sched.lab.bench.prompts import BLOCK_TOKENS, Size, draw_sizes, is_trace
from vllm_semantic_sched.lab.datasets import (
    TextLength,
    instruction_pairs,
    medical_questions,
)
from vllm_semantic_sched.sim.data_folder import data_root

# The command line shows the defaults below: numpy is imported only where a workload is drawn.
if TYPE_CHECKING:
    import numpy as np

LEVELS = 5
"""Number of urgency levels; 0 is the most urgent."""

MIXES = {"even": (0.20, 0.20, 0.20, 0.20, 0.20), "rare": (0.05, 0.15, 0.25, 0.30, 0.25)}
"""Share of each urgency level, most urgent first."""

PLACES = ("alone", "before", "inside")
"""Where the message of a known urgency may stand in a prompt."""

ANSWER_FIELD = "bench_answer"
"""Key in `vllm_xargs` under which `bench.answer_length` finds the length of an answer."""

_Choice = TypeVar("_Choice")

# A longer one says more about long inputs than about scheduling, and would not fit the default
# benchmark's model together with its answer.
_MAX_QUESTION_CHARACTERS = 600

MAX_PROMPT_TOKENS = 400
"""Upper bound of message and question."""
CONTEXT_TOKENS = 1100
"""Upper bound of a long context."""

# Tokens of a question with its answer.
_SHORTEST_TURN = 80
_LONGEST_TURN = 800
# Of the tokenizer of `bench.tiny_model`.
_LINE_TOKENS = 18.5  # of a context
_TURN_TOKENS = 20  # that a turn has beside its question and answer
_CHARACTERS_PER_TOKEN = 4  # of English

QuestionSource = Callable[["np.random.Generator"], TextLength]
"""Draws a question with the length of its answer."""


@dataclass(frozen=True)
class WorkloadConfig:
    """What to draw, in seconds and tokens. `long_prompts`: share of the requests of levels 1 to 4
    with about 1,000 tokens of context before the question. `natural`: the model ends its answers
    itself. `place` of the message: `alone`, `before` a question, or `inside`, between two.
    `tenants`: weights of those that send requests, if any. `prompts`: a name of
    `bench.prompts.PROMPTS`, or a trace; empty: as long as the message and the question are."""

    requests: int = 600
    mix: str = "even"
    gap: float = 0.5
    max_burst: int = 50
    seed: int = 0
    min_output_tokens: int = 8
    max_output_tokens: int = 384
    long_prompts: float = 0.0
    natural: bool = False
    place: str = "before"
    tenants: tuple[float, ...] = ()
    prompts: str = ""


@dataclass(frozen=True)
class BenchRequest:
    """What is sent, when (`arrival`, seconds after the start), and the true urgency (`level`) and
    output length, which the server learns only if a scheduler is told on purpose. `history`: what
    was said before `text`."""

    index: int
    arrival: float
    level: int
    text: str
    output_tokens: int
    tenant: str = ""
    history: str = ""

    @property
    def prompt(self) -> str:
        """What was said before, and the newest turn."""
        return self.history + self.text


@dataclass(frozen=True)
class Workload:
    """The requests in order of arrival, and where their lengths come from."""

    config: WorkloadConfig
    requests: tuple[BenchRequest, ...]
    length_source: str

    @property
    def output_tokens(self) -> int:
        """Sum over all requests."""
        return sum(request.output_tokens for request in self.requests)


def parse_mix(mix: str) -> tuple[float, ...]:
    """Return the shares of the levels: a name in `MIXES`, or five weights separated by colons.
    ValueError if it is neither, or the weights have no positive sum."""
    if mix in MIXES:
        return MIXES[mix]
    weights = _parse_weights(mix)
    if len(weights) == LEVELS:
        return weights
    raise ValueError(
        f"mix {mix!r} is neither one of {', '.join(MIXES)} nor {LEVELS} weights like 1:2:3:2:2"
    )


def parse_tenants(text: str) -> tuple[float, ...]:
    """Return the shares of the tenants, given as weights separated by colons; none for an empty
    text. ValueError if there are others than weights, or they have no positive sum."""
    weights = _parse_weights(text)
    if text and not weights:
        raise ValueError(f"tenants {text!r} are not weights like 4:1:1")
    return weights


def _parse_weights(text: str) -> tuple[float, ...]:
    """Weights separated by colons, divided by their sum; none if that is not what the text has."""
    try:
        weights = [float(part) for part in text.split(":")]
    except ValueError:
        return ()
    total = sum(weights)
    if min(weights) < 0 or total <= 0:
        return ()
    return tuple(weight / total for weight in weights)


def make_workload(config: WorkloadConfig, source: QuestionSource | None = None) -> Workload:
    """Draw a workload; the same configuration gives the same workload. Questions come from
    `source`, else the data folder, else the built-in ones. ValueError for a bad mix or size."""
    import numpy as np

    from vllm_semantic_sched.sim.workload import draw_levels

    _check(config)
    # With the mix in the seed two mixes share no prompts, which the second would find in the
    # server's prefix cache.
    rng = np.random.default_rng([config.seed, zlib.crc32(config.mix.encode())])
    description = "given by the caller"
    if source is None:
        source, description = question_source(data_root())
    levels = draw_levels(parse_mix(config.mix), LEVELS, config.requests, rng).tolist()
    sizes = None
    if config.prompts:
        sizes = draw_sizes(config.prompts, config.requests, config.seed)
        description = (
            "those of the trace" if is_trace(config.prompts) else "drawn, 250 in the median"
        )
    arrivals = _draw_arrivals(config, rng, sizes)
    # Generators of their own: the same requests with and without long contexts and tenants.
    context_rng = np.random.default_rng([config.seed, 1])
    tenant_rng = np.random.default_rng([config.seed, 2])
    history_rng = np.random.default_rng([config.seed, 3])
    tenants = [""] * config.requests
    if config.tenants:
        drawn = tenant_rng.choice(len(config.tenants), config.requests, p=config.tenants)
        tenants = [f"tenant {number}" for number in drawn]
    requests = []
    for index, (arrival, level) in enumerate(zip(arrivals, levels, strict=True)):
        question = source(rng)
        parts = _write_parts(config, level, question.text, source, rng)
        if level > 0 and context_rng.random() < config.long_prompts:
            parts.insert(-1, write_context(context_rng))
        shortest = max(config.min_output_tokens, question.output_tokens)
        length = min(config.max_output_tokens, shortest)
        text = " ".join(parts)
        history = ""
        if sizes is not None:
            length = max(1, min(config.max_output_tokens, sizes[index].answer))
            text_tokens = len(text) // _CHARACTERS_PER_TOKEN
            history = write_history(sizes[index], text_tokens, history_rng)
        requests.append(
            BenchRequest(
                index=index,
                arrival=arrival,
                level=level,
                text=text,
                output_tokens=length,
                tenant=tenants[index],
                history=history,
            )
        )
    return Workload(config, tuple(requests), description)


def _write_parts(
    config: WorkloadConfig,
    level: int,
    question: str,
    source: QuestionSource,
    rng: np.random.Generator,
) -> list[str]:
    """A message of a level, where the configuration places it beside questions."""
    message = write_message(level, rng)
    if config.place == "alone":
        return [message]
    if config.place == "inside":
        return [source(rng).text, message, question]
    return [message, question]


def _check(config: WorkloadConfig) -> None:
    if config.requests < 1 or config.max_burst < 1 or config.gap < 0:
        raise ValueError("requests and max_burst must be at least 1, gap at least 0 seconds")
    if config.place not in PLACES:
        raise ValueError(f"place must be one of {', '.join(PLACES)}, got {config.place!r}")
    if not 0 <= config.long_prompts <= 1:
        raise ValueError(f"long_prompts must be a share from 0 to 1, got {config.long_prompts}")


def _draw_arrivals(
    config: WorkloadConfig, rng: np.random.Generator, sizes: Sequence[Size] | None
) -> list[float]:
    if sizes is not None and is_trace(config.prompts):
        distance = 2 * config.gap / config.max_burst  # of two arrivals, on average
        return [size.arrival * distance for size in sizes]
    arrivals: list[float] = []
    burst = 0
    while len(arrivals) < config.requests:
        arrivals += [burst * config.gap] * int(rng.integers(0, config.max_burst + 1))
        burst += 1
    return arrivals[: config.requests]


@functools.cache
def tables() -> dict[str, Any]:
    """`messages` by level, `slots`, `openings`, `endings` and `questions`."""
    import yaml

    return dict(yaml.safe_load(Path(__file__).with_name("texts.yaml").read_text()))


def write_message(level: int, rng: np.random.Generator) -> str:
    """Write a message of urgency `level`, 0 to 4. Slots, openings and small changes of spelling
    vary the texts, so that two requests rarely have the same one."""
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
    if style < 0.2:
        text = text.lower() if style < 0.15 else text.replace("'", "")
    return str(opening + text)


def write_context(rng: np.random.Generator, lines: int = 53) -> str:
    """Write a neutral call log, by default about 1,000 tokens, different every time. It says
    nothing about urgency or the length of the answer, and shares no prefix with another."""
    written = (
        f"Line {int(rng.integers(10, 100))}: call {int(rng.integers(1000, 10000))} forwarded "
        f"to desk {int(rng.integers(1, 30))}."
        for _ in range(lines)
    )
    return "Call log of today. " + " ".join(written) + " End of the log."


def write_history(size: Size, newest: int, rng: np.random.Generator) -> str:
    """Write what came before the newest turn of a chat, itself of about `newest` tokens, so that
    the prompt has its size. Nothing in it is urgent. Prompts with the same first blocks begin with
    the same text."""
    import numpy as np

    turns = []
    written = newest
    for block in size.blocks[: size.prompt // BLOCK_TOKENS]:
        turns.append(_write_turn(BLOCK_TOKENS, np.random.default_rng(block)))
        written += BLOCK_TOKENS
    while size.prompt - written >= _SHORTEST_TURN:
        drawn = int(rng.integers(_SHORTEST_TURN, _LONGEST_TURN))
        tokens = min(size.prompt - written, drawn)
        turns.append(_write_turn(tokens, rng))
        written += tokens
    return "".join([*turns, "user: "]) if turns else ""


def _write_turn(tokens: int, rng: np.random.Generator) -> str:
    """An everyday question, and an answer."""
    question = write_message(LEVELS - 1, rng)
    lines = (tokens - len(question) // _CHARACTERS_PER_TOKEN - _TURN_TOKENS) / _LINE_TOKENS
    return f"user: {question}\nassistant: {write_context(rng, max(0, round(lines)))}\n"


def question_source(root: Path | None) -> tuple[QuestionSource, str]:
    """Return the best available source of questions, the data folder `root` or the built-in ones,
    and a sentence that describes it. FileNotFoundError if the folder lacks a required file."""
    if root is None:
        return _draw_builtin, "built-in questions, a range of lengths each (no data folder found)"

    # No predictor of this project is trained on these pairs. Half of each kind at every level:
    # urgency and output length are independent, as in the paper. If the least urgent requests were
    # also the shortest, any order by urgency would raise the mean normalized waiting time.
    def usable(pairs: Iterable[TextLength]) -> list[TextLength]:
        held_out = (pair for pair in pairs if pair.split == "test")
        return [pair for pair in held_out if len(pair.text) <= _MAX_QUESTION_CHARACTERS]

    pools = [usable(medical_questions(root)), usable(instruction_pairs(root))]

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
