"""Comparing a new policy with the current one, and rolling it back."""

import json
import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job

from vllm_semantic_sched.policy.canary import (
    ARMS,
    Canary,
    Difference,
    Plan,
    Tally,
    compare,
    plain,
)
from vllm_semantic_sched.policy.config.tiers import Slo, Tier
from vllm_semantic_sched.policy.facts.job import Job, JobState
from vllm_semantic_sched.policy.overload.slo import MEASURES
from vllm_semantic_sched.policy.record.lifecycle import Transition

TIERS = (Tier(name="gold", slo=Slo(ttft=1.0, percentile=95)), Tier(name="rest"))
PLAN = Plan(share=0.25, period=40.0, lease=4000.0, watch=("ttft",))


def served(canary: Canary, arrival: float, level: int, ttft: float, number: int) -> Job:
    job = make_job(level, request_id=f"r{number}", arrival=arrival)
    canary.moved(Transition(job, None, JobState.WAITING, arrival))
    job.first_token = arrival + ttft
    canary.first_token(job)
    job.generated = 11
    job.state = JobState.COMPLETED
    canary.moved(Transition(job, JobState.RUNNING, JobState.COMPLETED, arrival + ttft + 1.0))
    return job


def serve(canary: Canary, ttft_of, seconds: float, seed: int = 1) -> Iterator[float]:
    """Two requests per second, half of them gold; their times, when each has ended."""
    rng = random.Random(seed)
    for number in range(int(2 * seconds)):
        now, level = number / 2, number % 2
        served(canary, now, level, ttft_of(canary.arm(now), level, rng), number)
        yield now


def run(canary: Canary, ttft_of, seconds: float, seed: int = 1) -> str | None:
    """The SLO that is missed while requests are served, with its time."""
    for now in serve(canary, ttft_of, seconds, seed):
        broken = canary.broken(now + 0.5)
        if broken:
            return f"{now:.0f} s: {broken}"
    return None


def keeps(arm: str, level: int, rng: random.Random) -> float:
    return 2.0 if rng.random() < 0.02 else rng.uniform(0.1, 0.9)


def breaks(arm: str, level: int, rng: random.Random) -> float:
    slow = arm == "new" and level == 0 and rng.random() < 0.5
    return 3.0 if slow else keeps(arm, level, rng)


@given(st.integers(0, 10_000))
def test_good_policy_is_kept(seed: int) -> None:
    assert run(Canary(PLAN, TIERS, 0.0), keeps, 600, seed) is None


@given(st.integers(0, 10_000))
def test_policy_missing_an_slo_rolls_back_in_six_turns(seed: int) -> None:
    broken = run(Canary(PLAN, TIERS, 0.0), breaks, 600, seed)
    assert broken is not None and "ttft of gold" in broken
    assert float(broken.split()[0]) < 6 * PLAN.period + 1


def test_slo_missed_by_both_policies_is_no_reason() -> None:
    def both(arm: str, level: int, rng: random.Random) -> float:
        return 3.0 if rng.random() < 0.5 else 0.5

    rolled_back = [run(Canary(PLAN, TIERS, 0.0), both, 400, seed) for seed in range(20)]
    assert sum(map(bool, rolled_back)) <= 1


def test_only_watched_measures_count() -> None:
    plan = Plan(share=0.25, period=40.0, lease=4000.0, watch=("e2e",))
    assert run(Canary(plan, TIERS, 0.0), breaks, 200) is None


def test_requests_that_never_start_miss_the_slo() -> None:
    canary = Canary(PLAN, TIERS, 0.0)
    for number in range(40):
        served(canary, number * 0.5, 0, 0.5, number)
    jobs = [make_job(0, request_id=f"w{n}", arrival=34.0 + n * 0.3) for n in range(10)]
    for job in jobs:
        canary.moved(Transition(job, None, JobState.WAITING, job.arrival))
    assert canary.broken(34.9) is None
    assert canary.broken(38.5) == "ttft of gold: 0 of 10 kept"
    for job in jobs:  # their clients have left
        job.state = JobState.CANCELLED
        canary.moved(Transition(job, JobState.WAITING, JobState.CANCELLED, 39.0))
    assert canary.broken(39.5) is None


