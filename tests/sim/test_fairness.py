"""Bounds and shares over whole runs of the simulated engine."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from drive import PROFILE, drive, seats_of
from tiers import wait_bound

from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.facts.capacity import AHEAD
from vllm_semantic_sched.policy.order.fair_share import FairShare
from vllm_semantic_sched.sim.engine import Engine
from vllm_semantic_sched.sim.request import Run, SimRequest
from vllm_semantic_sched.sim.snapshot import EngineSnapshot


def premium_load(rng: random.Random, levels: int, seats: int, count: int = 220):
    """More requests of level 0 than the engine can serve."""
    longest = rng.choice([8, 30])
    rate = rng.choice([1.5, 4.0]) * seats / (longest * PROFILE.gamma2)
    requests, now = [], 0.0
    for index in range(count):
        now += rng.expovariate(rate)
        level = 0 if rng.random() < 0.9 else rng.randint(1, levels - 1)
        requests.append(
            SimRequest(index, now, level, rng.randint(1, 200), rng.randint(1, 2 * longest),
                       tenant=rng.choice("abc"))
        )  # fmt: skip
    return requests


def random_policy(rng: random.Random, levels: int, seats: int) -> dict[str, Any]:
    reserve = rng.randint(0, seats - 1) if rng.random() < 0.3 else 0
    tiers: list[dict[str, Any]] = [{"name": str(level)} for level in range(levels)]
    tiers[0] |= {"reserve": {"seats": reserve}, "share": rng.choice([0.5, 0.9])}
    tiers[-1] |= {"slo": {"ttft": rng.choice([0.5, 5.0])}}
    return {
        "base": rng.choice(["semantic", "priority"]),
        "levels": levels,
        "default_level": 0,
        "tiers": tiers,
        "aging": {
            "enabled": True,
            "interval": rng.choice([0.2, 0.5, 1.0]),
        },
        "preemption": {
            "enabled": rng.random() < 0.7,
            "min_level_gap": rng.randint(1, 2),
            "max_per_request": rng.choice([0, 1, 3]),
        },
        "tenants": {"fair": rng.random() < 0.5},
        "fair_share": {"enabled": rng.random() < 0.3},
        "deadlines": {"enabled": rng.random() < 0.3},
    }


def waited(run: Run) -> float:
    assert run.started is not None
    return run.started - run.request.arrival


def older_waiting(runs: list[Run]) -> list[int]:
    """By request: older ones that had no seat yet when it arrived."""
    started = np.array([run.started for run in runs])
    return [int((started[: run.request.index] > run.request.arrival).sum()) for run in runs]


def longest_admission_gap(runs: list[Run]) -> float:
    """T: the longest time between two admissions while a request waits."""
    arrived = np.array([run.request.arrival for run in runs])
    started = np.array([run.started for run in runs])
    starts = sorted(span.start for run in runs for span in seats_of(run))
    longest = 0.0
    for before, after in zip([0.0, *starts], starts, strict=False):
        since = arrived[(arrived <= after) & (after <= started)]
        # Only preempted requests may have been waiting.
        longest = max(longest, after - max(before, since.min(initial=after)))
    return longest


@pytest.mark.parametrize("block", range(4))
def test_waits_stay_within_bound_under_100_random_policies(block: int) -> None:
    for seed in range(25 * block, 25 * block + 25):
        rng = random.Random(seed)
        levels, seats = rng.randint(2, 5), rng.choice([1, 2, 4, 8])
        policy = random_policy(rng, levels, seats)
        requests = premium_load(rng, levels, seats)
        runs = drive(policy, requests, seats=seats, token_budget=rng.choice([64, 2048]))
        aging = parse_policy(policy).aging
        gap = longest_admission_gap(runs)
        reserved = policy["tiers"][0]["reserve"]["seats"]
        stint = max(span.end - span.start for run in runs for span in seats_of(run))
        for run, older in zip(runs, older_waiting(runs), strict=True):
            level = run.request.level
            bound = wait_bound(aging, level, older, gap, stint if reserved else 0.0)
            assert bound is not None and waited(run) <= bound, (seed, run.request)


def test_without_aging_background_waits_until_the_load_ends() -> None:
    rng = random.Random(5)
    requests = premium_load(rng, 5, 2)
    ends = requests[-1].arrival
    lowest = [request for request in requests if request.level == 4]
    aging = {"enabled": True, "interval": 0.5}
    longest = {}
    for name, knobs in (("off", {}), ("on", aging)):
        runs = drive({"base": "priority", "aging": knobs}, requests, seats=2)
        longest[name] = max(waited(runs[r.index]) for r in lowest if r.arrival < ends / 2)
    assert longest["off"] > 1.5 * longest["on"]  # one admission in ten goes to the overdue


def saturate(levels: int, count: int, tenants: str = "a") -> list[SimRequest]:
    rng = random.Random(1)
    return [
        SimRequest(
            index, 0.0, index % levels, rng.randint(1, 300), rng.randint(1, 60),
            tenant=tenants[index // levels % len(tenants)],
        )
        for index in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("shares", [(0.5, 0.3, 0.2), (0.2, 0.3, 0.5), (0.1, 0.1, 0.8), (0.1, None)])
def test_shares_converge_to_the_targets_under_saturation(monkeypatch, shares) -> None:
    """Within three percentage points; charged time equals engine time."""
    policy = {
        "base": "priority",
        "levels": len(shares),
        "default_level": 0,
        "tiers": [{"name": str(n), "share": share} for n, share in enumerate(shares)],
        "fair_share": {"enabled": True},
    }
    seen: dict[str, Any] = {}

    def watch(engine: Engine, now: float) -> None:
        seen.update(core=engine.core, now=now)
        assert len(engine.running) == engine.seats  # work conserving

    served = [0.0] * len(shares)
    charge = FairShare.charge

    def count(share: FairShare, level: int, seconds: float) -> None:
        served[level] += seconds
        charge(share, level, seconds)

    monkeypatch.setattr(FairShare, "charge", count)
    drive(policy, saturate(len(shares), 2500), watch, until=60.0, seats=8)
    assert all(seen["core"].waiting.queues[level] for level in range(len(shares)))
    assert sum(served) == pytest.approx(seen["now"], rel=0.05)
    targets = seen["core"].policy.target_shares
    assert [seconds / sum(served) for seconds in served] == pytest.approx(targets, abs=0.03)


def test_unused_share_goes_to_the_others() -> None:
    tiers = [{"name": "a", "share": 0.9}, {"name": "b", "share": 0.1}]
    policy = {
        "base": "priority", "levels": 2, "default_level": 0, "tiers": tiers,
        "fair_share": {"enabled": True},
    }  # fmt: skip
    requests = [SimRequest(index, 0.0, 1, 50, 40) for index in range(64)]
    runs = drive(policy, requests, seats=8)
    plain = drive({"base": "priority", "levels": 2, "default_level": 0}, requests, seats=8)
    assert [run.finish for run in runs] == [run.finish for run in plain]


def test_shares_do_not_make_tiers_preempt_each_other() -> None:
    shares = (0.2, 0.3, 0.5)
    policy = {
        "base": "priority", "levels": 3, "default_level": 0,
        "tiers": [{"name": str(n), "share": share} for n, share in enumerate(shares)],
        "fair_share": {"enabled": True},
        "preemption": {"max_per_request": 99},
    }  # fmt: skip
    runs = drive(policy, saturate(3, 600), until=60.0, seats=8)
    preemptions = sum(run.recomputes for run in runs)
    assert preemptions <= 0.02 * sum(bool(run.spans) for run in runs)


def test_counters_of_backlogged_tenants_stay_within_bound() -> None:
    """One tenant has more and longer requests than the other."""
    rng = random.Random(3)
    seats, requests = 6, []
    for index in range(500):
        heavy = rng.random() < 0.8
        requests.append(
            SimRequest(index, 0.0, 2, rng.randint(1, 400 if heavy else 60),
                       rng.randint(1, 120 if heavy else 20), tenant="heavy" if heavy else "light")
        )  # fmt: skip
    longest_prefill = PROFILE.prefill(0, 400)
    longest_decode = PROFILE.decode(400, 120 + AHEAD)
    bound = longest_prefill + seats * longest_decode
    worst, steps = 0.0, 0
    served: Counter[str] = Counter()

    def watch(engine: Engine, now: float) -> None:
        nonlocal worst, steps
        queue = engine.core.waiting.queues[2]
        if len(queue.counters) == 2:
            steps += 1
            worst = max(worst, abs(queue.counters["heavy"] - queue.counters["light"]))
            served.update(job.tenant for job in engine.running)

    drive({"tenants": {"fair": True}, "base": "priority"}, requests, watch, seats=seats)
    assert steps > 300
    assert worst <= bound
    assert worst <= 0.5 * bound  # in practice far within
    assert 0.5 < served["heavy"] / served["light"] < 2


def test_flood_of_one_tenant_does_not_delay_another() -> None:
    requests = [SimRequest(index, 0.0, 2, 50, 30, tenant="flood") for index in range(300)]
    requests += [
        SimRequest(300 + index, 1.0 + index, 2, 50, 30, tenant="other") for index in range(10)
    ]
    longest = {}
    for fair in (False, True):
        runs = drive({"tenants": {"fair": fair}, "base": "priority"}, requests, seats=4)
        longest[fair] = max(waited(run) for run in runs if run.request.tenant == "other")
    assert longest[True] < 1.0 < longest[False] / 5


@pytest.mark.parametrize("seed", range(12))
def test_hard_reservations_hold_in_every_step(seed: int) -> None:
    rng = random.Random(seed)
    seats, blocks = rng.choice([4, 8]), rng.choice([80, 200])
    kept, share = rng.randint(0, seats - 1), rng.choice([0.0, 0.2, 0.5])
    reserve = {"seats": kept, "kv": share}
    policy = {
        "levels": 3,
        "default_level": 1,
        "tiers": [{"name": "a", "reserve": reserve}, {"name": "b"}, {"name": "c"}],
        "base": rng.choice(["semantic", "priority"]),
        "aging": {"enabled": True, "interval": 0.5},
        "tenants": {"fair": rng.random() < 0.5},
    }
    requests, now = [], 0.0
    for index in range(150):
        now += rng.expovariate(20.0)
        level = rng.choice([0, 1, 2, 2])
        requests.append(SimRequest(index, now, level, rng.randint(1, 200), rng.randint(1, 150)))
    used = set()

    def watch(engine: Engine, now: float) -> None:
        others = [job for job in engine.running if job.level > 0]
        assert len(others) <= seats - kept
        held = sum(EngineSnapshot(engine).freeable_blocks(job) for job in others)
        assert held <= blocks * (1 - share) or len(others) == 1
        used.add(len(others))

    runs = drive(policy, requests, watch, seats=seats, kv_blocks=blocks)
    assert all(run.finish is not None for run in runs)
    assert max(used) > 0


def test_soft_reservation_is_lent_and_returned_at_once() -> None:
    tiers = [{"name": "a", "reserve": {"seats": 2, "mode": "soft"}}, {"name": "b"}]
    policy = {
        "levels": 2, "default_level": 1, "tiers": tiers, "base": "priority",
        # Protected from everybody but the owner of what they borrowed.
        "preemption": {"min_level_gap": 2, "max_per_request": 0},
    }  # fmt: skip
    requests = [SimRequest(index, 0.0, 1, 20, 200) for index in range(8)]
    requests += [SimRequest(8 + index, 1.0, 0, 20, 20) for index in range(4)]
    full = 0

    def watch(engine: Engine, now: float) -> None:
        nonlocal full
        full = max(full, sum(job.level == 1 for job in engine.running))

    runs = drive(policy, requests, watch, seats=4)
    assert full == 4
    urgent = sorted(waited(run) for run in runs[8:])
    assert urgent[1] < 0.1 < 0.2 < urgent[2]  # two seats were lent, the others are theirs
    assert sum(run.recomputes for run in runs) == 2
