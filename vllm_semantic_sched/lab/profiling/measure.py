"""Measures prefills, decodes and copies on a live engine, and makes a profile of the times."""

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from vllm_semantic_sched.lab.profiling.fit import (
    LineFit,
    fit_line,
    fit_steps,
    merge_decodes,
    reduce_seconds,
    reduce_steps,
)
from vllm_semantic_sched.lab.profiling.live_engine import LiveEngine, Step
from vllm_semantic_sched.policy.profile.formula import EngineProfile, Environment, Ranges

DECODE_STEPS = 12  # per batch and repeat
_SHORTEST = 16  # tokens
_CONTEXT_TOKENS = 16_384  # most tokens of all sequences of a decode batch together


class Grid(NamedTuple):
    """Prompt lengths, (sequences, tokens of each) of decode batches, and tokens saved and loaded at
    once, in whole blocks."""

    prefills: list[int]
    decodes: list[tuple[int, int]]
    transfers: list[int]


class Repeats(NamedTuple):
    """How often each point is measured, how its repeats are reduced (`median` or `fastest`), the
    seed of their order, and whether there is no progress bar."""

    number: int
    statistic: str
    seed: int
    quiet: bool


def make_grid(engine: LiveEngine, max_tokens: int | None, max_batch: int | None) -> Grid:
    """Prompts from 16 tokens to the longest, each twice as long as the one before; batches each
    four times as large as the one before."""
    longest = min(engine.max_model_len, engine.kv_tokens, max_tokens or engine.max_model_len)
    seats = min(engine.seats, max_batch or engine.seats)
    room = min(engine.kv_tokens, max(_CONTEXT_TOKENS, longest))
    context = longest - DECODE_STEPS - 2
    block = engine.block_size
    decodes = [
        (sequences, tokens)
        for sequences in geometric_steps(1, seats, 4)
        for tokens in geometric_steps(2 * _SHORTEST, context, 4)
        if sequences * (tokens + DECODE_STEPS + block) <= room
    ]
    transfers = [block * count for count in geometric_steps(1, max(1, longest // block), 2)]
    return Grid(geometric_steps(_SHORTEST, longest - 1, 2), decodes, transfers)


def geometric_steps(first: int, last: int, factor: int) -> list[int]:
    """Integers from `first` to `last`, each `factor` times the one before; those within 20 % of
    `last` are left out."""
    values = [max(1, min(first, last))]
    while values[-1] * factor <= last / 1.2:
        values.append(values[-1] * factor)
    return values if values[-1] >= last else [*values, last]


def measure_profile(
    engine: LiveEngine, grid: Grid, options: Sequence[str], repeats: Repeats
) -> EngineProfile:
    """Measure a grid on an engine with these options."""
    steps, decoding = _measure_steps(engine, grid, repeats)
    statistic = f"{repeats.statistic} of {repeats.number}"
    terms, residual = fit_steps(steps)
    alone = [step for step in decoding if step.batch.decodes == 1]
    decode = fit_line([step.batch.context for step in alone], [step.seconds for step in alone])
    copies = engine.copy(grid.transfers, max(3, 2 * repeats.number), repeats.seed)

    def fit_copies(seconds: list[list[float]]) -> LineFit:
        times = [reduce_seconds(of_size, repeats.statistic) for of_size in seconds]
        return fit_line(grid.transfers, times)

    save = fit_copies(copies.save)
    load = fit_copies(copies.load)
    contexts = [tokens for _, tokens in grid.decodes]
    return EngineProfile(
        hardware=engine.hardware,
        model=engine.model,
        source=f"semsched profile, {statistic}",
        **terms,
        beta_load=load.slope,
        beta_save=save.slope,
        gamma1=decode.slope,
        gamma2=decode.start,
        load_start=load.start,
        save_start=save.start,
        ranges=Ranges(
            prefill_tokens=(grid.prefills[0], grid.prefills[-1]),
            decode_context=(min(contexts), max(contexts) + DECODE_STEPS),
            decode_batch=(1, max(count for count, _ in grid.decodes)),
            transfer_tokens=(grid.transfers[0], grid.transfers[-1]),
        ),
        residuals={
            "step": residual,
            "decode": decode.residual,
            "load": load.residual,
            "save": save.residual,
        },
        environment=Environment(
            **engine.describe(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            # Where the model lies on the measured machine is private.
            options=shlex.join(option.rstrip("/").rsplit("/", 1)[-1] for option in options),
            statistic=statistic,
        ),
    )


def _measure_steps(
    engine: LiveEngine, grid: Grid, repeats: Repeats
) -> tuple[list[Step], list[Step]]:
    """All steps of the grid's prefills and decodes, and those that decode a full batch."""
    points = [([length], 1) for length in grid.prefills]
    points += [([length] * count, DECODE_STEPS + 1) for count, length in grid.decodes]
    # The engine does some work slower the first time.
    engine.run([grid.prefills[0], grid.prefills[len(grid.prefills) // 2]], 4)
    engine.run([min(grid.prefills[-1], engine.token_budget)], 1)
    runs = run_repeats(engine, points, repeats)
    prefills: list[Step] = []
    decodes: list[Step] = []
    mixed: list[Step] = []
    for (lengths, output_tokens), point in zip(points, runs, strict=True):
        steps = reduce_steps(point, repeats.statistic)
        if output_tokens == 1:
            prefills += steps
            continue
        mixed += [step for step in steps if step.batch.prefills and len(lengths) > 1]
        decode = merge_decodes([*chain.from_iterable(point)], repeats.statistic)
        if decode is not None:
            decodes.append(decode)
    return [*prefills, *decodes, *mixed], decodes


def run_repeats(
    engine: LiveEngine, points: Sequence[tuple[list[int], int]], repeats: Repeats
) -> list[list[list[Step]]]:
    """The steps of each point (prompt lengths and output tokens of each) in each repeat. A repeat
    has all points in a new order: a disturbance of the machine does not hit one point alone."""
    runs: list[list[list[Step]]] = [[] for _ in points]
    random = np.random.default_rng(repeats.seed)
    with tqdm(total=repeats.number * len(points), unit="point", disable=repeats.quiet) as bar:
        for _ in range(repeats.number):
            for place in random.permutation(len(points)).tolist():
                prompt_lengths, output_tokens = points[place]
                runs[place].append(engine.run(prompt_lengths, output_tokens))
                bar.update()
    return runs
