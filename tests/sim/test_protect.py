"""No request is held longer than the policy allows, whatever the load."""

import random
from typing import Any

from drive import drive
from holds import excess_hold
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.sim.engine import Engine
from vllm_semantic_sched.sim.request import SimRequest

HAS_PROTECT = "protect" in Policy.model_fields


class HoldTimes:
    """When each request was held, and the longest step."""

    def __init__(self) -> None:
        self.holds: dict[Job, list[tuple[float, float]]] = {}
        self.longest_step = 0.0
        self._now = 0.0
        self._held: tuple[Job, ...] = ()

    def note(self, engine: Engine, now: float) -> None:
        """A step was decided at `now`; the one before it is over."""
        for job in self._held:
            self.holds.setdefault(job, []).append((self._now, now))
        if self._held:
            self.longest_step = max(self.longest_step, now - self._now)
        self._now, self._held = now, tuple(engine.held)

    def excess(self, share: float) -> float:
        """See `holds.excess_hold`; the worst of all requests."""
        return max((excess_hold(times, share) for times in self.holds.values()), default=0.0)


class AllowanceStub:
    """Holds all but the most urgent request while their allowances last.

    A request's allowance is `longest_hold` seconds at first, shrinks while it is held, and grows by
    `share` of all time, up to `longest_hold` again.
    """

    def __init__(self, longest_hold: float, share: float) -> None:
        self._longest = longest_hold
        self._share = share
        self._allowances: dict[Job, float] = {}
        self._held: list[Job] = []
        self._now = 0.0

    def __call__(self, engine: Engine) -> list[Job]:
        """The jobs to hold in this step."""
        passed, self._now = engine.now() - self._now, engine.now()
        for job in self._allowances:
            grown = self._allowances[job] + self._share * passed
            # Those too that were held in the last step and are preempted in this one.
            spent = passed if job in self._held else 0.0
            self._allowances[job] = min(self._longest, grown - spent)
        others = engine.running[1:]
        self._held = [job for job in others if self._allowances.setdefault(job, self._longest) > 0]
        return self._held


def draw_requests(seed: int) -> list[SimRequest]:
    draw = random.Random(seed)
    now, requests = 0.0, []
    for index in range(40):
        now += draw.expovariate(draw.choice([2.0, 20.0]))
        level = draw.choice([0, 0, 1, 4, 4])
        requests.append(SimRequest(index, now, level, draw.randint(1, 300), draw.randint(1, 150)))
    return requests


def watch(
    longest_hold: float, share: float, slowdown: float, seed: int, **engine: Any
) -> HoldTimes:
    """Run one load under holds with this bound."""
    times = HoldTimes()
    protect = {"level": 0, "slowdown": slowdown, "longest_hold": longest_hold, "share": share}
    policy = {"protect": protect} if HAS_PROTECT else {}
    stub = None if HAS_PROTECT else AllowanceStub(longest_hold, share)
    runs = drive(policy, draw_requests(seed), times.note, choose=stub, **engine)
    assert all(run.finish is not None for run in runs)
    return times


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    longest_hold=st.sampled_from([0.05, 0.5, 5.0]),
    share=st.sampled_from([0.0, 0.2, 0.9]),
    slowdown=st.sampled_from([1.0, 1.1]),
    seats=st.sampled_from([2, 6]),
    kv_blocks=st.sampled_from([None, 60]),
    swap=st.booleans(),
)
def test_holds_stay_within_their_bound(
    seed, longest_hold, share, slowdown, seats, kv_blocks, swap
) -> None:
    """Over any window of T seconds: at most longest_hold + share * T, and the step under way."""
    engine = {"seats": seats, "kv_blocks": kv_blocks, "token_budget": 128, "swap": swap}
    times = watch(longest_hold, share, slowdown, seed, **engine)
    assert times.excess(share) <= longest_hold + times.longest_step + 1e-9


def test_loads_of_this_test_are_held_when_allowed_and_exceed_a_smaller_bound() -> None:
    """Else the bound would say little."""
    runs = [watch(0.5, 0.2, 1.0, seed, seats=4, token_budget=128) for seed in range(5)]
    assert max(times.excess(share=0.2) for times in runs) > 0.4
