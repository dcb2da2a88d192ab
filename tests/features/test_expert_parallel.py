"""Engines that share experts step together, in waves, as long as one of them has requests."""

import queue
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from virtual_runs import FEATURE_LOAD, MUCH_HELD, mean_ttft, note_holds
from vllm.config import ParallelConfig
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType
from vllm.v1.engine import core as engine_core
from vllm.v1.engine.core import DPEngineCoreProc, EngineShutdownState

from vllm_semantic_sched.lab.device.clocks import StepTime
from vllm_semantic_sched.lab.device.fuzz import hold_at_random, look_around
from vllm_semantic_sched.lab.device.virtual import EngineConfig, VirtualEngine

pytestmark = pytest.mark.engine

RANKS = 2
LONGEST_REST = 200  # dummy batches in a row that both engines may make: none waits for anything
GAP = 6.0  # seconds between bursts, in which all requests of one are served


class Rank:
    """One of the engines, with vLLM's loop for engines that share experts."""

    def __init__(self, engine: VirtualEngine, number: int, group: "Group") -> None:
        self.engine = engine
        self.number = number
        self.group = group
        self.dummies = 0
        self.core: Any = engine.core
        engine.runner.finished_step = self._note_step
        self.core.__class__ = DPEngineCoreProc
        vars(self.core).update(
            dp_group=self,
            dp_rank=number,
            dp_size=RANKS,
            dp_sync_interval=4,
            prefill_schedule_interval=0,
            engine_index=number,
            engines_running=False,
            current_wave=1,  # later than what requests say, so that each wakes the others
            step_counter=0,
            pending_pause=False,
            ignore_start_dp_wave=False,
            has_coordinator=True,
            publish_dp_lb_stats=False,
            enable_fault_tolerance=False,
            eep_scaling_state=None,
            process_input_queue_block=True,
            shutdown_state=EngineShutdownState.RUNNING,
            _idle_state_callbacks=[],
            input_queue=queue.Queue(),
            output_queue=self,
            execute_dummy_batch=self._compute_nothing,
            _handle_shutdown=self._goes_on,
        )
        self._turns = 0

    @property
    def other(self) -> "Rank":
        return self.group.ranks[1 - self.number]

    @property
    def computed(self) -> int:
        """Batches so far, with requests and without."""
        return len(self.engine.steps) + self.dummies

    @property
    def works(self) -> bool:
        return self.core.has_work() or not self.core.input_queue.empty()

    def turn(self) -> None:
        """One turn of vLLM's loop."""
        assert self.works, "an engine waits for another that sleeps"
        self._turns = 1
        with pytest.raises(SystemExit):
            self.core.run_busy_loop()

    def _goes_on(self) -> bool:
        self._turns -= 1
        return self._turns >= 0

    def _note_step(self, step: StepTime) -> None:
        self.engine.steps.append(step)
        self.group.rest = 0

    def _compute_nothing(self) -> None:
        self.dummies += 1
        self.group.rest += 1
        self.core.model_executor.execute_dummy_batch()

    def put_nowait(self, output: tuple[int, EngineCoreOutputs]) -> None:
        """In place of the queue of outputs."""
        client, outputs = output
        if client == -1:
            self.group.coordinate(self, outputs)
        else:
            self.engine._take({client: outputs})


class Group:
    """Two engines on one clock. vLLM's coordinator and the all-reduce are between processes; here
    are others in their place."""

    def __init__(self, engines: list[VirtualEngine]) -> None:
        self.ranks = [Rank(engine, number, self) for number, engine in enumerate(engines)]
        self.waves = 0
        self.rest = 0  # dummy batches of both since a request ran
        self._running = False
        self._wave = 1
        self._said: list[tuple[bool, bool]] = []
        self._met: set[Rank] = set()

    def coordinate(self, sender: Rank, outputs: EngineCoreOutputs) -> None:
        """As vLLM's coordinator: a wave that begins on one engine begins on all."""
        if outputs.wave_complete is not None:
            self.waves += 1
            self._running = False
            self._wave = outputs.wave_complete + 1
        elif outputs.start_wave is not None and not self._running:
            self._running = True
            message = (outputs.start_wave, sender.number)
            for rank in self.ranks:
                rank.core.input_queue.put((EngineCoreRequestType.START_DP_WAVE, message))

    def reduce(
        self, said: tuple[bool, bool], other_comes: Callable[[], None]
    ) -> list[tuple[bool, bool]]:
        """What both ranks say where they meet. The first to come lets the other come."""
        self._said.append(said)
        if len(self._said) == 1:
            other_comes()
            assert len(self._said) == RANKS, "the other engine does not come"
            both, self._said = self._said, []
            return both
        return self._said

    def sync(self, rank: Rank, has_unfinished: bool, pending_pause: bool) -> tuple[bool, bool]:
        """In place of `ParallelConfig.sync_dp_state`."""
        self._met.add(rank)
        said = self.reduce((has_unfinished, pending_pause), rank.other.turn)
        pausing = sum(pause for _, pause in said)
        return any(has for has, _ in said) or pausing % RANKS != 0, pausing == RANKS

    def unfinished(self, rank: Rank, has_unfinished: bool) -> bool:
        """In place of `ParallelConfig.has_unfinished_dp`, where engines resume."""
        said = self.reduce((has_unfinished, False), rank.other.core.resume_scheduler)
        return any(has for has, _ in said)

    def pause(self) -> None:
        for rank in self.ranks:
            rank.core.pause_scheduler(mode="keep", clear_cache=False)

    def resume(self) -> None:
        assert not any(rank.works for rank in self.ranks)
        self.ranks[0].core.resume_scheduler()

    def run(self) -> None:
        """Until both are at rest, and nothing more is to come."""
        clock = self.ranks[0].engine.clock
        while True:
            for rank in self.ranks:
                rank.engine._deliver()
            if not any(rank.works for rank in self.ranks):
                for rank in self.ranks:
                    rank.core._notify_idle_state_callbacks()
                moments = [
                    rank.engine._waiting[-1][0] for rank in self.ranks if rank.engine._waiting
                ]
                if not moments:
                    return
                clock.wait_until(min(moments))
                continue
            self._met.clear()
            before = [rank.computed for rank in self.ranks]
            for rank in self.ranks:
                if rank not in self._met and rank.works:
                    rank.turn()
            computed = [rank.computed - then for rank, then in zip(self.ranks, before, strict=True)]
            assert computed in ([0, 0], [1, 1]), "an engine computes alone"
            assert self.rest < LONGEST_REST, "the wave does not end"


