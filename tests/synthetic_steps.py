"""Steps of a small synthetic engine under load, and their seconds as they are measured."""

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vllm_semantic_sched.policy.profile.formula import Batch, EngineProfile

TOKEN_BUDGET = 2048


@dataclass(frozen=True)
class Traffic:
    """Mean tokens of lognormal lengths; prompts without `prefills` come with their KV."""

    prompt: int
    output: int
    prefills: bool = True


DECODES = Traffic(1500, 250, prefills=False)
MIXED = Traffic(1500, 250)
PREFILLS = Traffic(3000, 24)


@dataclass
class _Request:
    prompt: int
    left: int  # output tokens
    computed: int


def steps(
    engine: EngineProfile,
    seats: int,
    traffic: Traffic,
    seconds: float,
    seed: int = 0,
    holds: bool = False,
) -> Iterator[Batch]:
    """Batches of an idle engine that meets 1.75 times its capacity, in so many engine seconds.
    `holds`: now and then a quarter to seven eighths of the decodes sit out some steps."""
    rng, now, next_arrival, waiting = random.Random(seed), 0.0, 0.0, 0
    context = seats * (traffic.prompt + traffic.output // 2)
    decode = engine.step(Batch(decodes=seats, context=context)) / seats
    prefill = engine.prefill(0, traffic.prompt) if traffic.prefills else 0.0
    rate = 1.75 / (prefill + traffic.output * decode)
    running: list[_Request] = []
    held_steps, share = 0, 0.0
    while now < seconds:
        while next_arrival <= now or not (running or waiting):
            now = max(now, next_arrival)
            next_arrival += rng.expovariate(rate)
            waiting += 1
        if holds and not held_steps and rng.random() < 0.03:
            held_steps, share = rng.randint(5, 30), rng.choice([0.25, 0.5, 0.75, 0.875])
        decoding = [one for one in running if one.computed >= one.prompt]
        if held_steps:
            held_steps -= 1
            decoding = decoding[: max(1, int(len(decoding) * (1.0 - share)))]
        while waiting and len(running) < seats:
            waiting -= 1
            prompt = _length(rng, traffic.prompt, 8000)
            running.append(
                _Request(
                    prompt, _length(rng, traffic.output, 4000), prompt * (not traffic.prefills)
                )
            )
        batch, left = Batch(), TOKEN_BUDGET - len(decoding)
        for one in running:
            if one.computed < one.prompt and left:
                end = min(one.prompt, one.computed + left)
                batch.add_prefill(one.computed, end)
                left -= end - one.computed
                one.computed = end
        for one in decoding:
            batch.add_decode(one.computed)
            one.computed, one.left = one.computed + 1, one.left - 1
        running = [one for one in running if one.left > 0]
        if batch.sequences:
            now += engine.step(batch)
            yield batch


def measured(
    engine: EngineProfile, batches: Iterable[Batch], seed: int = 0, disturbed: bool = True
) -> Iterator[tuple[Batch, float]]:
    """Batches and their seconds, with 3 % of noise. `disturbed`: the first six take many times as
    long, later 1 % 3 to 100 times, and the output of 3 % comes late, for which the next one seems
    shorter."""
    rng, late = random.Random(seed), 0.0
    for number, batch in enumerate(batches):
        seconds = engine.step(batch) * rng.gauss(1.0, 0.03) - late
        late = 0.0
        if disturbed:
            draw = rng.random()
            if number < 6:
                seconds *= rng.choice([3.0, 10.0, 50.0])
            elif draw < 0.01:
                seconds *= math.exp(rng.uniform(math.log(3.0), math.log(100.0)))
            elif draw < 0.04:
                late = rng.uniform(0.2, 0.9) * engine.step(batch)
                seconds += late
        yield batch, max(seconds, 1e-5)


def _length(rng: random.Random, mean: int, most: int) -> int:
    return max(2, min(most, int(rng.lognormvariate(math.log(mean) - 0.32, 0.8))))
