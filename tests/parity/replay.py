"""Replays a recording through the simulator's engine and its view."""

import bisect
import copy
from collections.abc import Collection, Iterable
from typing import Any

from vllm_semantic_sched.policy.config import load_policy
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.eviction.retention import HostRoom, PreemptionPlan
from vllm_semantic_sched.policy.facts.job import Job, JobState
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.overload.refusal import Refusal
from vllm_semantic_sched.policy.profile.formula import load_profile
from vllm_semantic_sched.policy.step import SchedulingStep
from vllm_semantic_sched.policy.view import PrefillLimits
from vllm_semantic_sched.sim.engine import Engine
from vllm_semantic_sched.sim.request import Run, SimRequest
from vllm_semantic_sched.sim.sections import EngineModel

from .recording import BUCKETS, Arrival, Decision, DecisionLog, Output, Recording, Step


class ReplayEngine(Engine):
    """The simulated engine, with the real one's facts: time, predictions, progress, free blocks,
    steps in flight, and how many requests vLLM preempted and admitted. Which ones is decided
    here."""

    def __init__(self, recording: Recording, log: DecisionLog) -> None:
        policy = load_policy(recording.policy)
        profile = load_profile(policy.profile)
        core = SchedulingCore(policy, profile, BUCKETS, clock=lambda: self._now)
        model = EngineModel(
            seats=recording.seats,
            token_budget=recording.token_budget,
            block_size=recording.block_size,
            kv_blocks=recording.blocks,
            swap=recording.host_blocks is not None,
            host_blocks=recording.host_blocks,
        )
        super().__init__(core, model, profile)
        core.lifecycle.listeners.append(log)
        self._log = log
        self._jobs: dict[str, Job] = {}
        self._here = Step(0.0)
        self._free = 0
        self._unready: set[str] = set()

    def arrive(self, event: Arrival) -> None:
        self._now = event.now
        job = copy.copy(event.job)
        self.core.arrive(job, event.now)
        self._jobs[job.request_id] = job
        request = SimRequest(
            0, job.arrival, 0, job.prompt_tokens, job.max_output_tokens, job.tenant
        )
        run = Run(request, job, None)
        self._runs[job] = run
        self.waiting[0] += 1
        self.core.enqueue(job, self.core.waiting)
        self.step.arrived(self, job, *event.arrived)

    def run_step(self, event: Step) -> None:
        self._now, self._here, self._free = event.now, event, event.free_blocks
        self._unready = event.unready
        if self._host is not None:
            self._host.free = event.host_blocks
        self._hold_given = False
        passed_over = event.passed_over
        self.core.eviction.passed_over = self._jobs[passed_over] if passed_over else None
        self.step.run(self)
        if not self._hold_given:
            super().hold(())
        self._log.ordered(self.core)
        for _ in range(event.preempted):
            self.preempt(self.running[-1], "kv_shortage")
        self._unready = event.unready_after
        for job in self._admitted(event.admitted):
            # A token that was in flight when it was preempted may have come since.
            job.computed, job.generated = event.after.get(job.request_id, (0, job.generated))
            self.waiting[0] -= 1
            self.core.start(job)
            self._prefilling[job] = None
            bisect.insort(self.running, job, key=self.core.running.order)
        for job in list(self._prefilling):
            if event.after.get(job.request_id, (0, 0))[0] >= job.tokens:
                del self._prefilling[job]

    def _admitted(self, number: int) -> list[Job]:
        """The first so many of those waiting that can start."""
        admitted: list[Job] = []
        skipped: list[Job] = []
        while len(admitted) < number and (job := self.core.waiting.peek()) is not None:
            self.core.take(job, self.core.waiting)
            # What is saved in this step cannot be loaded in it.
            saving = job.state is JobState.SWAPPED and job.entered == self._now
            (admitted if self.is_ready(job) and not saving else skipped).append(job)
        for job in skipped:
            self.core.requeue(job, self.core.waiting)
        return admitted  # if too few, the difference shows in the decisions

    def output(self, event: Output) -> None:
        self._now = event.now
        for observed in event.observed:
            self.core.estimates.observe_step(*observed)
        ended = {name for name, _, _ in event.ended}
        for name, generated, arguments in event.ended:
            job = self._jobs[name]
            job.generated = generated
            if generated:
                self.core.lifecycle.first_token(job)
            if job in self.core.running:
                self._leave(self._runs[job], "finish")
            self.core.finish(job, *arguments)
        for name in event.first_tokens:
            if name not in ended:
                self.step.first_token(self, self._jobs[name])

    # Facts of the recording, in place of the model's

    def predictions(self) -> Iterable[tuple[Job, Prediction | None]]:
        return [(self._jobs[name], said) for name, said in self._here.predictions]

    def observe(self, job: Job) -> None:
        if job in self.core.running and job.request_id in self._here.progress:
            job.computed, job.generated, _ = self._here.progress[job.request_id]

    def prefilling(self) -> Any:
        for job in self._prefilling:
            self.observe(job)
        return self._prefilling

    def kv_use(self) -> float:
        return self._here.kv_use

    def free_blocks(self) -> int:
        return self._free

    def coming_blocks(self) -> int:
        return self._here.coming_blocks

    def reserved_blocks(self) -> int:
        return self._here.reserved_blocks

    def decode_tokens(self) -> int:
        return sum(job not in self._prefilling and job not in self.held for job in self.running)

    def is_ready(self, job: Job) -> bool:
        return job.request_id not in self._unready

    def needed_blocks(self, job: Job) -> int:
        return int(self._answer("needed_blocks", job, super().needed_blocks(job)))

    def can_advance(self, job: Job) -> bool:
        return bool(self._answer("can_advance", job, True))

    def freeable_blocks(self, job: Job) -> int | None:
        if self._answer("freeable_blocks", job, 0) is None:
            return None  # a step in flight may write them
        return self.pool.needed(self._computed(job))

    def _answer(self, question: str, job: Job, default: Any) -> Any:
        return self._here.answers.get((question, job.request_id), default)

    def _plan(self, job: Job) -> PreemptionPlan:
        room = HostRoom(self._host.block_size, self._host.free) if self._host else None
        _, job.generated, job.computed = self._here.progress[job.request_id]
        return self.core.plan_preemption(job, room, can_drop=True)

    # Orders: what they free counts as free

    def preempt(self, job: Job, reason: str, beneficiary: Job | None = None) -> None:
        self._give_back(job)
        super().preempt(job, reason)

    def end(self, job: Job, refusal: Refusal) -> None:
        if job in self.core.running:
            self._give_back(job)
            job.generated = self._here.progress[job.request_id][1]
        super().end(job, refusal)

    def limit_prefills(self, limits: PrefillLimits) -> None:
        self._log.limited(limits)
        super().limit_prefills(limits)

    def hold(self, jobs: Collection[Job]) -> None:
        self._log.holds(jobs)
        super().hold(jobs)

    def _give_back(self, job: Job) -> None:
        freed = self.freeable_blocks(job)
        assert freed is not None
        # Free blocks are counted without one for each request that is about to begin a block.
        self._free += freed + (self._computed(job) % self.pool.block_size == 0)

    def _computed(self, job: Job) -> int:
        """Tokens with KV. Like the engine, a question leaves what the job knows as it is."""
        return self._here.progress[job.request_id][0]


def replay(recording: Recording, exchanged: tuple[str, str] | None = None) -> list[list[Decision]]:
    """The decisions of the simulator's path after each event of a recording.

    Args:
        exchanged: names of two parts of the step whose order is exchanged.
    """
    log = DecisionLog()
    engine = ReplayEngine(recording, log)
    if exchanged is not None:
        _exchange(engine.step, *exchanged)
    decisions = []
    for event in recording.events:
        if isinstance(event, Arrival):
            engine.arrive(event)
        elif isinstance(event, Step):
            engine.run_step(event)
        else:
            engine.output(event)
        decisions.append(log.take())
    return decisions


def _exchange(step: SchedulingStep, first: str, second: str) -> None:
    """Each of the two parts runs when the other should."""
    guarded = step._guarded
    parts = {first: getattr(step, first), second: getattr(step, second)}

    def exchanged(doing: str, part: Any, *args: Any) -> Any:
        name = part.__name__
        if name in parts:
            part = parts[second if name == first else first]
            args = (args[0], False)[: part.__code__.co_argcount - 1]
        return guarded(doing, part, *args)

    step._guarded = exchanged  # type: ignore[method-assign]
