"""`semsched bench tiers`: premium, standard and background traffic under overload (S10).

A quarter of the requests is premium, half standard, a quarter background, for a fixed time. Each
scheduler gets the same requests on a real `vllm serve`; what is unanswered some seconds after the
last arrival is given up and counts as a promise that was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_semantic_sched.bench.options import add_server_arguments, make_server

if TYPE_CHECKING:
    from vllm_semantic_sched.bench.client import ClientConfig, Record
    from vllm_semantic_sched.bench.schedulers import SchedulerSpec
    from vllm_semantic_sched.bench.server import ServerConfig

_TIERS = ("premium", "standard", "background")
_MIX = "1:2:1:0:0"
MIDDLEWARE = ("--middleware", "vllm_semantic_sched.Middleware")
_CAPACITY_ROUNDS = 6  # requests per seat, so that filling and emptying the seats weigh little
_IDLE_REQUESTS = 24
SPARE_TOKENS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench tiers`."""
    add_server_arguments(parser)
    add = parser.add_argument
    add("--policy", default="tiers", help="three tiers: a name or a YAML file (%(default)s)")
    add("--seconds", type=float, default=120.0, help="of arrivals (default: %(default)s)")
    add("--drain", type=float, default=20.0, help="seconds for what is left (%(default)s)")
    add("--overload", type=float, default=3.0, help="offered load over capacity (%(default)s)")
    add("--maxcon", type=int, default=12, help="largest burst (default: %(default)s)")
    add("--promise", type=float, default=10.0, help="premium: TTFT in idle TTFTs (%(default)s)")
    add("--seed", type=int, default=0, help="of the workload (default: %(default)s)")
    add("--max-output", type=int, default=192, help="longer answers are cut (%(default)s)")


@dataclass(frozen=True)
class TierRow:
    """One tier under one scheduler; seconds. `kept` is the share of the requests that were let
    in whose first token came in time; `longest_wait` is that of an answered request."""

    scheduler: str
    tier: str
    sent: int
    answered: int
    refused: Mapping[str, int]
    unanswered: int
    ttft_p50: float
    ttft_p99: float
    kept: float
    longest_wait: float


