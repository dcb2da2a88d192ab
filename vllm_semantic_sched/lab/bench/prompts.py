"""Loads at the scale of a GPU: lengths of prompts and answers, drawn or from a trace, and the chats
that prompts continue."""

import csv
import datetime
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_semantic_sched.sim.data_folder import data_root

BLOCK_TOKENS = 512
"""Tokens of a block of a trace, as in Mooncake's."""
TRACE = "trace"
"""Name of the trace of the data folder."""
_TRACE_FILE = Path("mooncake", "conversation_trace.jsonl")


@dataclass(frozen=True)
class Lengths:
    """Lognormal lengths in tokens, cut off at both ends."""

    mu: float
    sigma: float
    least: int
    most: int

    def draw(self, chance: random.Random) -> int:
        """A length in whole tokens."""
        return int(max(self.least, min(self.most, chance.lognormvariate(self.mu, self.sigma))))


CHAT = Lengths(7.31, 0.8, 20, 12_000)
"""Prompts like those of chats with their history: 1,500 tokens in the median."""
SHORT = Lengths(5.3, 0.6, 20, 2_000)
LONG = Lengths(8.7, 0.5, 500, 14_000)
ANSWERS = Lengths(5.52, 0.7, 2, 1_500)
"""Answers of 250 tokens in the median."""
PROMPTS = {"chat": CHAT, "short": SHORT, "long": LONG}
"""Lengths of prompts, by name."""


@dataclass(frozen=True)
class Size:
    """Tokens of a request. `arrival`: after the first one, in mean distances of two arrivals, if it
    is of a trace; `blocks`: ids of the prompt's blocks, by which prompts share their beginnings."""

    prompt: int
    answer: int
    arrival: float = 0.0
    blocks: tuple[int, ...] = ()


def longest_prompt(prompts: str) -> int:
    """Tokens, by the name of prompts or of a trace; 0 for an empty one."""
    return PROMPTS.get(prompts, LONG).most if prompts else 0


def is_trace(prompts: str) -> bool:
    """Whether a name of prompts stands for a trace."""
    return bool(prompts) and prompts not in PROMPTS


def draw_sizes(prompts: str, count: int, seed: int) -> list[Size]:
    """Sizes of so many requests: of prompts by name, or the first ones of a trace. See
    `read_trace` for what is raised; ValueError if the trace is shorter."""
    if is_trace(prompts):
        return _spread(read_trace(trace_file(prompts)), count, prompts)
    chance = random.Random(seed)
    lengths = PROMPTS[prompts]
    return [Size(lengths.draw(chance), ANSWERS.draw(chance)) for _ in range(count)]


def trace_file(prompts: str) -> Path:
    """The file of a trace: that of the data folder, or a path. FileNotFoundError if there is
    none."""
    if prompts != TRACE:
        path = Path(prompts)
        if not path.is_file():
            names = ", ".join((*PROMPTS, TRACE))
            raise FileNotFoundError(f"prompts {prompts!r}: neither one of {names} nor a file")
        return path
    root = data_root()
    if root is None or not (root / _TRACE_FILE).is_file():
        raise FileNotFoundError(
            f"no {_TRACE_FILE} in the data folder (SEMSCHED_DATA): put the trace of "
            "kvcache-ai/Mooncake there, or name a file: --prompts FILE.jsonl in its form, or "
            "FILE.csv in that of Azure's LLM inference traces, which share no beginnings"
        )
    return root / _TRACE_FILE


def read_trace(path: Path) -> Iterator[Size]:
    """Requests of a trace, with arrivals in seconds: JSON lines of `timestamp` (ms),
    `input_length`, `output_length` and `hash_ids`, one for each 512 tokens, or CSV with
    `TIMESTAMP`, `ContextTokens` and `GeneratedTokens`. Prompts that are longer than any of
    `PROMPTS` are left out; answers are cut. ValueError: a line is of another form."""
    with path.open(encoding="utf-8", newline="") as lines:
        read = map(json.loads, lines) if path.suffix == ".jsonl" else csv.DictReader(lines)
        for number, row in enumerate(read, start=1):
            try:
                size = _size(row)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}: request {number} of the trace: {error!r}") from error
            if size.prompt <= LONG.most:
                answer = max(ANSWERS.least, min(ANSWERS.most, size.answer))
                yield replace(size, answer=answer)


def _size(row: dict[str, object]) -> Size:
    if "hash_ids" in row:
        blocks = row["hash_ids"]
        assert isinstance(blocks, list)
        return Size(
            prompt=int(str(row["input_length"])),
            answer=int(str(row["output_length"])),
            arrival=float(str(row["timestamp"])) / 1000,
            blocks=tuple(blocks),
        )
    # Seven digits of a second, where Python reads at most six.
    moment = datetime.datetime.fromisoformat(str(row["TIMESTAMP"])[:26])
    return Size(
        prompt=int(str(row["ContextTokens"])),
        answer=int(str(row["GeneratedTokens"])),
        arrival=(moment - datetime.datetime(2020, 1, 1)).total_seconds(),
    )


def _spread(sizes: Iterator[Size], count: int, name: str) -> list[Size]:
    """The first ones, with arrivals in their mean distance."""
    first = list(itertools.islice(sizes, count))
    if len(first) < count:
        raise ValueError(f"trace {name!r} has only {len(first)} requests that can be sent")
    start = first[0].arrival
    distance = (first[-1].arrival - start) / max(1, count - 1) or 1.0
    return [replace(size, arrival=(size.arrival - start) / distance) for size in first]
