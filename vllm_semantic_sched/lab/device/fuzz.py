"""Random engines, loads and disturbances on the emulated device, in virtual time.

`python -m vllm_semantic_sched.lab.device.fuzz --cases 100 --first 0` runs so many and prints one
line for each. A case depends on its number alone.
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_semantic_sched.engine.startup.settings import SWAP_CONNECTOR
from vllm_semantic_sched.lab.bench.prompts import Lengths
from vllm_semantic_sched.lab.device.load import LoadConfig, LoadRequest, draw_load
from vllm_semantic_sched.lab.device.sanitizer import DeviceError
from vllm_semantic_sched.lab.device.virtual import EngineConfig, VirtualEngine
from vllm_semantic_sched.policy.config import parse_policy

_EVEN = (1, 1, 1, 1, 1)
_PROMPTS, _ANSWERS = Lengths(5.0, 0.8, 3, 700), Lengths(3.8, 0.8, 1, 250)


@dataclass(frozen=True)
class Case:
    """What one number stands for. `disturbances`: what happens when, besides the load."""

    number: int
    engine: EngineConfig
    load: list[LoadRequest]
    disturbances: list[tuple[float, str]]
    random_holds: bool  # of those that may be held, instead of those that pay

    @property
    def name(self) -> str:
        """The case in a line."""
        engine = self.engine
        words = [f"case {self.number}: {engine.scheduler}"]
        words += ["asynchronous" if engine.asynchronous else "synchronous", engine.shape]
        words += [f"{engine.seats} seats, {engine.blocks} blocks, budget {engine.budget}"]
        words += ["prefix cache"] * engine.prefix_cache
        words += [f"swap {engine.swap_gib:g} GiB"] if engine.swap_gib else []
        words += ["swap in a MultiConnector"] * (engine.connector is not None)
        words += sorted({what for _, what in self.disturbances})
        words += ["random holds"] * self.random_holds
        words += ["clients leave"] * any(one.abort for one in self.load)
        return ", ".join(words)


@dataclass(frozen=True)
class Outcome:
    """What happened in a case that passed. `left`: clients; of our scheduler, `held`: steps with
    holds, `preempted`: requests, `loaded`: seconds of loads of their KV."""

    requests: int
    steps: int
    left: int
    held: int = 0
    preempted: int = 0
    loaded: float = 0.0


def draw_case(number: int, requests: int = 60, schedulers: tuple[str, ...] = ()) -> Case:
    """The case of a number; `schedulers`: of `EngineConfig`, by default mostly ours."""
    chance = random.Random(number)
    ours = ("semantic", "semantic", "semantic", "fcfs", "priority")
    scheduler = chance.choice(schedulers or ours)
    prefix_cache = chance.random() < 0.5
    swap = chance.choice((None, 0.02, 0.5)) if scheduler == "semantic" else None
    multi = swap is not None and chance.random() < 0.3
    sliding = chance.random() < 0.3
    engine = EngineConfig(
        scheduler=scheduler,
        policy=_policy(chance, swap is not None),
        seats=chance.choice((2, 8, 16, 32)),
        asynchronous=chance.random() < 0.6,
        profile=chance.choice(("default", "h100-8b")),
        blocks=(350 if sliding else 100) + chance.choice((0, 60, 300)),
        budget=chance.choice((64, 256, 2048)),
        max_model_len=1024,
        prefix_cache=prefix_cache,
        swap_gib=None if multi else swap,
        connector=_multi_connector(swap) if multi and swap is not None else None,
        host_seconds=chance.choice((0.0, 0.001)),
        noise=chance.choice((0.0, 0.2)),
        shape="sliding-8b" if sliding else "llama-3.1-8b",
        options={"hf_overrides": {"sliding_window": 128}} if sliding else {},
    )
    shared = chance.choice((0, 2)) if prefix_cache else 0
    rate = chance.choice((5.0, 20.0, 100.0))
    config = LoadConfig(requests, rate, number, _EVEN, _PROMPTS, _ANSWERS)
    load = draw_load(replace(config, prefixes=shared, prefix_tokens=48))
    if chance.random() < 0.5:
        load = [_leaving(one, chance) if chance.random() < 0.2 else one for one in load]
    kinds = [what for what in _DISTURBANCES if chance.random() < 0.3]
    last = load[-1].arrival + 1.0
    disturbances = [(chance.uniform(0, last), what) for what in kinds for _ in range(3)]
    return Case(number, engine, load, sorted(disturbances), chance.random() < 0.5)


def run_case(case: Case) -> Outcome:
    """Run a case. DeviceError: wrong KV, a request that was lost or got another answer, blocks or
    records that are left, an error of ours that was caught."""
    with VirtualEngine(case.engine) as engine:
        engine.send(case.load)
        if case.random_holds and case.engine.scheduler == "semantic":
            _hold_at_random(engine.scheduler.core.protection, random.Random(case.number))
        for moment, what in case.disturbances:
            engine.at(moment, _disturb(engine, what))
        engine.run()
        _look_around(engine, case)
        left = sum(one.reason == "left" for one in engine.records.values())
        outcome = Outcome(len(case.load), len(engine.steps), left)
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


def _policy(chance: random.Random, swap: bool) -> dict[str, Any]:
    mode = chance.choice(("swap", "optimal")) if swap else "recompute"
    policy: dict[str, Any] = {
        "retention": {"mode": mode, "max_stall": chance.choice((0.0, 0.001, 1.0))},
        "correct_profile": chance.random() < 0.5,
    }
    if chance.random() < 0.6:
        policy["protect"] = {"level": chance.choice((0, 1)), "price": 0.5, "worth": 240}
    if chance.random() < 0.3:
        policy["preemption"] = {"shorter": 2}
    return policy


def _multi_connector(gib: float) -> dict[str, Any]:
    ours = SWAP_CONNECTOR | {"kv_connector_extra_config": {"host_gib": gib}}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [ours]},
    }


def _leaving(one: LoadRequest, chance: random.Random) -> LoadRequest:
    return replace(one, abort=one.arrival + chance.expovariate(1.0))


def _hold_at_random(protection: Any, chance: random.Random) -> None:
    choose = protection.choose

    def choose_any(certain: Any, others: Sequence[Any], *args: Any) -> Sequence[Any]:
        held: Sequence[Any] = choose(certain, others, *args)
        if chance.random() < 0.5:
            return held
        protection.steps += 1
        return chance.sample(list(others), chance.randint(1, len(others)))

    protection.choose = choose_any


def _disturb(engine: VirtualEngine, what: str) -> Callable[[], None]:
    return lambda: _DISTURBANCES[what](engine)


def _pause(engine: VirtualEngine) -> None:
    if not engine.core.is_scheduler_paused():
        engine.core.pause_scheduler(mode="keep", clear_cache=False)
        engine.at(engine.clock.now() + 0.3, engine.core.resume_scheduler)


def _reset(**options: bool) -> Callable[[VirtualEngine], None]:
    def reset(engine: VirtualEngine) -> None:
        try:
            engine.core.reset_prefix_cache(**options)
        except RuntimeError as error:  # vLLM cannot while a connector loads; the client is told so
            if "waiting for remote KV transfer" not in str(error):
                raise

    return reset


def _reload(engine: VirtualEngine) -> None:
    """Another policy comes into force, as after a reload."""
    if engine.config.scheduler == "semantic":
        chance = random.Random(engine.runner.number)
        data = _policy(chance, swap=True) | {"predictor": {"enabled": False}}
        policy = parse_policy(data | {"observe": chance.random() < 0.2})
        engine.scheduler._replace(policy, engine.scheduler.core.estimates.scale.given)


_DISTURBANCES: dict[str, Callable[[VirtualEngine], None]] = {
    "pauses": _pause,
    "resets": _reset(reset_running_requests=True),
    "resets with connector": _reset(reset_running_requests=True, reset_connector=True),
    "refused resets": _reset(),
    "reloads": _reload,
}


def _look_around(engine: VirtualEngine, case: Case) -> None:
    """Nothing may be left once all requests have ended."""
    for one in engine.records.values():
        if one.ended is None:
            raise DeviceError("was lost", one.name, engine.runner.number)
    pool = engine.scheduler.kv_cache_manager.block_pool
    kept = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    if kept:
        raise DeviceError(f"{kept} blocks are left when all requests have ended")
    if case.engine.scheduler != "semantic":
        return
    scheduler = engine.scheduler
    if scheduler.jobs:
        raise DeviceError(f"jobs are left: {', '.join(scheduler.jobs)}")
    if errors := scheduler.counters.total("policy_errors"):
        raise DeviceError(f"{errors:g} errors of the policy were caught")


def main() -> None:
    """Run cases until one fails; exit status 1 if one did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--requests", type=int, default=60, help="of a case")
    parser.add_argument("--keep-on", action="store_true", help="after a failed case too")
    args = parser.parse_args()
    failed = requests = 0
    begin = time.monotonic()
    for number in range(args.first, args.first + args.cases):
        case = draw_case(number, args.requests)
        try:
            outcome: object = run_case(case)
        except Exception as error:
            failed += 1
            outcome = f"FAILED: {type(error).__name__}: {error}"
        requests += args.requests
        print(f"{case.name}: {outcome}", flush=True)
        if failed and not args.keep_on:
            break
    print(f"{requests} requests in {time.monotonic() - begin:.0f} s, {failed} cases failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