def run(args: argparse.Namespace) -> int:
    """Run the four schedulers; 1 if a request failed without a code."""
    from vllm_semantic_sched.bench.console import make_console
    from vllm_semantic_sched.bench.report import print_problems

    args.output.mkdir(parents=True, exist_ok=True)
    study = _Study(args)
    rows: list[TierRow] = []
    totals: list[dict[str, Any]] = []
    for spec in (None, *_NAMES):
        done, total = study.measure(spec)
        rows += done
        totals.append(total)
        result = {"rows": [asdict(row) for row in rows], "totals": totals, **study.facts}
        (args.output / "tiers.json").write_text(json.dumps(result, indent=1))
    console = make_console()
    _print(console, rows, totals, study.facts)
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
        rows = [self._row(spec, level, records) for level in range(len(_TIERS))]
        return rows, self._total(spec, records, before, after, horizon)

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
        idle = self.facts["idle_ttft"]
        for tier, factor in zip(data["tiers"], (1.0, 20.0, None), strict=True):
            slo = tier.get("slo", {})
            tier["slo"] = {"percentile": slo.get("percentile", 99.0)}
            if promises and factor is not None:
                tier["slo"]["ttft"] = factor * self._args.promise * idle
            if not promises:
                tier.pop("queue", None)
                tier.pop("shed_order", None)
        if not promises:
            for section in ("admission", "shedding", "deadlines", "aging"):
                data.pop(section, None)
        path = self._args.output / f"{'promises' if promises else 'no-promises'}.yaml"
        path.write_text(yaml.safe_dump(data, sort_keys=False))
        return path

    def _set_load(self, spec: SchedulerSpec, client: ClientConfig) -> None:
        from vllm_semantic_sched.bench.client import send_one_by_one, send_open_loop
        from vllm_semantic_sched.bench.metrics import duration

        warm = self._sample(_IDLE_REQUESTS)
        asyncio.run(send_open_loop(warm, replace(client, progress=None), spec.body_extras))
        alone = asyncio.run(send_one_by_one(self._sample(_IDLE_REQUESTS), client, spec.body_extras))
        ttfts = sorted(one.first_token - one.arrival for one in alone if one.first_token)
        together = self._sample(_CAPACITY_ROUNDS * self._args.seats)
        done = asyncio.run(send_open_loop(together, client, spec.body_extras))
        capacity = len(done) / duration(done)
        self._gap = self._args.maxcon / 2 / (self._args.overload * capacity)
        self.facts = {
            "idle_ttft": ttfts[len(ttfts) // 2],
            "promised_ttft": self._args.promise * ttfts[len(ttfts) // 2],
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

    def _row(self, spec: SchedulerSpec, level: int, records: Sequence[Record]) -> TierRow:
        import numpy as np

        mine = [record for record in records if record.level == level]
        ttfts = [one.first_token - one.arrival for one in mine if one.first_token is not None]
        refused = Counter(code for one in mine if (code := refusal_code(one)) is not None)
        admitted = len(mine) - refused.total()
        in_time = sum(ttft <= self.facts["promised_ttft"] for ttft in ttfts)
        p50, p99 = np.percentile(ttfts, [50, 99]) if ttfts else (float("nan"),) * 2
        return TierRow(
            spec.name,
            _TIERS[level],
            sent=len(mine),
            answered=sum(one.ok for one in mine),
            refused=dict(refused),
            unanswered=sum(one.finish is None and refusal_code(one) is None for one in mine),
            ttft_p50=float(p50),
            ttft_p99=float(p99),
            kept=in_time / admitted if admitted else float("nan"),
            longest_wait=max(ttfts, default=float("nan")),
        )

    def _total(
        self,
        spec: SchedulerSpec,
        records: Sequence[Record],
        before: Mapping[str, float],
        after: Mapping[str, float],
        horizon: float,
    ) -> dict[str, Any]:
        name = "vllm:num_preemptions_total"
        end = max((one.finish for one in records if one.finish), default=horizon)
        strange = sum(
            one.status not in (None, 200) and refusal_code(one) is None for one in records
        )
        return {
            "scheduler": spec.name,
            "output_tokens_per_second": sum(len(one.token_ids) for one in records) / end,
            "preemptions_per_minute": 60 * (after[name] - before[name]) / end,
            "latest_send": max(one.sent - one.arrival for one in records if one.sent is not None),
            "strange": f"{strange} requests failed without a code" if strange else "",
        }


def refusal_code(record: Record) -> str | None:
    """The code that a request was refused with, as the middleware gives it; else None."""
    if record.error is None or not record.error.startswith("{"):
        return None
    try:
        body = json.loads(record.error)
    except ValueError:
        return None
    error = body.get("error", body)
    return str(error["code"]) if "retry_after" in error else None


def _print(
    console: Any, rows: Sequence[TierRow], totals: Sequence[Mapping[str, Any]], facts: Any
) -> None:
    from rich import box
    from rich.table import Table

    table = Table(title="tiers under overload", box=box.SIMPLE)
    for column in (
        "scheduler",
        "tier",
        "sent",
        "answered",
        "refused",
        "unanswered",
        "TTFT p50, s",
        "TTFT p99, s",
        "in time",
        "longest wait, s",
    ):
        table.add_column(column, justify="left" if column in ("scheduler", "tier") else "right")
    for row in rows:
        refused = ", ".join(f"{count} {code}" for code, count in row.refused.items()) or "0"
        table.add_row(
            *(row.scheduler, row.tier, str(row.sent), str(row.answered), refused),
            *(str(row.unanswered), f"{row.ttft_p50:.3f}", f"{row.ttft_p99:.3f}"),
            *(f"{row.kept:.1%}", f"{row.longest_wait:.1f}"),
        )
    console.print(table)
    second = Table(title="totals", box=box.SIMPLE)
    for column in ("scheduler", "output tok/s", "vs FCFS", "preemptions/min", "latest send, s"):
        second.add_column(column, justify="left" if column == "scheduler" else "right")
    first = totals[0]["output_tokens_per_second"]
    for total in totals:
        speed = total["output_tokens_per_second"]
        second.add_row(
            total["scheduler"],
            f"{speed:.0f}",
            f"{speed / first:.3f}",
            f"{total['preemptions_per_minute']:.0f}",
            f"{total['latest_send']:.2f}",
        )
    console.print(second)
    console.print(
        f"idle TTFT {facts['idle_ttft']:.3f} s; in time: first token within "
        f"{facts['promised_ttft']:.3f} s, of all requests that were not refused; capacity "
        f"{facts['capacity_requests_per_second']:.1f} requests/s"
    )
