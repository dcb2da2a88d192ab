"""A seeded load for the emulated device: Poisson arrivals, lognormal lengths, a mix of levels."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

_TOKENS = range(20, 3000)  # token ids of prompts


@dataclass(frozen=True)
class Lengths:
    """Lognormal lengths in tokens, cut off at both ends."""

    mu: float
    sigma: float
    least: int
    most: int

    def draw(self, chance: random.Random) -> int:
        return int(max(self.least, min(self.most, chance.lognormvariate(self.mu, self.sigma))))


CHAT = Lengths(7.31, 0.8, 20, 12_000)
"""Prompts like those of chats with their history: 1,500 tokens in the median."""
SHORT = Lengths(5.3, 0.6, 20, 2_000)
LONG = Lengths(8.7, 0.5, 500, 14_000)
ANSWERS = Lengths(5.52, 0.7, 2, 1_500)
"""Answers of 250 tokens in the median."""


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
class LoadRequest:
    """A request that is sent `arrival` seconds after the start. `level`: None if the client states
    none. `answer`: tokens, which no scheduler is told; `extra`: further fields for `vllm_xargs`;
    `abort`: seconds after the start at which the client leaves, if it does."""

    name: str
    arrival: float
    level: int | None
    prompt: tuple[int, ...] = field(repr=False)
    answer: int
    extra: dict[str, Any] = field(default_factory=dict)
    abort: float | None = None


def draw_load(config: LoadConfig) -> list[LoadRequest]:
    """Requests in order of arrival; the same for the same configuration."""
    chance = random.Random(config.seed)
    shared = [
        tuple(chance.choices(_TOKENS, k=config.prefix_tokens)) for _ in range(config.prefixes)
    ]
    now, requests = 0.0, []
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
    return [replace(one, arrival=one.arrival / factor) for one in load]
