"""A seeded load for the emulated device: Poisson arrivals, lognormal lengths, a mix of levels."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_semantic_sched.lab.bench.prompts import (
    ANSWERS,
    BLOCK_TOKENS,
    CHAT,
    PROMPTS,
    Lengths,
    Size,
    draw_sizes,
    is_trace,
)

_TOKENS = range(20, 3000)  # token ids of prompts


@dataclass(frozen=True)
class LoadConfig:
    """What to draw. `rate`: requests per second; `mix`: weights of the levels, most urgent first;
    `prefixes`: shared beginnings of prompts, of `prefix_tokens` each, if any."""

    requests: int = 600
    rate: float = 7.0
    seed: int = 5
    mix: tuple[float, ...] = (5, 15, 25, 30, 25)
    prompts: Lengths = CHAT
    answers: Lengths = ANSWERS
    prefixes: int = 0
    prefix_tokens: int = 512


@dataclass(frozen=True)
class Image:
    """An image that stands for `tokens` tokens of a prompt from `offset` on; with the same name, it
    is the same."""

    name: str
    offset: int
    tokens: int


@dataclass(frozen=True)
class LoadRequest:
    """A request that is sent `arrival` seconds after the start. `level`: None if the client states
    none. `answer`: tokens, which no scheduler is told (of an embedding model: numbers of the
    vector); `extra`: further fields for `vllm_xargs`; `abort`: seconds after the start at which the
    client leaves, if it does; `adapter`: number of a LoRA adapter, 0 for none; `schema`: JSON
    schema of the answer, whose length then is the grammar's."""

    name: str
    arrival: float
    level: int | None
    prompt: tuple[int, ...] = field(repr=False)
    answer: int
    extra: dict[str, Any] = field(default_factory=dict)
    abort: float | None = None
    adapter: int = 0
    images: tuple[Image, ...] = ()
    schema: dict[str, Any] | None = None


def trace_load(sizes: Sequence[Size], config: LoadConfig) -> list[LoadRequest]:
    """Requests of a trace, at the rate and with the mix and the seed of `config`. Prompts with the
    same blocks begin with the same tokens."""
    chance = random.Random(config.seed)
    requests = []
    for index, size in enumerate(sizes):
        level = chance.choices(range(len(config.mix)), config.mix)[0]
        prompt: list[int] = []
        for block in size.blocks[: size.prompt // BLOCK_TOKENS]:
            prompt += random.Random(block).choices(_TOKENS, k=BLOCK_TOKENS)
        prompt += chance.choices(_TOKENS, k=max(1, size.prompt) - len(prompt))
        arrival = size.arrival / config.rate
        requests.append(LoadRequest(f"r{index}", arrival, level, tuple(prompt), size.answer))
    return requests


def load_of(prompts: str, config: LoadConfig) -> list[LoadRequest]:
    """A load of prompts by name, or of a trace; see `prompts.draw_sizes` for what is raised."""
    if is_trace(prompts):
        return trace_load(draw_sizes(prompts, config.requests, config.seed), config)
    return draw_load(replace(config, prompts=PROMPTS[prompts]))


def draw_load(config: LoadConfig) -> list[LoadRequest]:
    """Requests in order of arrival; the same for the same configuration."""
    chance = random.Random(config.seed)
    shared = [
        tuple(chance.choices(_TOKENS, k=config.prefix_tokens)) for _ in range(config.prefixes)
    ]
    now = 0.0
    requests = []
    for index in range(config.requests):
        now += chance.expovariate(config.rate)
        level = chance.choices(range(len(config.mix)), config.mix)[0]
        prompt = tuple(chance.choices(_TOKENS, k=config.prompts.draw(chance)))
        if shared:
            prompt = chance.choice(shared) + prompt
        answer = config.answers.draw(chance)
        requests.append(LoadRequest(f"r{index}", now, level, prompt, answer))
    return requests


def faster(load: Sequence[LoadRequest], factor: float) -> list[LoadRequest]:
    """The same requests, sent at so many times the rate."""
    return [replace(request, arrival=request.arrival / factor) for request in load]
