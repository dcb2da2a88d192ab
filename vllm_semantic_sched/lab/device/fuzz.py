"""Random engines, loads and disturbances on the emulated device, in virtual time.

`python -m vllm_semantic_sched.lab.device.fuzz --requests 500000 --log fuzz.jsonl` runs cases of so
many requests in all and prints one line for each; with the same log again, it goes on where it
ended. A case depends on its number alone.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vllm_semantic_sched.engine.startup.settings import SWAP_CONNECTOR
from vllm_semantic_sched.lab.bench.prompts import Lengths
from vllm_semantic_sched.lab.device.load import LoadConfig, LoadRequest, draw_load
from vllm_semantic_sched.lab.device.remote import REMOTE_CONNECTOR
from vllm_semantic_sched.lab.device.sanitizer import DeviceError
from vllm_semantic_sched.lab.device.virtual import EngineConfig, VirtualEngine
from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.config.files import read_config
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.policy.live import check_live_change

# Short, because a step costs as much for one token as for many: more requests, more cases.
_EVEN = (1, 1, 1, 1, 1)
_PROMPTS = Lengths(mu=4.0, sigma=0.9, least=3, most=280)
_ANSWERS = Lengths(mu=2.2, sigma=0.8, least=1, most=60)
_LONGEST = 384
_POLICIES = ("ems", "fairness", "latency", "priority", "reserved", "shares", "sjf", "tiers")
_CONNECTORS = ("none", "swap", "multi", "remote", "both")
_HYBRID = "granite-4.0-h-tiny"
_BLOCKS = {"sliding-8b": 130, _HYBRID: 80}  # about as many as the longest request needs
_DENSE = 34
_SHAPES = ("llama-3.1-8b", "sliding-8b", "deepseek-v2-lite", "qwen3-30b-a3b", _HYBRID)


@dataclass(frozen=True)
class Case:
    """What one number stands for. `disturbances`: what happens when, besides the load."""

    number: int
    engine: EngineConfig
    load: list[LoadRequest]
    disturbances: list[tuple[float, str]]
    random_holds: bool  # of those that may be held, instead of those that pay
    connector: str

    @property
    def name(self) -> str:
        """The case in a line."""
        engine = self.engine
        words = [
            f"case {self.number}: {engine.scheduler}",
            engine.policy if isinstance(engine.policy, str) else "",
            "asynchronous" if engine.asynchronous else "synchronous",
            engine.shape,
            f"runner {engine.runner}",
            f"{engine.seats} seats, {engine.blocks} blocks, budget {engine.budget}",
            "prefix cache" if engine.prefix_cache else "",
            f"connector {self.connector}" if self.connector != "none" else "",
            f"{engine.drafts} drafts" if engine.drafts else "",
            f"{engine.adapters} adapters" if engine.adapters else "",
            *sorted({what for _, what in self.disturbances}),
            "random holds" if self.random_holds else "",
            "clients leave" if any(request.abort for request in self.load) else "",
        ]
        return ", ".join(filter(None, words))


@dataclass(frozen=True)
class Outcome:
    """What happened in a case that passed. `left`: clients; `accepted`: drafts; `copied`: whether
    a connector had copies to make; of our scheduler, `held`: steps with holds, `preempted`:
    requests, `loaded`: seconds of loads of their KV."""

    requests: int
    steps: int
    left: int
    accepted: int
    copied: bool
    held: int = 0
    preempted: int = 0
    loaded: float = 0.0


def draw_case(number: int, requests: int = 100, schedulers: tuple[str, ...] = ()) -> Case:
    """The case of a number; `schedulers`: of `EngineConfig`, by default mostly ours."""
    chance = random.Random(number)
    ours = ("semantic", "semantic", "semantic", "fcfs", "priority")
    scheduler = chance.choice(schedulers or ours)
    connectors = _CONNECTORS if scheduler == "semantic" else ("none", "remote")
    connector = chance.choice(connectors)
    shape = chance.choice(_SHAPES)
    if shape == _HYBRID and connector in ("remote", "both"):
        connector = "none"  # ours has no Mamba states elsewhere
    prefix_cache = chance.random() < 0.5
    room = _BLOCKS.get(shape, _DENSE)
    if connector in ("remote", "both") and shape == "sliding-8b":
        room += 300  # loads that fill the pool may wait for each other: see test_stock_faults.py
    seats = chance.choice((2, 8, 16, 32))
    drafts = chance.choice((0, 0, 0, 1, 3))
    engine = EngineConfig(
        scheduler=scheduler,
        policy=_policy(chance, connector in ("swap", "multi", "both")),
        seats=seats,
        asynchronous=chance.random() < 0.6,
        profile=chance.choice(("default", "h100-8b")),
        blocks=room + chance.choice((0, 20, 100)),
        budget=max(chance.choice((64, 256, 2048)), 2 * seats * (1 + drafts)),
        max_model_len=_LONGEST,
        prefix_cache=prefix_cache,
        connector=_connector(connector, shape, chance),
        host_seconds=chance.choice((0.0, 0.001)),
        noise=chance.choice((0.0, 0.2)),
        shape=shape,
        drafts=drafts,
        drafter=chance.choice(("eagle", "eagle", "ngram_gpu")),
        acceptance=chance.choice((0.3, 0.7, 1.0)),
        runner=chance.choice((1, 2)),
        # vLLM 0.32 dies of an assertion, also under FCFS, if KV of a request with another adapter
        # has arrived from elsewhere: `len(scheduled_loras) <= max_loras`.
        adapters=chance.choice((0, 0, 0, 1, 2)) * (connector not in ("remote", "both")),
        options={"hf_overrides": {"sliding_window": 64}} if shape == "sliding-8b" else {},
    )
    shared = chance.choice((0, 2)) if prefix_cache else 0
    rate = chance.choice((20.0, 100.0, 500.0))
    config = LoadConfig(
        requests=requests,
        rate=rate,
        seed=number,
        mix=_EVEN,
        prompts=_PROMPTS,
        answers=_ANSWERS,
        prefixes=shared,
        prefix_tokens=40,
    )
    load = draw_load(config)
    if chance.random() < 0.5:
        load = [_leaving(request, chance) if chance.random() < 0.2 else request for request in load]
    if engine.adapters:
        load = [replace(request, adapter=chance.choice((0, 1, 2, 3))) for request in load]
    kinds = [what for what in _DISTURBANCES if chance.random() < 0.3]
    last = load[-1].arrival + 0.5
    disturbances = [(chance.uniform(0, last), what) for what in kinds for _ in range(3)]
    holds = chance.random() < 0.5
    return Case(number, engine, load, sorted(disturbances), holds, connector)


def run_case(case: Case) -> Outcome:
    """Run a case. DeviceError: wrong KV, a request that was lost or got another answer, blocks or
    records that are left, an error of ours that was caught."""
    with VirtualEngine(case.engine) as engine:
        engine.send(case.load)
        if case.random_holds and case.engine.scheduler == "semantic":
            hold_at_random(engine, random.Random(case.number))
        for moment, what in case.disturbances:
            engine.at(moment, _disturb(engine, what))
        engine.run()
        look_around(engine)
        outcome = Outcome(
            requests=len(case.load),
            steps=len(engine.steps),
            left=sum(record.reason == "left" for record in engine.records.values()),
            accepted=engine.runner.accepted,
            copied=engine.runner.timeline.copies_end > 0,
        )
        if case.engine.scheduler != "semantic":
            return outcome
        scheduler = engine.scheduler
        scheduler.preemptions.gauges()
        totals = scheduler.counters.totals
        return replace(
            outcome,
            held=scheduler.core.protection.steps,
            preempted=round(scheduler.counters.total("preemptions")),
            loaded=round(totals.get(("copy_seconds", ("load", "measured")), 0.0), 4),
        )


def _policy(chance: random.Random, swap: bool) -> str | dict[str, Any]:
    if chance.random() < 0.3:
        return chance.choice(_POLICIES)
    return _drawn_policy(chance, swap)


def _drawn_policy(chance: random.Random, swap: bool) -> dict[str, Any]:
    mode = chance.choice(("swap", "optimal")) if swap else "recompute"
    policy: dict[str, Any] = {
        "retention": {"mode": mode},
        "correct_profile": chance.random() < 0.5,
    }
    if chance.random() < 0.6:
        policy["protect"] = {"level": chance.choice((0, 1)), "price": 0.5, "worth": 240}
    if chance.random() < 0.3:
        policy["preemption"] = {"shorter": 2}
    return policy


def _connector(kind: str, shape: str, chance: random.Random) -> dict[str, Any] | None:
    """`--kv-transfer-config`."""
    gib = chance.choice((0.02, 0.5))
    ours = SWAP_CONNECTOR | {"kv_connector_extra_config": {"host_gib": gib}}
    extra = {
        "found": chance.choice((0.3, 0.8)),
        # vLLM 0.32 cannot, with a sliding window: see test_stock_faults.py.
        "whole": shape != "sliding-8b" and chance.random() < 0.5,
        "lookups": chance.choice((0, 3)),
        # Nor is it safe from loads that fail there, however many blocks there are.
        "failing": chance.choice((0.0, 0.2)) * (shape != "sliding-8b"),
        "sent": chance.choice((0.0, 0.3)),
        "seconds": chance.choice((0.0, 0.02)),
    }
    remote = REMOTE_CONNECTOR | {"kv_connector_extra_config": extra}
    both = [ours, remote] if chance.random() < 0.5 else [remote, ours]
    recompute = {"kv_load_failure_policy": "recompute"}
    if kind == "none":
        return None
    if kind in ("swap", "remote"):
        return (ours if kind == "swap" else remote) | recompute
    return recompute | {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [ours] if kind == "multi" else both},
    }


def _leaving(request: LoadRequest, chance: random.Random) -> LoadRequest:
    return replace(request, abort=request.arrival + chance.expovariate(5.0))


def hold_at_random(engine: VirtualEngine, chance: random.Random) -> None:
    """In every other step on average, let our scheduler hold some of the requests that it may hold,
    instead of those for which that pays."""
    protection = engine.scheduler.core.protection
    choose = protection.choose

    def choose_any(
        certain: Any, candidates: Sequence[Any], *args: Any, **kwargs: Any
    ) -> Sequence[Any]:
        held: Sequence[Any] = choose(certain, candidates, *args, **kwargs)
        if chance.random() < 0.5:
            return held
        protection.steps += 1
        return chance.sample(list(candidates), chance.randint(1, len(candidates)))

    protection.choose = choose_any


def _disturb(engine: VirtualEngine, what: str) -> Callable[[], None]:
    return lambda: _DISTURBANCES[what](engine)


def _pause(engine: VirtualEngine) -> None:
    if not engine.core.is_scheduler_paused():
        engine.core.pause_scheduler(mode="keep", clear_cache=False)
        engine.at(engine.clock.now() + 0.1, engine.core.resume_scheduler)


def _reset(**options: bool) -> Callable[[VirtualEngine], None]:
    def reset(engine: VirtualEngine) -> None:
        try:
            engine.core.reset_prefix_cache(**options)
        except RuntimeError as error:  # vLLM cannot while a connector loads; the client is told so
            if "waiting for remote KV transfer" not in str(error):
                raise

    return reset


def _reload(engine: VirtualEngine) -> None:
    """Another policy comes into force, as after a reload, unless it needs a restart."""
    if engine.config.scheduler != "semantic":
        return
    chance = random.Random(engine.runner.number)
    given = engine.config.policy
    data = dict(given) if isinstance(given, dict) else read_config(given, kind="policy")[0]
    data |= _drawn_policy(chance, swap=True) | {"predictor": {"enabled": False}}
    core = engine.scheduler.core
    try:
        policy = parse_policy(data | {"observe": chance.random() < 0.2})
        check_live_change(core.policy, policy)
    except PolicyError:
        return
    engine.scheduler._replace(policy, core.estimates.scale.given)


_DISTURBANCES: dict[str, Callable[[VirtualEngine], None]] = {
    "pauses": _pause,
    "resets": _reset(reset_running_requests=True),
    "resets with connector": _reset(reset_running_requests=True, reset_connector=True),
    "refused resets": _reset(),
    "reloads": _reload,
}


def look_around(engine: VirtualEngine) -> None:
    """Look for what is left once all requests have ended. DeviceError: blocks or jobs are left, a
    request was lost, or an error of the policy was caught."""
    for record in engine.records.values():
        if record.ended is None:
            raise DeviceError("was lost", record.name, engine.runner.number)
    pool = engine.scheduler.kv_cache_manager.block_pool
    kept = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    if kept:
        raise DeviceError(f"{kept} blocks are left when all requests have ended")
    if engine.config.scheduler != "semantic":
        return
    scheduler = engine.scheduler
    if scheduler.jobs:
        raise DeviceError(f"jobs are left: {', '.join(scheduler.jobs)}")
    errors = {
        labels: count
        for (name, labels), count in scheduler.counters.totals.items()
        if name == "policy_errors" and count
    }
    if errors:
        raise DeviceError(f"errors of the policy were caught: {errors}")


def run_cases(first: int, requests: int, per_case: int, done: set[int]) -> Iterator[dict[str, Any]]:
    """Run cases of `per_case` requests up to so many in all, without those that are done; what
    became of each: `number`, `case`, and `outcome` or `error`."""
    for number in range(first, first + -(-requests // per_case)):
        if number in done:
            continue
        case = draw_case(number, per_case)
        row: dict[str, Any] = {"number": number, "case": case.name}
        try:
            yield row | {"outcome": asdict(run_case(case))}
        except Exception as error:
            yield row | {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Run cases until one fails; exit status 1 if one did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000, help="in all")
    parser.add_argument("--each", type=int, default=100, help="requests of a case")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--log", type=Path, help="file of cases that are done, as JSON lines")
    parser.add_argument("--keep-on", action="store_true", help="after a failed case too")
    args = parser.parse_args()
    lines = args.log.read_text().splitlines() if args.log and args.log.exists() else []
    done = {row["number"] for row in map(json.loads, lines) if "error" not in row}
    begin = time.process_time()
    ran = 0
    failed = 0
    for row in run_cases(args.first, args.requests, args.each, done):
        ran += 1
        failed += "error" in row
        print(f"{row['case']}: {row.get('outcome') or 'FAILED: ' + row['error']}", flush=True)
        if args.log:
            with args.log.open("a") as log:
                log.write(json.dumps(row) + "\n")
        if failed and not args.keep_on:
            break
    seconds = time.process_time() - begin
    print(f"{ran * args.each} requests in {seconds:.0f} s of CPU time, {failed} cases failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
