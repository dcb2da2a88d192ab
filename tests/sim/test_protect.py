"""Holds cost no more than their price, and only where they can help, whatever the load."""

import random
from typing import Any

from drive import drive
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_semantic_sched.policy.holds.budget import WINDOW
from vllm_semantic_sched.policy.profile.formula import Batch, BatchTerms, load_profile
from vllm_semantic_sched.policy.snapshot import Room
from vllm_semantic_sched.sim.engine import Engine
from vllm_semantic_sched.sim.request import Run, SimRequest
from vllm_semantic_sched.sim.snapshot import EngineSnapshot

PROFILE = load_profile("a100-qwen1.5-4b").model_copy(
    update={"batch": BatchTerms(step=0.01, per_sequence=0.01)}
)
"""Steps grow with the batch: else holds gain nothing."""


class Watch:
    """The loss of each step with holds, by the engine's own accounts and times of its steps."""

    def __init__(self) -> None:
        self.losses: list[tuple[float, float]] = []  # engine seconds worked before, loss
        self.largest = 0.0
        self.held_with_room = 0
        self._worked = 0.0
        self._last: tuple[float, bool] = (0.0, False)

    def note(self, engine: Engine, now: float) -> None:
        """A step was decided at `now`."""
        before, busy = self._last
        if busy:
            self._worked += now - before
        self._last = (now, True)
        decoding = [job for job in engine.running if job not in engine.prefilling]
        held = [job for job in decoding if job in engine.held]
        if not held:
            return
        going = [job for job in decoding if job not in held]
        full, short = (
            engine.core.profile.step_decode(
                Batch(decodes=len(jobs), context=sum(job.tokens for job in jobs))
            )
            for jobs in (decoding, going)
        )
        loss = short - full * len(going) / len(decoding)
        self.losses.append((self._worked, loss))
        self.largest = max(self.largest, loss)
        waiting = engine.core.waiting.peek()
        self.held_with_room += waiting is None or Room(EngineSnapshot(engine)).holds(waiting)

    def worst(self) -> float:
        """Largest loss in a window of engine time."""
        return max(
            (
                sum(loss for at, loss in self.losses if start <= at < start + WINDOW)
                for start, _ in self.losses
            ),
            default=0.0,
        )


def draw_requests(seed: int, count: int = 60) -> list[SimRequest]:
    draw = random.Random(seed)
    now, requests = 0.0, []
    for index in range(count):
        now += draw.expovariate(draw.choice([2.0, 20.0]))
        level = draw.choice([0, 0, 1, 4, 4])
        requests.append(SimRequest(index, now, level, draw.randint(1, 300), draw.randint(1, 150)))
    return requests


def watch(price: float, seed: int, **engine: Any) -> tuple[Watch, list[Run]]:
    """Run one load under holds at this price, where an urgent second is worth any other."""
    seen = Watch()
    policy = {"protect": {"level": 0, "price": price, "worth": 1e6}}
    runs = drive(policy, draw_requests(seed), seen.note, profile=PROFILE, **engine)
    assert all(run.finish is not None for run in runs)
    return seen, runs


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    price=st.sampled_from([0.0, 0.001, 0.01, 0.2]),
    seats=st.sampled_from([2, 6]),
    kv_blocks=st.sampled_from([None, 60]),
    swap=st.booleans(),
)
def test_holds_stay_within_their_price(seed, price, seats, kv_blocks, swap) -> None:
    """Over any window: at most the price, and one step."""
    engine = {"seats": seats, "kv_blocks": kv_blocks, "token_budget": 128, "swap": swap}
    seen, _ = watch(price, seed, **engine)
    assert seen.worst() <= price * WINDOW + seen.largest + 1e-9


def test_these_loads_would_exceed_a_smaller_price() -> None:
    """Else the bound would say little."""
    worst = max(watch(0.9, seed, seats=4, token_budget=128)[0].worst() for seed in range(5))
    assert worst > 0.01 * WINDOW


def test_nobody_is_held_while_the_next_request_can_start() -> None:
    for seed in range(5):
        seen, _ = watch(0.9, seed, seats=4, token_budget=128)
        assert seen.losses and not seen.held_with_room


def test_urgent_finish_sooner_without_delaying_first_tokens() -> None:
    """Beyond the work that the holds cost."""
    for seed in range(3):
        _, held = watch(0.2, seed, seats=4, token_budget=128)
        seen, free = watch(0.0, seed, seats=4, token_budget=128)
        assert not seen.losses

        def urgent(runs: list[Run]) -> float:
            return sum(run.finish - run.request.arrival for run in runs if not run.request.level)

        def last_start(runs: list[Run]) -> float:
            return max(run.first_token for run in runs)

        assert urgent(held) < urgent(free)
        assert last_start(held) <= 1.2 * last_start(free)
