"""Replays a recording: `step` on the recorded snapshots, and the simulator in vLLM's place."""

import bisect
import copy
from typing import Any

from vllm_semantic_sched.policy import step
from vllm_semantic_sched.policy.config import load_policy
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.job import Job, JobState
from vllm_semantic_sched.policy.orders import Victim
from vllm_semantic_sched.policy.profile.formula import load_profile
from vllm_semantic_sched.sim.engine import Engine, unguarded
from vllm_semantic_sched.sim.request import Run, SimRequest
from vllm_semantic_sched.sim.sections import EngineModel

from .recording import (
    BUCKETS,
    Answers,
    Arrival,
    Decision,
    DecisionLog,
    Name,
    Output,
    Recording,
    Step,
)


class Unasked(AssertionError):
    """The recorded step did not ask this question."""


class RecordedSnapshot:
    """What vLLM answered, with the jobs of the replay."""

    def __init__(self, answers: Answers, jobs: dict[str, Job]) -> None:
        self._answers = answers
        self._jobs = jobs

    def __getattr__(self, name: str) -> Any:
        if (name,) in self._answers:
            return self._with_jobs(self._answers[(name,)])
        if not any(question[0] == name for question in self._answers):
            raise Unasked(name)
        return lambda job, *args: self._about(name, job)

    def _about(self, name: str, job: Job) -> Any:
        if (name, job.request_id) not in self._answers:
            raise Unasked(name, job.request_id)
        return self._with_jobs(self._answers[name, job.request_id])

    def _with_jobs(self, answer: Any) -> Any:
        if isinstance(answer, Name):
            return self._jobs[answer]
        if type(answer) is list:
            return [self._with_jobs(each) for each in answer]
        return answer


class ReplayEngine(Engine):
    """The simulated engine, with the real one's facts: time, snapshots, and how many requests vLLM
    preempted and admitted by itself. Which ones is decided here."""

    def __init__(self, recording: Recording, log: DecisionLog) -> None:
        policy = load_policy(recording.policy)
        profile = load_profile(policy.profile)
        core = SchedulingCore(policy, profile, BUCKETS, clock=lambda: self._now)
        core.gated_level = recording.gated_level
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

    def arrive(self, event: Arrival) -> None:
        self._now = event.now
        job = copy.copy(event.job)
        self.core.arrive(job, event.now)
        self._jobs[job.request_id] = job
        request = SimRequest(
            0, job.arrival, 0, job.prompt_tokens, job.max_output_tokens, job.tenant
        )
        self.runs[job] = Run(request, job, None)
        self.waiting[0] += 1
        self.core.enqueue(job, self.core.waiting)
        if event.arrived is not None:
            # The engine takes none under a policy that admits all; then nothing may be asked here.
            answers = event.snapshots[0] if event.snapshots else {}
            snapshot = RecordedSnapshot(answers, self._jobs)
            for end in step.arrived(self.core, snapshot, job, *event.arrived):
                self._end(end)

    def run_step(self, event: Step) -> None:
        self._now = event.now
        self.host.free = event.host_blocks
        passed_over = event.passed_over
        self.core.eviction.passed_over = self._jobs[passed_over] if passed_over else None
        before, *filled = (RecordedSnapshot(answers, self._jobs) for answers in event.snapshots)
        orders = step.step(self.core, before, self._now, unguarded)
        self._log.ordered_by(orders)
        self._log.ordered(self.core)
        self._apply(orders)
        for kv_tokens, generated, room in event.own_victims:
            self._preempt_last(kv_tokens, generated, room)
        for job in self._admitted(event.admitted, event.unready):
            # A token that was in flight when it was preempted may have come since.
            job.computed, job.generated = event.after.get(job.request_id, (0, job.generated))
            self.waiting[0] -= 1
            self.core.start(job)
            bisect.insort(self.running, job, key=self.core.running.order)
        for snapshot in filled:
            step.filled(self.core, snapshot, event.tokens_left)

    def _preempt_last(self, kv_tokens: int, generated: int, room: Any) -> None:
        """The last request of the running list makes room, as vLLM chooses it."""
        job = self.running[-1]
        job.computed, job.generated = kv_tokens, generated
        plan = self.core.plan_preemption(job, kv_tokens, room, can_drop=True)
        self.core.preempt(job, plan, "kv_shortage")
        self.core.requeue(job, self.core.waiting)
        self._preempt(Victim(job, plan, "kv_shortage"))

    def _admitted(self, number: int, unready: set[str]) -> list[Job]:
        """The first so many of those waiting that can start."""
        admitted: list[Job] = []
        skipped: list[Job] = []
        while len(admitted) < number and (job := self.core.waiting.peek()) is not None:
            self.core.take(job, self.core.waiting)
            # What is saved in this step cannot be loaded in it.
            saving = job.state is JobState.SWAPPED and job.entered == self._now
            ready = job.request_id not in unready and not saving
            (admitted if ready else skipped).append(job)
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
                self._leave(self.runs[job], "finish")
            self.core.finish(job, *arguments)
        for name in event.first_tokens:
            if name not in ended:
                self.core.first_token(self._jobs[name])


def replay(recording: Recording) -> list[list[Decision]]:
    """The decisions of the replay after each event of a recording."""
    log = DecisionLog()
    engine = ReplayEngine(recording, log)
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