@given(st.floats(0, 1000), st.floats(0.05, 0.9), st.floats(1, 100))
def test_new_policy_has_its_share_at_the_end_of_each_period(at, share, period) -> None:
    plan = Plan(share, period, 1e9, ("ttft",))
    samples = [plan.turn(at + period * n / 1000)[0] for n in range(1000)]
    assert samples.count("new") / 1000 == pytest.approx(share, abs=0.005)
    assert plan.turn(0.0) == ("current", 0.0)
    arm, since = plan.turn(at)
    part = period * (share if arm == "new" else 1 - share)
    assert 0 <= since <= part + 1e-6
    assert plan.settled(at) == (since >= 0.2 * part) or abs(since - 0.2 * part) < 1e-6
    for role in ("current", "new"):
        assert Plan(share, period, 1e9, (), role).turn(at)[0] == role


def tally(values, size: int = 5) -> Tally:
    result = Tally()
    for number, value in enumerate(values):
        result.add(value, value < 1, number // size)
    return result


def compared(*engines: Tally) -> Difference:
    """What is shown of engines with the same requests of each policy and measure."""
    reports = [{arm: [dict.fromkeys(MEASURES, one.plain())] for arm in ARMS} for one in engines]
    return compare(reports)[0]


times = st.lists(st.floats(0.01, 100), min_size=1, max_size=40)


@given(times, times)
def test_engines_add_up_to_one(first, second) -> None:
    """Clusters of two engines are clusters of both."""
    shifted = Tally()
    for number, value in enumerate(first):
        shifted.add(value, value < 1, number // 5)
    for number, value in enumerate(second):
        shifted.add(value, value < 1, 1000 + number // 5)
    merged, one = compared(tally(first), tally(second)), compared(shifted)
    assert (merged.counts, merged.kept) == (one.counts, one.kept)
    assert merged.means == pytest.approx(one.means)
    assert merged.means[0] == pytest.approx(math.exp(shifted.mean()[0]))
    assert merged.interval == pytest.approx(one.interval)


@given(times)
def test_mean_is_that_of_the_logarithms(values) -> None:
    mean, error = tally(values, size=1).mean()
    logs = [math.log(value) for value in values]
    assert mean == pytest.approx(sum(logs) / len(logs))
    if len(logs) > 1:
        spread = sum((log - mean) ** 2 for log in logs) / (len(logs) - 1)
        assert error == pytest.approx(math.sqrt(spread / len(logs)), abs=1e-6)


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_interval_holds_the_true_ratio(factor) -> None:
    hits = 0
    for seed in range(100):
        canary = Canary(PLAN, TIERS, 0.0)

        def ttft(arm: str, level: int, rng: random.Random) -> float:
            return rng.uniform(0.1, 0.4) * (factor if arm == "new" else 1.0)

        for _ in serve(canary, ttft, 800, seed):
            pass
        (one,) = [
            d for d in compare([plain(canary.tallies)]) if (d.level, d.measure) == (1, "ttft")
        ]
        low, high = one.interval
        hits += low <= factor <= high
    assert hits >= 88


def test_report_survives_the_way_between_processes() -> None:
    canary = Canary(PLAN, TIERS, 0.0)
    run(canary, keeps, 120)
    report = plain(canary.tallies)
    sent = json.loads(json.dumps(report))
    assert compare([sent]) == compare([report])
    assert {one.measure for one in compare([sent])} == set(MEASURES)
    doubled = compare([sent, report])
    assert doubled[0].counts[0] == 2 * compare([sent])[0].counts[0]
