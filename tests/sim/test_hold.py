"""Held requests: they keep seat and blocks, get no token, and go on where they were."""

import random
from typing import Any

import pytest
from drive import PROFILE, Choose, drive, end, hold_by, observe, seats_of
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.job import Job, JobState
from vllm_semantic_sched.sim.engine import Engine
from vllm_semantic_sched.sim.request import Run, SimRequest
from vllm_semantic_sched.sim.sections import EngineModel
from vllm_semantic_sched.sim.snapshot import EngineSnapshot


class World:
    """An engine, its clock and its requests."""

    def __init__(self, choose: Choose, early: bool = False, **engine: Any) -> None:
        policy = parse_policy({"predictor": {"enabled": False}})
        self.now = 0.0
        self.core = SchedulingCore(policy, PROFILE, clock=lambda: self.now)
        self.engine = Engine(self.core, EngineModel(**engine), PROFILE, keep_seats=True)
        self.runs: list[Run] = []
        hold_by(self.engine, choose, early)

    def add(self, level: int, prompt: int, output: int) -> Run:
        index = len(self.runs)
        request = SimRequest(index, self.now, level, prompt, output)
        hint = self.core.read_hints({"urgency": level}, 0)
        job = self.core.arrive(self.core.draft(str(index), prompt, 4096, hint, False), self.now)
        self.runs.append(Run(request, job, None))
        self.engine.submit(self.runs[-1])
        return self.runs[-1]

    def step(self) -> float | None:
        seconds = self.engine.begin_step()
        if seconds is not None:
            self.now += seconds
            self.engine.end_step()
        return seconds

    def generated(self, run: Run) -> int:
        observe(self.engine, run.job)
        return run.job.generated


def test_held_decode_keeps_its_blocks_and_gets_no_token() -> None:
    holding: list[Job] = []
    world = World(lambda engine: list(holding), seats=4, kv_blocks=40, block_size=4)
    urgent, other = world.add(0, 8, 30), world.add(4, 8, 30)
    for _ in range(3):
        world.step()
    assert world.generated(urgent) == world.generated(other) == 3
    engine, snapshot = world.engine, EngineSnapshot(world.engine)
    blocks = snapshot.freeable_blocks(other.job)
    holding.append(other.job)
    for _ in range(6):
        world.step()
    assert (world.generated(urgent), world.generated(other)) == (9, 3)
    assert snapshot.freeable_blocks(other.job) == blocks and engine.decodes_now() == 1
    assert engine.pool.free == 40 - snapshot.freeable_blocks(urgent.job) - blocks
    holding.clear()
    world.step()
    assert (world.generated(urgent), world.generated(other)) == (10, 4)


def test_blocks_that_held_requests_need_next_are_put_aside() -> None:
    holding: list[Job] = []
    world = World(lambda engine: list(holding), seats=4, kv_blocks=40, block_size=4)
    urgent, other = world.add(0, 9, 30), world.add(4, 8, 30)
    world.step()  # the next token of `other` begins a block
    holding.append(other.job)
    world.step()
    assert EngineSnapshot(world.engine).blocks == world.engine.pool.free - 1
    assert world.generated(urgent) == 2


def test_without_an_order_nobody_is_held() -> None:
    held: list[list[Job] | None] = [None]
    world = World(lambda engine: held[0], seats=4)
    first, second = world.add(0, 8, 30), world.add(4, 8, 30)
    world.step()
    held[0] = [second.job]
    world.step()
    held[0] = None
    assert world.engine.decodes_now() == 1
    world.step()
    assert (world.generated(first), world.generated(second)) == (3, 2)
    assert world.engine.decodes_now() == 2


def test_decodes_count_as_advancing_until_the_step_holds_them() -> None:
    seen: list[int] = []

    def choose(engine: Engine) -> list[Job]:
        seen.append(EngineSnapshot(engine).decoding)
        return engine.running[1:]

    world = World(choose, seats=4)
    for level in range(3):
        world.add(level, 8, 30)
    for _ in range(3):
        world.step()
        seen.append(world.engine.decodes_now())
    assert seen == [0, 3, 3, 1, 3, 1]


def test_no_steps_are_skipped_while_somebody_is_held() -> None:
    holding: list[Job] = []
    world = World(lambda engine: list(holding), seats=4)
    world.add(0, 8, 300)
    other = world.add(4, 8, 300)
    for _ in range(3):
        world.step()
    holding.append(other.job)
    world.step()
    assert world.engine._settled
    assert world.engine.skip_steps(float("inf")).steps == 0
    holding.clear()
    world.step()
    assert world.engine.skip_steps(float("inf")).steps > 100


def test_held_prefill_gets_no_chunk() -> None:
    holding: list[Job] = []
    world = World(lambda engine: list(holding), seats=4, token_budget=64)
    urgent, other = world.add(0, 8, 30), world.add(4, 500, 30)
    world.step()
    computed = other.job.computed
    assert 0 < computed < 500
    holding.append(other.job)
    world.step()
    assert other.job.computed == computed and other.job in world.engine.prefilling
    holding.clear()
    world.step()
    assert other.job.computed == computed + 63 and world.generated(urgent) == 3


@pytest.mark.parametrize("swap", [False, True])
def test_held_request_can_be_preempted_and_comes_back_whole(swap) -> None:
    holding: list[Job] = []
    world = World(
        lambda engine: list(holding), early=True, seats=2, kv_blocks=60, block_size=4, swap=swap
    )
    first, second = world.add(1, 8, 40), world.add(4, 8, 40)
    for _ in range(3):
        world.step()
    holding.append(second.job)
    world.step()
    world.add(0, 8, 40)
    world.step()
    assert second.job.state is not JobState.RUNNING and second.job.generated == 3
    assert second.spans[-1].end_kind in ("swap", "recompute")
    assert second.spans[-1].held == second.held > 0.0
    holding.clear()
    while world.step() is not None:
        pass
    assert [run.job.generated for run in world.runs] == [40, 40, 40]
    assert world.engine.pool.free == 60 and first.held == 0.0


