"""Runs the same workload through several schedulers, one server each."""

import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from vllm_semantic_sched.lab.bench.client import LoadClient, Progress, Record
from vllm_semantic_sched.lab.bench.device_use import read_use
from vllm_semantic_sched.lab.bench.metrics import Difference, differences, explain, throughput
from vllm_semantic_sched.lab.bench.results import Comparison, Round
from vllm_semantic_sched.lab.bench.schedulers import SchedulerSpec, read_levels, with_shared_servers
from vllm_semantic_sched.lab.bench.server import ServerConfig, VllmServer, has_gpu, prefer_client
from vllm_semantic_sched.lab.bench.usage import Usage
from vllm_semantic_sched.lab.bench.workload import BenchRequest, Workload, make_workload

CAPACITY_ROUNDS = 6
"""Requests per seat in a measurement of capacity: filling and emptying seats is negligible."""
OTHER_SEED = 1_000_003
"""Added to the seed of a workload for requests of the same kind that it does not contain."""

_WARM_UP_REQUESTS = 24
_FEWEST = 40  # requests of a load that is cut to fit a time: two of the rare mix are urgent
_QUICK_ROUNDS = 3  # in place of CAPACITY_ROUNDS


@dataclass(frozen=True)
class Visit:
    """One start of a server, the schedulers that it stands in for, and the mixes of each."""

    number: int
    specs: tuple[SchedulerSpec, ...]
    mixes: tuple[str, ...]
    attempt: int = 1

    @property
    def leader(self) -> SchedulerSpec:
        """The scheduler that the server is configured for. One that reads texts also takes hints;
        one with priorities also does without them."""
        able = (spec for spec in self.specs if spec.kind == "priority" or spec.reads_text)
        return next(able, self.specs[0])

    @property
    def name(self) -> str:
        """The number of the round and, if it was repeated, the attempt: part of file names."""
        return f"{self.number}" if self.attempt == 1 else f"{self.number}.{self.attempt}"


@dataclass(frozen=True)
class RunPlan:
    """What a comparison runs; ValueError without a scheduler, workload or round.

    With `overload`, the workloads offer that many times the output tokens per second that the first
    server can give. Every scheduler runs `rounds` times, in reversed order every second time:
    a steady drift of the machine's speed averages out. A mix from which the hypervisor took too
    much time is repeated at the end of the round, up to `repeats` times. With `quick`, schedulers
    share servers where they can, servers start together without a GPU, fewer requests measure the
    capacity and the idle engine, and the latter only on the first server. `capacity`: output tokens
    per second, if they are known. `minutes`: with an `overload`, workloads have fewer requests, but
    at least 40, if answering them would take longer in all rounds of all schedulers together."""

    server: ServerConfig
    schedulers: Sequence[SchedulerSpec]
    workloads: Sequence[Workload]
    output: Path
    overload: float | None
    rounds: int = 1
    repeats: int = 0
    quick: bool = False
    capacity: float | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1 or not self.schedulers or not self.workloads:
            raise ValueError("a comparison needs at least one scheduler, workload and round")
        if self.repeats < 0:
            raise ValueError(f"repeats must be at least 0, got {self.repeats}")
        if self.minutes is not None and self.minutes <= 0:
            raise ValueError(f"minutes must be above 0, got {self.minutes}")

    def visits(self, number: int) -> Iterator[Visit]:
        """Yield the servers of a round, counted from 1, in the order of their start."""
        mixes = tuple(workload.config.mix for workload in self.workloads)
        alone = [(spec,) for spec in self.schedulers]
        groups = with_shared_servers(self.schedulers) if self.quick else alone
        in_order = groups if number % 2 else reversed(groups)
        for specs in in_order:
            yield Visit(number, specs, mixes)


