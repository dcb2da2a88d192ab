"""Engine step time with and without predictions, in alternating phases on one server.

More requests than seats, all of the highest urgency, decode long answers. The time of a step is
the time between two tokens of an answer, seen by the client with one token per message. Meanwhile
prompts of the lowest urgency arrive. They get no seat and are withdrawn after a second, so they are
never part of a forward pass. There are three kinds of phases:

- `none`: no prompts arrive;
- `known`: the same few prompts repeat, and the scheduler remembers their predictions;
- `new`: new prompts arrive at the same rate, and the server's predictor reads each of them.

`new` compared with `known` is the cost of predictions: both have the arrivals, and only `new` has
the predictor's forward passes, its process and the thread that feeds it in the engine. `known`
compared with `none` is the cost of arrivals for any scheduler, kept small by several prompts per
HTTP call.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import aiohttp
from common import percentiles

from vllm_semantic_sched.lab.bench.client import Progress
from vllm_semantic_sched.lab.bench.schedulers import SchedulerSpec
from vllm_semantic_sched.lab.bench.server import PREDICTOR, ServerConfig, VllmServer
from vllm_semantic_sched.lab.bench.workload import LEVELS, WorkloadConfig, make_workload

CONDITIONS = ("none", "known", "new")

_SPARE_STREAMS = 4  # these wait for a seat, so that no withdrawn prompt gets one
_CALLS_PER_SECOND = 10
_KNOWN_CALLS = 5  # number of different calls in a `known` phase
_HOLD_SECONDS = 1.0
_SETTLE_SECONDS = 1.5  # from the start of a phase to its first measured token
_WARM_UP_SECONDS = 6.0
_STREAM_TOKENS = 512
_STREAM_PROMPT_TOKENS = 128  # more than any prompt of a stream has


@dataclass(frozen=True)
class StepTimePlan:
    """`rate` is in prompts per second; every condition has `cycles` phases."""

    server: ServerConfig
    policy: str = "ems"
    rate: int = 50
    phase_seconds: float = 10.0
    cycles: int = 3

    def phases(self) -> Iterator[str]:
        """Yield the conditions in order, reversed in every second cycle because of drift."""
        for cycle in range(self.cycles):
            yield from CONDITIONS if cycle % 2 == 0 else reversed(CONDITIONS)


@dataclass(frozen=True)
class StepTimes:
    """Pooled over the phases of one condition.

    `p50` and `p99` are in seconds, over `tokens` tokens; `predictor_share` is the share of one core
    that the predictor process used, None without one; `served` counts prompts that got a seat,
    which none should.
    """

    tokens: int
    p50: float
    p99: float
    predictor_share: float | None
    served: int


def measure_step_times(plan: StepTimePlan, progress: Progress) -> dict[str, StepTimes]:
    """Start the server, run all phases, and pool them by condition. RuntimeError if the server
    fails or refuses a request; ValueError if the plan is empty."""
    if plan.rate < _CALLS_PER_SECOND or plan.phase_seconds <= 0 or plan.cycles < 1:
        raise ValueError(f"needs a rate of at least {_CALLS_PER_SECOND}/s, a phase and a cycle")
    spec = SchedulerSpec("semantic", "semantic", plan.policy)
    config = replace(plan.server, stream_interval=1, scheduler_args=spec.server_args())
    progress.message(f"starting the server: {spec.name}")
    with VllmServer(config) as server:
        phases = asyncio.run(_Client(plan, server, progress).run())
        server.check()
    return {
        condition: pool_phases([phase for phase in phases if phase.condition == condition])
        for condition in CONDITIONS
    }


@dataclass
class Phase:
    """One phase; `gaps` are the seconds between tokens."""

    condition: str
    start: float
    end: float = 0.0
    served: int = 0
    predictor_seconds: float | None = None
    gaps: list[float] = field(default_factory=list)


class _Client:
    """Decoding streams and phases of arriving prompts, for one server."""

    def __init__(self, plan: StepTimePlan, server: VllmServer, progress: Progress) -> None:
        self._plan = plan
        self._server = server
        self._progress = progress
        self._per_call = plan.rate // _CALLS_PER_SECOND
        calls = round(_CALLS_PER_SECOND * (plan.phase_seconds + _SETTLE_SECONDS)) * plan.cycles
        streams = plan.server.seats + _SPARE_STREAMS
        count = streams + self._per_call * (_KNOWN_CALLS + calls)
        texts = [request.text for request in make_workload(WorkloadConfig(count)).requests]
        self._streams = texts[:streams]
        batches = [
            texts[start : start + self._per_call]
            for start in range(streams, len(texts), self._per_call)
        ]
        self._known = itertools.cycle(batches[:_KNOWN_CALLS])
        self._new = iter(batches[_KNOWN_CALLS:])
        # (moment of the later token, seconds since the one before)
        self._gaps: list[tuple[float, float]] = []

    async def run(self) -> list[Phase]:
        async with aiohttp.ClientSession(
            base_url=self._server.url,
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
        ) as session:
            streams = [asyncio.create_task(self._decode(session, text)) for text in self._streams]
            try:
                await self._arrivals(session, "known", _WARM_UP_SECONDS)
                phases = []
                conditions = list(self._plan.phases())
                for number, condition in enumerate(conditions, start=1):
                    self._progress.message(f"phase {number}/{len(conditions)}: {condition}")
                    phases.append(await self._phase(session, condition))
                    for stream in streams:
                        if stream.done():
                            stream.result()  # raises the error that ended it
            finally:
                for stream in streams:
                    stream.cancel()
                await asyncio.gather(*streams, return_exceptions=True)
        for phase in phases:
            phase.gaps = [
                gap
                for moment, gap in self._gaps
                if phase.start <= moment - gap and moment <= phase.end
            ]
        return phases

    async def _phase(self, session: aiohttp.ClientSession, condition: str) -> Phase:
        seconds = _SETTLE_SECONDS + self._plan.phase_seconds
        arrivals = asyncio.create_task(self._arrivals(session, condition, seconds))
        await asyncio.sleep(_SETTLE_SECONDS)
        before = self._server.cpu_seconds().get(PREDICTOR)
        phase = Phase(condition, start=time.perf_counter())
        await asyncio.sleep(self._plan.phase_seconds)
        phase.end = time.perf_counter()
        after = self._server.cpu_seconds().get(PREDICTOR)
        if before is not None and after is not None:
            phase.predictor_seconds = after - before
        phase.served = await arrivals
        return phase

    async def _arrivals(
        self, session: aiohttp.ClientSession, condition: str, seconds: float
    ) -> int:
        """Send prompts for a while and withdraw them all; returns how many got a seat."""
        if condition == "none":
            await asyncio.sleep(seconds)
            return 0
        batches = self._known if condition == "known" else self._new
        calls = []
        due = time.perf_counter()
        for _ in range(round(seconds * _CALLS_PER_SECOND)):
            await asyncio.sleep(due - time.perf_counter())
            calls.append(asyncio.create_task(self._call(session, next(batches))))
            due += 1 / _CALLS_PER_SECOND
        return sum(await asyncio.gather(*calls)) * self._per_call

    async def _call(self, session: aiohttp.ClientSession, prompts: Sequence[str]) -> bool:
        """Send prompts and withdraw them; returns whether they were answered before that."""
        body = _body(list(prompts), level=LEVELS - 1, tokens=16)
        try:
            async with asyncio.timeout(_HOLD_SECONDS):
                async with session.post("/v1/completions", json=body) as response:
                    await _check(response)
                    await response.read()
        except TimeoutError:
            return False
        return True

    async def _decode(self, session: aiohttp.ClientSession, text: str) -> None:
        """Stream one long answer after another."""
        text_of_models = await asyncio.to_thread(self._server.get_text, "/v1/models")
        room = json.loads(text_of_models)["data"][0]["max_model_len"] - _STREAM_PROMPT_TOKENS
        tokens = max(2, min(_STREAM_TOKENS, room))
        body = _body(text, level=0, tokens=tokens, stream=True, return_token_ids=True)
        while True:
            async with session.post("/v1/completions", json=body) as response:
                await _check(response)
                last = None
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    now = time.perf_counter()
                    message = json.loads(line[6:])
                    if "error" in message:
                        raise RuntimeError(f"a stream failed: {message['error']}")
                    # A busy HTTP server joins messages, but the engine made a step for each token.
                    got = sum(len(item.get("token_ids") or ()) for item in message["choices"])
                    if last is not None:
                        self._gaps += [(now, (now - last) / got)] * got
                    if got:
                        last = now


def _body(prompt: str | list[str], level: int, tokens: int, **more: object) -> Mapping[str, object]:
    return {
        "model": "bench",
        "prompt": prompt,
        "temperature": 0.0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "vllm_xargs": {"urgency": level},
        **more,
    }


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise RuntimeError(f"the server refused: {(await response.text())[:500]}")


def pool_phases(phases: Sequence[Phase]) -> StepTimes:
    """Pool the phases of one condition; RuntimeError if no token arrived."""
    gaps = [gap for phase in phases for gap in phase.gaps]
    if not gaps:
        raise RuntimeError("no token arrived in a whole phase")
    used = [phase.predictor_seconds for phase in phases if phase.predictor_seconds is not None]
    seconds = sum(phase.end - phase.start for phase in phases)
    return StepTimes(
        len(gaps),
        *percentiles(gaps),
        sum(used) / seconds if used else None,
        sum(phase.served for phase in phases),
    )