def test_held_request_can_be_ended() -> None:
    holding: list[Job] = []
    world = World(lambda engine: list(holding), seats=2, kv_blocks=60, block_size=4)
    first, second = world.add(1, 8, 40), world.add(4, 8, 40)
    world.step()
    holding.append(second.job)
    world.step()
    holding.clear()
    end(world.engine, second.job)
    while world.step() is not None:
        pass
    assert (first.job.generated, second.job.generated) == (40, 1)
    assert world.engine.pool.free == 60


class Naive:
    """The tokens and blocks of every seated request, counted one by one in each step."""

    def __init__(self, engine: Engine, block_size: int, limited: bool) -> None:
        self.engine = engine
        self.block_size = block_size
        self.limited = limited
        self.generated: dict[Job, int] = {}

    def check(self, held: set[Job]) -> None:
        """To be called when a step is decided, before it ends."""
        engine = self.engine
        decoding = [job for job in engine.running if job not in engine.prefilling]
        for job in engine.running:
            observe(engine, job)
            assert job.generated == self.generated.get(job, 0)
            if self.limited:
                # What advances has its block for the coming token already.
                tokens = job.tokens - (job in held)
                if job not in decoding:  # blocks for what it has computed by the end of the step
                    tokens = job.computed + engine._chunks.get(job, 0)
                assert EngineSnapshot(engine).freeable_blocks(job) == -(-tokens // self.block_size)
        advancing = [job for job in decoding if job not in held]
        assert engine.decodes_now() == len(advancing)
        assert engine.decoding.context == sum(job.tokens for job in advancing)
        assert engine.decoding.longest_context in (
            0,
            max((job.tokens for job in advancing), default=0),
        )
        in_use = sum(EngineSnapshot(engine).freeable_blocks(job) for job in engine.running)
        assert engine.pool.total - engine.pool.free == in_use
        for job in advancing:
            self.generated[job] = self.generated.get(job, 0) + 1

    def check_end(self, prefills: set[Job]) -> None:
        """To be called when the step is over.

        Args:
            prefills: what was in prefill when it was decided. Each that ended gave a token.
        """
        engine = self.engine
        for job in prefills - set(engine.prefilling):
            self.generated[job] = self.generated.get(job, 0) + 1
        for job in engine.running:
            observe(engine, job)
        growing = sum(
            engine.pool.needed(job.tokens) > EngineSnapshot(engine).freeable_blocks(job)
            for job in engine.running
            if job not in engine.prefilling
        )
        if self.limited:
            assert EngineSnapshot(engine).blocks == engine.pool.free - growing


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(["paper", "vllm"]),
    blocks=st.sampled_from([None, 24, 60]),
    block_size=st.sampled_from([1, 4, 16]),
    budget=st.sampled_from([8, 64]),
    swap=st.booleans(),
    early=st.booleans(),
    share=st.sampled_from([0.1, 0.5, 0.9]),
)
def test_random_holds_agree_with_a_count_of_each_request(
    seed, kind, blocks, block_size, budget, swap, early, share
) -> None:
    draw = random.Random(seed)
    held: set[Job] = set()

    def choose(engine: Engine) -> list[Job] | None:
        """Some of those that run stay held, some join them; at least one advances."""
        if draw.random() < 0.1:
            held.clear()
            return None
        for job in engine.running:
            if draw.random() < 0.3:
                (held.add if draw.random() < share else held.discard)(job)
        held.intersection_update(engine.running)
        if held and len(held) == len(engine.running):
            held.discard(draw.choice(engine.running))
        return sorted(held, key=lambda job: job.sequence)

    size = block_size if blocks is not None else 16
    world = World(
        choose, early, kind=kind, seats=4, kv_blocks=blocks, block_size=size,
        token_budget=budget, swap=swap,
    )  # fmt: skip
    naive = Naive(world.engine, size, blocks is not None)
    largest = 200 if blocks is None else blocks * size - 1
    left = 25
    for _ in range(20_000):
        while left and draw.random() < 0.3:
            prompt = draw.randint(1, max(1, min(80, largest - 1)))
            output = draw.randint(1, max(1, min(40, largest - prompt)))
            world.add(draw.randint(0, 4), prompt, output)
            left -= 1
        seconds = world.engine.begin_step()
        if seconds is None:
            if not left:
                break
            continue
        running = set(world.engine.running)
        naive.check(held & running)
        prefills = set(world.engine.prefilling)
        world.now += seconds
        world.engine.end_step()
        naive.check_end(prefills)
    assert all(run.finish is not None for run in world.runs) and not left
    assert all(run.job.generated == run.request.output_tokens for run in world.runs)
    if blocks is not None:
        assert world.engine.pool.free == blocks
    for run in world.runs:
        assert abs(run.held - sum(seat.held for seat in seats_of(run))) < 1e-9
        assert run.held <= sum(seat.end - seat.start for seat in seats_of(run)) + 1e-9


def test_holding_nobody_changes_nothing() -> None:
    requests = [SimRequest(n, 0.1 * n, n % 5, 20 + 7 * n, 10 + n) for n in range(30)]
    plain = drive({}, requests, seats=4, kv_blocks=30)
    held = drive({}, requests, lambda engine, now: engine._hold(()), seats=4, kv_blocks=30)
    assert [run.finish for run in held] == [run.finish for run in plain]
