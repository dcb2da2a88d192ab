"""Figures of a run on the emulated device."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_semantic_sched.lab.device.clocks import StepTime
from vllm_semantic_sched.lab.device.load import LoadRequest, faster
from vllm_semantic_sched.lab.device.virtual import EngineConfig, Record, VirtualEngine
from vllm_semantic_sched.policy.profile.formula import Batch, EngineProfile


@dataclass(frozen=True)
class LevelFigures:
    """Means over the requests of a level that ended; NaN without any. Seconds."""

    requests: int
    ttft: float
    ttft_p99: float
    latency: float
    waiting: float  # normalized: latency by output token


@dataclass(frozen=True)
class DeviceFigures:
    """What the device did in a window. `tokens`: output tokens per busy second; `idle`: share of
    the window's steps' time in which it had nothing to do."""

    tokens: float
    prefill_tokens: int
    steps: int
    busy: float
    idle: float
    batch: float  # decoding sequences in a step


def level_figures(records: Sequence[Record]) -> LevelFigures:
    """Figures of some requests, however many of them got their answers."""
    ended = [record for record in records if record.ended is not None and record.tokens]
    if not ended:
        nan = float("nan")
        return LevelFigures(requests=0, ttft=nan, ttft_p99=nan, latency=nan, waiting=nan)
    ttfts = sorted(record.ttft for record in ended)
    return LevelFigures(
        requests=len(ended),
        ttft=statistics.fmean(ttfts),
        ttft_p99=ttfts[min(len(ttfts) - 1, int(0.99 * len(ttfts)))],
        latency=statistics.fmean(record.latency for record in ended),
        waiting=statistics.fmean(record.latency / len(record.tokens) for record in ended),
    )


def device_figures(
    steps: Sequence[StepTime], begin: float = 0.0, end: float = float("inf")
) -> DeviceFigures:
    """Figures of the steps that ended in a window. ValueError if none did."""
    inside = [step for step in steps if begin <= step.end < end]
    if not inside:
        raise ValueError(f"no step ended between {begin:g} and {end:g} s")
    busy = sum(step.busy for step in inside)
    idle = sum(step.idle for step in inside)
    return DeviceFigures(
        tokens=sum(step.sampled for step in inside) / busy,
        prefill_tokens=sum(step.batch.prefill_tokens for step in inside),
        steps=len(inside),
        busy=busy,
        idle=idle / (idle + busy),
        batch=statistics.fmean(step.batch.decodes for step in inside),
    )


def capacity(load: Sequence[LoadRequest], config: EngineConfig) -> float:
    """Requests per second that FCFS serves while all seats are taken: output tokens per busy
    second, over the mean answer."""
    with VirtualEngine(config) as engine:
        engine.send(faster(load, 1e9))  # all at once
        engine.run()
        full = max(step.batch.decodes for step in engine.steps)
        taken = [step for step in engine.steps if step.batch.decodes > 0.8 * full]
        figures = device_figures(engine.steps, taken[0].end, taken[-1].end)
    return figures.tokens / (sum(request.answer for request in load) / len(load))


class HoldCosts:
    """What holds were charged, and what they cost on the device: the part of each step's fixed time
    that the held requests would have borne. Watches an engine of ours."""

    def __init__(self, engine: VirtualEngine) -> None:
        self._engine = engine
        self._protection: Any = engine.scheduler.core.protection
        self._held: list[Any] = []
        self._charge = 0.0
        self._rows: list[tuple[float, float, float]] = []  # end of the step, charged, true
        self._choose = self._protection.choose
        self._finished = engine.runner.finished_step
        self._protection.choose = self._chosen
        engine.runner.finished_step = self._step

    def between(self, begin: float = 0.0, end: float = float("inf")) -> tuple[float, float]:
        """Seconds charged and true seconds of the steps that ended in a window."""
        inside = [(charge, loss) for ended, charge, loss in self._rows if begin <= ended < end]
        return sum(charge for charge, _ in inside), sum(loss for _, loss in inside)

    def _chosen(self, *args: Any, **kwargs: Any) -> Any:
        before = self._protection.budget.recent
        self._held = list(self._choose(*args, **kwargs))
        self._charge = self._protection.budget.recent - before
        return self._held

    def _step(self, time: StepTime) -> None:
        if self._held:
            self._rows.append((time.end, self._charge, self._loss(time.batch, self._held)))
            self._held = []
        self._finished(time)

    def _loss(self, batch: Batch, held: Sequence[Any]) -> float:
        requests = self._engine.scheduler.requests
        profile: EngineProfile = self._engine.runner.profile
        ran = batch.decodes
        count = ran + len(held)
        tokens: int = sum(
            requests[job.request_id].num_computed_tokens
            for job in held
            if job.request_id in requests
        )
        full = profile.step_decode(Batch(decodes=count, context=batch.context + tokens))
        seconds = profile.step_decode(Batch(decodes=ran, context=batch.context))
        return max(0.0, seconds - full * ran / count) if ran else seconds
