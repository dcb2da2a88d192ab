"""`semsched bench tiers`: premium, standard and background traffic under overload (S10).

A quarter of the requests is premium, half standard, a quarter background, for a fixed time. Each
scheduler gets the same requests on a real `vllm serve`; what is unanswered some seconds after the
last arrival is given up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_semantic_sched.bench.options import add_server_arguments, make_server
from vllm_semantic_sched.bench.tier_table import (
    TIERS,
    TierRow,
    beyond_bound,
    print_tables,
    tier_row,
    totals_of,
)

if TYPE_CHECKING:
    from vllm_semantic_sched.bench.client import ClientConfig
    from vllm_semantic_sched.bench.schedulers import SchedulerSpec
    from vllm_semantic_sched.bench.server import ServerConfig

_MIX = "1:2:1:0:0"
MIDDLEWARE = ("--middleware", "vllm_semantic_sched.Middleware")
_CAPACITY_ROUNDS = 6  # requests per seat, so that filling and emptying the seats weigh little
_IDLE_REQUESTS = 24
# Of the standard tier: its promise in premium's. Background is promised nothing.
_STANDARD_PROMISE = 20.0
# Seconds per promotion, so that background grows overdue within the run.
_AGING_INTERVAL = 10.0
SPARE_TOKENS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench tiers`."""
    add_server_arguments(parser)
    add = parser.add_argument
    add("--policy", default="tiers", help="three tiers: a name or a YAML file (%(default)s)")
    add("--profile", help="engine profile, by name or path; measure one with semsched profile")
    add("--seconds", type=float, default=120.0, help="of arrivals (default: %(default)s)")
    add("--drain", type=float, default=20.0, help="seconds for what is left (%(default)s)")
    add("--overload", type=float, default=3.0, help="offered load over capacity (%(default)s)")
    add("--maxcon", type=int, default=12, help="largest burst (default: %(default)s)")
    add("--promise", type=float, default=10.0, help="premium: TTFT in idle TTFTs (%(default)s)")
    add("--seed", type=int, default=0, help="of the workload (default: %(default)s)")
    add("--max-output", type=int, default=192, help="longer answers are cut (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Run the four schedulers; 1 if a request failed without a code."""
    from vllm_semantic_sched.bench.console import make_console
    from vllm_semantic_sched.bench.report import print_problems

    args.output.mkdir(parents=True, exist_ok=True)
    study = _Study(args)
    rows: list[TierRow] = []
    totals: list[dict[str, Any]] = []
    for name in (None, *_NAMES):
        done, total = study.measure(name)
        rows += done
        totals.append(total)
        result = {"rows": [asdict(row) for row in rows], "totals": totals, **study.facts}
        (args.output / "tiers.json").write_text(json.dumps(result, indent=1))
    console = make_console()
    print_tables(console, rows, totals, study.facts)
    console.print(f"records: {args.output / 'tiers.json'}", soft_wrap=True)
    strange = [f"{total['scheduler']}: {total['strange']}" for total in totals if total["strange"]]
    return print_problems(console, strange)


_NAMES = ("vLLM priority", "ours, no promises", "ours")


class _Study:
    """The servers, one after another; the load is fixed by the first one's capacity."""

    def __init__(self, args: argparse.Namespace) -> None:
        from vllm_semantic_sched.bench.compare import end_token
        from vllm_semantic_sched.bench.server import prefer_client

        self._args = args
        self._server: ServerConfig = make_server(args)
        self._eos = end_token(args.model)
        self._gap = 0.0
        self.facts: dict[str, float] = {}
        prefer_client(args.nice)

    def measure(self, name: str | None) -> tuple[list[TierRow], dict[str, Any]]:
        """Start a server and run the load on it; the first (None, vLLM's FCFS) sets the load."""
        from vllm_semantic_sched.bench.client import ClientConfig, send_open_loop
        from vllm_semantic_sched.bench.compare import read_counters
        from vllm_semantic_sched.bench.server import VllmServer
        from vllm_semantic_sched.policy.config import load_policy

        spec = self._spec(name)
        print(f"starting the server: {spec.name}", flush=True)
        log = self._args.output / f"server-{spec.name.replace(' ', '-').replace(',', '')}.log"
        config = replace(self._server, log=log, scheduler_args=spec.server_args())
        with VllmServer(config) as server:
            client = ClientConfig(
                url=server.url,
                eos_token=self._eos,
                max_tokens=self._args.max_output + SPARE_TOKENS,
                progress=None if self._args.quiet else spec.name,
            )
            self._warm_up(spec, client)
            if not self._gap:
                self._set_load(spec, client)
            before = read_counters(server.get_text("/metrics"))
            horizon = self._args.seconds + self._args.drain
            records = asyncio.run(
                send_open_loop(
                    self._workload(self._gap, self._args.seconds).requests,
                    replace(client, stop_after=horizon),
                    spec.body_extras,
                )
            )
            server.check()
            after = read_counters(server.get_text("/metrics"))
        promises = self._promises()
        rows = [
            tier_row(spec.name, level, promises[level], records, horizon)
            for level in range(len(TIERS))
        ]
        total = totals_of(spec.name, records, before, after, horizon)
        if spec.policy is not None:
            aging = load_policy(spec.policy).aging
            total["bound"] = beyond_bound(aging, len(TIERS) - 1, records, horizon)
        return rows, total

    def _promises(self) -> tuple[float | None, ...]:
        """Seconds to the first token by tier."""
        return self.facts["promised_ttft"], self.facts["promised_ttft_standard"], None

    def _spec(self, name: str | None) -> SchedulerSpec:
        from vllm_semantic_sched.bench.schedulers import SchedulerSpec

        if name is None:
            return SchedulerSpec("vLLM FCFS", "fcfs")
        if name == _NAMES[0]:
            return SchedulerSpec(name, "priority")
        policy = self._policy(promises=name == _NAMES[2])
        return SchedulerSpec(name, "semantic-true", str(policy), MIDDLEWARE)

    def _policy(self, promises: bool) -> Path:
        """The policy with the promises that this machine can keep, or with none at all."""
        import yaml

        from vllm_semantic_sched.policy.files import read_config

        data, _ = read_config(self._args.policy, "policy")
        if self._args.profile:
            data["profile"] = self._args.profile
        for tier, ttft in zip(data["tiers"], self._promises(), strict=True):
            slo = tier.get("slo", {})
            tier["slo"] = {key: slo[key] for key in ("percentile", "takes_seats") if key in slo}
            if promises and ttft is not None:
                tier["slo"]["ttft"] = ttft
            if not promises:
                tier.pop("queue", None)
                tier.pop("shed_order", None)
        if promises:
            data["aging"] = {**data.get("aging", {}), "interval": _AGING_INTERVAL}
        else:
            for section in ("admission", "shedding", "deadlines", "aging"):
                data.pop(section, None)
        path = self._args.output / f"{'promises' if promises else 'no-promises'}.yaml"
        path.write_text(yaml.safe_dump(data, sort_keys=False))
        return path

    def _warm_up(self, spec: SchedulerSpec, client: ClientConfig) -> None:
        from vllm_semantic_sched.bench.client import send_open_loop

        warm = self._sample(_IDLE_REQUESTS)
        asyncio.run(send_open_loop(warm, replace(client, progress=None), spec.body_extras))

    def _set_load(self, spec: SchedulerSpec, client: ClientConfig) -> None:
        from vllm_semantic_sched.bench.client import send_one_by_one, send_open_loop
        from vllm_semantic_sched.bench.metrics import duration

        alone = asyncio.run(send_one_by_one(self._sample(_IDLE_REQUESTS), client, spec.body_extras))
        ttfts = sorted(one.first_token - one.arrival for one in alone if one.first_token)
        together = self._sample(_CAPACITY_ROUNDS * self._args.seats)
        done = asyncio.run(send_open_loop(together, client, spec.body_extras))
        capacity = len(done) / duration(done)
        self._gap = self._args.maxcon / 2 / (self._args.overload * capacity)
        self.facts = {
            "idle_ttft": ttfts[len(ttfts) // 2],
            "promised_ttft": (promised := self._args.promise * ttfts[len(ttfts) // 2]),
            "promised_ttft_standard": _STANDARD_PROMISE * promised,
            "capacity_requests_per_second": capacity,
        }

    def _sample(self, count: int) -> list[Any]:
        load = self._workload(0.0, 0.0, requests=count, seed=self._args.seed + 1_000_003)
        return [replace(request, arrival=0.0) for request in load.requests]

    def _workload(
        self, gap: float, seconds: float, requests: int | None = None, seed: int | None = None
    ) -> Any:
        from vllm_semantic_sched.bench.load import WorkloadConfig
        from vllm_semantic_sched.bench.workload import make_workload

        count = requests or int(seconds / gap * self._args.maxcon / 2)
        return make_workload(
            WorkloadConfig(
                requests=count,
                mix=_MIX,
                gap=gap,
                max_burst=self._args.maxcon,
                seed=self._args.seed if seed is None else seed,
                max_output_tokens=self._args.max_output,
            )
        )