@pytest.fixture
def group(request, monkeypatch) -> Iterator[Group]:
    """With these fields of `EngineConfig`."""
    config = EngineConfig(
        shape="qwen3-30b-a3b",
        seats=3,
        blocks=64,
        max_model_len=640,
        options={"enable_expert_parallel": True},
        **request.param,
    )
    with ExitStack() as stack:
        engines: list[VirtualEngine] = []
        for _ in range(RANKS):
            engine = VirtualEngine(config)
            if engines:
                engine.clock = engines[0].clock
            engines.append(stack.enter_context(engine))
        group = Group(engines)
        clock = engines[0].clock
        monkeypatch.setattr(ParallelConfig, "sync_dp_state", staticmethod(group.sync))
        monkeypatch.setattr(ParallelConfig, "has_unfinished_dp", staticmethod(group.unfinished))
        monkeypatch.setattr(
            engine_core.time, "sleep", lambda seconds: clock.wait_until(clock.now() + seconds)
        )
        yield group


def send(group: Group) -> list[str]:
    """Three bursts: to both engines, to the first, and to the second alone."""
    chance = random.Random(3)
    names = []
    for burst, to in enumerate(((0, 1), (0,), (1,))):
        for number, one in enumerate(FEATURE_LOAD):
            arrival = one.arrival + burst * GAP
            leaves = arrival + chance.expovariate(5.0) if number % 5 == 2 else None
            sent = replace(one, name=f"{burst} {one.name}", arrival=arrival, abort=leaves)
            group.ranks[to[number % len(to)]].engine.send([sent])
            names.append(sent.name)
    return names


POLICIES = {
    "held": {"policy": MUCH_HELD},
    "copied": {"policy": MUCH_HELD, "asynchronous": False, "swap_gib": 1.0},
    "refused": {"policy": {"admission": {"queue": {"requests": 2}}}},
}


@pytest.mark.parametrize("group", POLICIES.values(), indirect=True, ids=POLICIES)
def test_waves_end_with_the_last_request_and_not_before(group, request) -> None:
    """Requests are held, wait for copies from the host, are refused, or their clients leave; both
    engines are paused in the middle of a wave. vLLM's loop asks the scheduler what is left."""
    held = []
    for rank in group.ranks:
        held.append(note_holds(rank.engine))
        hold_at_random(rank.engine, random.Random(7))
    names = send(group)
    group.ranks[0].engine.at(0.3, group.pause)
    group.ranks[0].engine.at(1.0, group.resume)
    group.run()
    records = group.ranks[0].engine.records | group.ranks[1].engine.records
    assert set(records) == set(names)
    assert all(record.ended is not None for record in records.values())
    reasons = {record.reason for record in records.values()}
    case = request.node.callspec.id
    assert reasons == {"stop", "left"} | ({"error"} if case == "refused" else set())
    assert all(held) or case == "refused"
    copied = [rank.engine.runner.timeline.copies_end > 0 for rank in group.ranks]
    assert all(copied) == (case == "copied")
    assert group.waves == 4  # one of them ends with the pause
    assert all(rank.dummies for rank in group.ranks)
    assert mean_ttft(records.values(), [0]) < mean_ttft(records.values(), [1, 2, 3, 4])
    for rank in group.ranks:
        look_around(rank.engine)