def compare(plan: RunPlan, options: Mapping[str, object], progress: Progress) -> Comparison:
    """Run every workload on every scheduler, in every round. Writes logs and, after each server,
    `results.json`, so that an interrupted run is not lost. ServerFailed if a server did not start
    or ended; ValueError if the first, which also gives the capacity, answered no request."""
    run = _Run(plan, Comparison(options), progress)
    prefer_client(plan.server.nice)
    for number in range(1, plan.rounds + 1):
        pending = [(visit, run.server(visit)) for visit in plan.visits(number)]
        with contextlib.ExitStack() as launched:
            if plan.quick and not has_gpu():
                # A start keeps one core busy; a server that waits for its turn uses none.
                for _, server in pending:
                    launched.callback(server.stop)
                    server.launch()
            while pending:
                visit, server = pending.pop(0)
                noisy = run.serve(visit, server)
                run.comparison.write(plan.output / "results.json")
                if noisy and visit.attempt <= plan.repeats:
                    # At the end of the round: steal comes and goes in minutes.
                    again = replace(visit, mixes=noisy, attempt=visit.attempt + 1)
                    pending.append((again, run.server(again)))
    return run.comparison


@dataclass
class _Run:
    """A comparison under way. `workloads` get their pace from the first server."""

    plan: RunPlan
    comparison: Comparison
    progress: Progress
    workloads: Sequence[Workload] | None = None
    idle: dict[str, tuple[Sequence[Record], Usage]] = field(default_factory=dict)  # by mix

    def server(self, visit: Visit) -> VllmServer:
        """The server of a visit, not started."""
        return VllmServer(visit.leader.configure(self.plan.server, self.plan.output, visit.name))

    def serve(self, visit: Visit, server: VllmServer) -> tuple[str, ...]:
        """Measure the visit's mixes on its server, which is started and stopped here, and add the
        rounds; return the mixes with too much steal."""
        number = f"round {visit.name} of {self.plan.rounds}"
        names = ", ".join(spec.name for spec in visit.specs)
        self.progress.message(f"starting the server: {names}, {number}")
        measured: list[tuple[SchedulerSpec, str, Round]] = []
        with server:
            client = self._client(visit.specs[0], server)
            client.send_together(self._other_requests(_WARM_UP_REQUESTS, "even", 32))
            if self.workloads is None:
                self.workloads = self._set_pace(client)
            for spec, workload in itertools.product(visit.specs, self.workloads):
                mix = workload.config.mix
                if mix in visit.mixes:
                    label = f"{spec.name}, {number}, {mix}"
                    done = self._measure(visit, spec, workload, server, label)
                    self.comparison.add(spec, workload, done)
                    measured.append((spec, mix, done))
        levels = read_levels(visit.leader.events_file(self.plan.output, visit.name))
        for spec, mix, done in measured:
            for record in done.records:
                record.read_level = levels.get(spec.request_id(mix, record.index))
        return tuple(dict.fromkeys(mix for _, mix, done in measured if not done.calm))

    def _client(self, spec: SchedulerSpec, server: VllmServer) -> LoadClient:
        load = self.plan.workloads[0].config
        return spec.client(server, load.max_output_tokens, self.progress, load.natural)

    def _measure(
        self, visit: Visit, spec: SchedulerSpec, workload: Workload, server: VllmServer, label: str
    ) -> Round:
        client = self._client(spec, server)
        mix = workload.config.mix

        def extras(request: BenchRequest) -> Mapping[str, Any]:
            # vLLM's prefix cache keeps requests with another salt apart, also on a shared server.
            return {
                **client.extras(request),
                "request_id": spec.request_id(mix, request.index),
                "cache_salt": spec.kind,
            }

        start = Usage.now(server)
        begin = time.monotonic()
        records = replace(client, extras=extras).send(self._told(spec, workload), label)
        server.check()
        loaded = Usage.now(server)
        # Not before the load: the predictor would remember the texts.
        if not self.plan.quick or mix not in self.idle:
            alone = measure_idle(client, workload, f"{label}, idle engine", self.plan.quick)
            self.idle[mix] = alone, Usage.now(server).since(loaded)
        idle, idle_usage = self.idle[mix]
        device = None
        if server.config.device is not None:
            # Until the last arrival: then only long answers are left.
            end = begin + workload.requests[-1].arrival
            device = read_use(Path(server.config.device["trace"]), begin, end)
        return Round(
            number=visit.number,
            records=records,
            name=visit.name,
            idle=idle,
            usage=loaded.since(start),
            idle_usage=idle_usage,
            differences=self._differences(records, workload, client),
            device=device,
        )

    def _told(self, spec: SchedulerSpec, workload: Workload) -> Sequence[BenchRequest]:
        """The requests; where answers end by themselves and a scheduler is told their lengths,
        with those of the first scheduler's answers, which are greedy too."""
        first = self.comparison.reference(workload.config.mix)
        if spec.kind != "semantic-known" or not workload.config.natural or first is None:
            return workload.requests
        return [
            replace(request, output_tokens=record.output_tokens or request.output_tokens)
            for request, record in zip(workload.requests, first.records, strict=True)
        ]

    def _set_pace(self, client: LoadClient) -> Sequence[Workload]:
        """The workloads at the wanted overload, whatever the speed of this machine."""
        plan = self.plan
        if plan.overload is None:
            return plan.workloads
        capacity = plan.capacity or self._capacity(client)
        paced = []
        for workload in plan.workloads:
            load = workload.config
            seconds_each = workload.output_tokens / len(workload.requests) / capacity
            gap = load.max_burst / 2 * seconds_each / plan.overload
            requests = self._fitting(load.requests, seconds_each)
            paced.append(make_workload(replace(load, gap=gap, requests=requests)))
        return paced

    def _fitting(self, requests: int, seconds_each: float) -> int:
        """As many of the requests as can be answered within the plan's minutes."""
        plan = self.plan
        if plan.minutes is None:
            return requests
        runs = plan.rounds * len(plan.schedulers) * len(plan.workloads)
        answered = int(plan.minutes * 60 / (runs * seconds_each))
        fitting = min(requests, max(_FEWEST, answered))
        if fitting < requests:
            self.progress.message(f"{fitting} requests instead of {requests}: this machine is slow")
        return fitting

    def _capacity(self, client: LoadClient) -> float:
        """Output tokens per second of the server when more requests wait than it has seats."""
        plan = self.plan
        like = plan.workloads[0].config
        count = (_QUICK_ROUNDS if plan.quick else CAPACITY_ROUNDS) * plan.server.seats
        requests = self._other_requests(count, like.mix, like.max_output_tokens)
        capacity = throughput(client.send_together(requests, "capacity"))
        if capacity <= 0:
            raise ValueError("the first server answered no request")
        return capacity

    def _other_requests(self, count: int, mix: str, max_tokens: int) -> tuple[BenchRequest, ...]:
        """Requests of the same kind that the measured workloads do not contain."""
        like = self.plan.workloads[0].config
        like = replace(like, requests=count, mix=mix, max_output_tokens=max_tokens)
        return make_workload(replace(like, seed=like.seed + OTHER_SEED)).requests

    def _differences(
        self, records: Sequence[Record], workload: Workload, client: LoadClient
    ) -> list[Difference]:
        """The outputs that differ from the reference's, with their margins. Their requests are sent
        again with log-probabilities, which would slow the server down in the measured run."""
        reference = self.comparison.reference(workload.config.mix)
        differing = differences(reference.records, records) if reference else []
        if not differing:
            return []
        # A request's index is its place in the workload, and so in the records.
        requests = [workload.requests[difference.index] for difference in differing]
        repeated = replace(client, record_margins=True).send_one_by_one(requests)
        return [
            explain(difference, records[difference.index], again)
            for difference, again in zip(differing, repeated, strict=True)
        ]


def idle_sample(requests: Sequence[BenchRequest], quick: bool = False) -> list[BenchRequest]:
    """Return at most 24 requests of level 0, evenly spread, and four others from the shortest to
    the longest text, for the cost of a prompt's tokens; if `quick`, 4 and 2."""
    most_urgent = 4 if quick else 24
    most_others = 2 if quick else 4
    urgent = [request for request in requests if request.level == 0]
    others = [request for request in requests if request.level > 0]
    others.sort(key=lambda request: len(request.prompt))
    sample = []
    for group, count in ((urgent, most_urgent), (others, most_others)):
        places = np.linspace(0, len(group) - 1, min(count, len(group))).round().astype(int)
        sample += [group[place] for place in places]
    return sample


def measure_idle(
    client: LoadClient, workload: Workload, label: str, quick: bool = False
) -> list[Record]:
    """Send `idle_sample` one by one. KV from the load is not reused."""
    # vLLM's prefix cache keeps requests with another salt apart.
    idle = replace(client, extras=lambda request: {**client.extras(request), "cache_salt": "idle"})
    return idle.send_one_by_one(idle_sample(workload.requests, quick), label)
