"""Premium, standard and background traffic under overload, on a real `vllm serve`.

A quarter of the requests is premium, half standard and a quarter background, for a fixed time.
Four schedulers get the same requests; requests that are unanswered some seconds after the last
arrival are given up. Prints a row per tier and writes `tiers.json`.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from common import capacity, main, percentiles, refusal_code, serve, write_json

from vllm_semantic_sched.cli.console import make_console, print_table
from vllm_semantic_sched.lab.bench.command_line import add_server_arguments, print_problems
from vllm_semantic_sched.lab.bench.compare import CAPACITY_ROUNDS, OTHER_SEED
from vllm_semantic_sched.lab.bench.metrics import latest_send
from vllm_semantic_sched.lab.bench.schedulers import SchedulerSpec
from vllm_semantic_sched.lab.bench.usage import read_counters
from vllm_semantic_sched.lab.bench.workload import Workload, WorkloadConfig, make_workload
from vllm_semantic_sched.policy.config import load_policy
from vllm_semantic_sched.policy.config.files import read_config
from vllm_semantic_sched.policy.order.credit import SHARE, promotions_to_overdue

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_semantic_sched.lab.bench.client import LoadClient, Record
    from vllm_semantic_sched.policy.config.order import Aging

TIERS = ("premium", "standard", "background")

_MIX = "1:2:1:0:0"
_FCFS = "vLLM FCFS"
_PRIORITY = "vLLM priority"
_NO_SLOS = "ours, no SLOs"
_SLOS = "ours"
SCHEDULERS = (_FCFS, _PRIORITY, _NO_SLOS, _SLOS)
_IDLE_REQUESTS = 24
# The standard tier's SLO relative to the premium tier's. Background has none.
_STANDARD_SLO = 20.0
# Seconds per promotion, short enough for background requests to become overdue within the run.
_AGING_INTERVAL = 10.0


@dataclass(frozen=True)
class TierRow:
    """One tier under one scheduler. Times in seconds; `kept`: share of all requests sent whose
    first token came in time, None without an SLO; `longest_wait`: for a first token, including
    requests that still waited at the end."""

    scheduler: str
    tier: str
    sent: int
    answered: int
    refused: Mapping[str, int]
    unanswered: int
    ttft_p50: float
    ttft_p99: float
    kept: float | None
    longest_wait: float


def tier_row(
    scheduler: str, level: int, target: float | None, records: Sequence[Record], horizon: float
) -> TierRow:
    """Evaluate one tier, of the records of all. `target`: seconds to the first token, None without
    an SLO; `horizon`: seconds after which requests were given up."""
    mine = [record for record in records if record.level == level]
    ttfts = [record.ttft for record in mine if record.ttft is not None]
    codes = [refusal_code(record) for record in mine]
    refused = Counter(code for code in codes if code is not None)
    waiting = [
        horizon - record.arrival
        for record, code in zip(mine, codes, strict=True)
        if record.first_token is None and code is None
    ]
    p50, p99 = percentiles(ttfts)
    kept = None
    if target is not None:
        kept = sum(ttft <= target for ttft in ttfts) / len(mine) if mine else float("nan")
    return TierRow(
        scheduler,
        TIERS[level],
        sent=len(mine),
        answered=sum(record.ok for record in mine),
        refused=dict(refused),
        unanswered=sum(record.finish is None and refusal_code(record) is None for record in mine),
        ttft_p50=p50,
        ttft_p99=p99,
        kept=kept,
        longest_wait=max([*ttfts, *waiting], default=float("nan")),
    )


def totals_of(
    scheduler: str, records: Sequence[Record], preemptions: float, horizon: float
) -> dict[str, Any]:
    """Summarize all tiers under one scheduler; `failed`: requests that failed without a code."""
    end = max((record.finish for record in records if record.finish), default=horizon)
    return {
        "scheduler": scheduler,
        "output_tokens_per_second": sum(len(record.token_ids) for record in records) / end,
        "preemptions_per_minute": 60 * preemptions / end,
        "latest_send": latest_send(records),
        "failed": sum(
            record.status not in (None, 200) and refusal_code(record) is None for record in records
        ),
    }


def seconds_to_overdue(aging: Aging, level: int) -> float | None:
    """Waiting time after which a request of a level is overdue; None: never."""
    return aging.interval * promotions_to_overdue(level) if aging.enabled else None


def wait_bound(
    aging: Aging, level: int, older: int, admission_gap: float, seat_seconds: float = 0.0
) -> float | None:
    """Most seconds until the first seat, with the symbols of `policy.order.credit`: q `older`
    requests, T `admission_gap` and S `seat_seconds`. None: unbounded."""
    overdue = seconds_to_overdue(aging, level)
    if overdue is None:
        return None
    per_request = round(1.0 / SHARE) * admission_gap + seat_seconds
    return overdue + (older + 1) * per_request


def compare_with_aging_bound(
    aging: Aging, level: int, records: Sequence[Record], horizon: float
) -> dict[str, float] | None:
    """Compare the waits of a level with `wait_bound`; None if there is no bound. Its q and T are
    those of the run: the number of older requests that waited on arrival, and the longest time
    between two first tokens."""
    if not aging.enabled:
        return None
    starts = sorted(record.first_token for record in records if record.first_token is not None)
    gaps = (after - before for before, after in itertools.pairwise(starts))
    longest_gap = max(gaps, default=horizon)
    ends = [(record.arrival, _end_of_wait(record, horizon)) for record in records]
    waits = []
    for record in records:
        if record.level == level and refusal_code(record) is None:
            older = sum(arrival < record.arrival < end for arrival, end in ends)
            bound = wait_bound(aging, level, older, longest_gap)
            if bound is None:
                return None
            waits.append((_end_of_wait(record, horizon) - record.arrival, bound))
    if not waits:
        return None
    longest_wait, its_bound = max(waits)
    beyond = sum(wait > bound for wait, bound in waits)
    return {
        "requests": len(waits),
        "beyond": beyond,
        "wait": longest_wait,
        "bound": its_bound,
    }


def _end_of_wait(record: Record, horizon: float) -> float:
    return min(
        [time for time in (record.first_token, record.finish) if time is not None], default=horizon
    )


class Study:
    """The servers, one after another. The capacity of the first one sets the load of all."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._load: Workload | None = None
        self.facts: dict[str, float] = {}

    def measure(self, name: str) -> tuple[list[TierRow], dict[str, Any]]:
        """Start a server with a scheduler and send it the load."""
        args = self._args
        spec = self._spec(name)
        horizon = args.seconds + args.drain
        with serve(args, spec, args.max_output) as (server, client):
            client.send_together(self._sample(_IDLE_REQUESTS))  # warm-up
            if self._load is None:
                self._load = self._set_load(client)
            before = read_counters(server.get_text("/metrics"))
            records = client.send(self._load.requests, spec.name, stop_after=horizon)
            server.check()
            after = read_counters(server.get_text("/metrics"))
        rows = [
            tier_row(spec.name, level, target, records, horizon)
            for level, target in enumerate(self._slos())
        ]
        counter = "vllm:num_preemptions_total"
        total = totals_of(spec.name, records, after[counter] - before[counter], horizon)
        if spec.policy is not None:
            aging = load_policy(spec.policy).aging
            total["bound"] = compare_with_aging_bound(aging, len(TIERS) - 1, records, horizon)
        return rows, total

    def _slos(self) -> tuple[float | None, ...]:
        """Seconds to the first token by tier."""
        return self.facts["slo_ttft"], self.facts["slo_ttft_standard"], None

    def _spec(self, name: str) -> SchedulerSpec:
        if name == _FCFS:
            return SchedulerSpec(name, "fcfs")
        if name == _PRIORITY:
            return SchedulerSpec(name, "priority")
        policy = self._write_policy(with_slos=name == _SLOS)
        return SchedulerSpec(name, "semantic-true", str(policy))

    def _write_policy(self, with_slos: bool) -> Path:
        """The policy with SLOs that this machine can meet, or with none."""
        data, _ = read_config(self._args.policy, "policy")
        if self._args.profile:
            data["profile"] = self._args.profile
        for tier, ttft in zip(data["tiers"], self._slos(), strict=True):
            slo = tier.get("slo", {})
            tier["slo"] = {key: slo[key] for key in ("percentile", "takes_seats") if key in slo}
            if with_slos and ttft is not None:
                tier["slo"]["ttft"] = ttft
            if not with_slos:
                tier.pop("queue", None)
                tier.pop("shed_order", None)
        if with_slos:
            data["aging"] = {**data.get("aging", {}), "interval": _AGING_INTERVAL}
        else:
            for section in ("admission", "shedding", "deadlines", "aging"):
                data.pop(section, None)
        name = "slos.yaml" if with_slos else "no-slos.yaml"
        path: Path = self._args.output / name
        path.write_text(yaml.safe_dump(data, sort_keys=False))
        return path

    def _set_load(self, client: LoadClient) -> Workload:
        args = self._args
        alone = client.send_one_by_one(self._sample(_IDLE_REQUESTS), "idle engine")
        ttfts = sorted(record.ttft for record in alone if record.ttft)
        idle = ttfts[len(ttfts) // 2]
        rate = capacity(client, self._sample(CAPACITY_ROUNDS * args.seats))
        self.facts = {
            "idle_ttft": idle,
            "slo_ttft": args.slo * idle,
            "slo_ttft_standard": _STANDARD_SLO * args.slo * idle,
            "capacity_requests_per_second": rate,
        }
        gap = args.maxcon / 2 / (args.overload * rate)
        count = int(args.seconds / gap * args.maxcon / 2)
        return make_workload(replace(self._config(count), gap=gap))

    def _sample(self, count: int) -> Sequence[Any]:
        config = self._config(count)
        return make_workload(replace(config, gap=0.0, seed=config.seed + OTHER_SEED)).requests

    def _config(self, requests: int) -> WorkloadConfig:
        return WorkloadConfig(
            requests=requests,
            mix=_MIX,
            max_burst=self._args.maxcon,
            seed=self._args.seed,
            max_output_tokens=self._args.max_output,
        )


def print_tables(
    console: Console,
    rows: Sequence[TierRow],
    totals: Sequence[Mapping[str, Any]],
    facts: Mapping[str, float],
) -> None:
    """Print the tiers, the totals and what was measured on the idle engine."""
    print_table(
        "tiers under overload",
        ("scheduler", "tier", "sent", "answered", "refused", "unanswered", "TTFT p50, s",
         "TTFT p99, s", "in time", "longest wait, s"),
        (
            (
                row.scheduler,
                row.tier,
                row.sent,
                row.answered,
                ", ".join(f"{count} {code}" for code, count in row.refused.items()) or "0",
                row.unanswered,
                f"{row.ttft_p50:.3f}",
                f"{row.ttft_p99:.3f}",
                "-" if row.kept is None else f"{row.kept:.1%}",
                f"{row.longest_wait:.1f}",
            )
            for row in rows
        ),
        words=2,
    )  # fmt: skip
    speeds = [total["output_tokens_per_second"] for total in totals]
    print_table(
        "totals",
        ("scheduler", "output tok/s", "vs FCFS", "preemptions/min", "latest send, s"),
        (
            (
                total["scheduler"],
                f"{speed:.0f}",
                f"{speed / speeds[0]:.3f}",
                f"{total['preemptions_per_minute']:.0f}",
                f"{total['latest_send']:.2f}",
            )
            for total, speed in zip(totals, speeds, strict=True)
        ),
    )
    console.print(
        f"idle TTFT {facts['idle_ttft']:.3f} s; in time: share of the requests sent whose first "
        f"token came within {facts['slo_ttft']:.3f} s (premium) or "
        f"{facts['slo_ttft_standard']:.3f} s (standard); capacity "
        f"{facts['capacity_requests_per_second']:.1f} requests/s"
    )
    for total in totals:
        bound = total.get("bound")
        if bound:
            console.print(
                f"{total['scheduler']}: {bound['beyond']} of {bound['requests']} requests of the "
                f"last tier waited longer than the bound of aging; the longest wait was "
                f"{bound['wait']:.1f} s, its bound {bound['bound']:.0f} s"
            )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_server_arguments(parser)
    add = parser.add_argument
    add("--policy", default="tiers", help="three tiers: a name or a YAML file (%(default)s)")
    add("--profile", help="engine profile, by name or path; measure one with semsched profile")
    add("--seconds", type=float, default=120.0, help="of arrivals (default: %(default)s)")
    add("--drain", type=float, default=20.0, help="seconds after the last arrival (%(default)s)")
    add("--overload", type=float, default=3.0, help="offered load over capacity (%(default)s)")
    add("--maxcon", type=int, default=12, help="largest burst (default: %(default)s)")
    add("--slo", type=float, default=10.0, help="premium: TTFT in idle TTFTs (%(default)s)")
    add("--seed", type=int, default=0, help="of the workload (default: %(default)s)")
    add("--max-output", type=int, default=192, help="longer answers are cut (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Run the four schedulers; 1 if a request failed without a code."""
    study = Study(args)
    rows: list[TierRow] = []
    totals: list[dict[str, Any]] = []
    path = args.output / "tiers.json"
    for name in SCHEDULERS:
        done, total = study.measure(name)
        rows += done
        totals.append(total)
        document = {"rows": [asdict(row) for row in rows], "totals": totals, **study.facts}
        write_json(path, document)
    console = make_console()
    print_tables(console, rows, totals, study.facts)
    console.print(f"records: {path}", soft_wrap=True)
    problems = [
        f"{total['scheduler']}: {total['failed']} requests failed without a code"
        for total in totals
        if total["failed"]
    ]
    return print_problems(console, problems)


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
