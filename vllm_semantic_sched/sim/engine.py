"""An engine that runs the policy core's decisions, step by step, in virtual time."""

from __future__ import annotations

import bisect
import math

from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.length_calibration import Ending
from vllm_semantic_sched.policy.eviction.retention import HostRoom, PreemptionPlan
from vllm_semantic_sched.policy.eviction.room import Room, choose_evictions
from vllm_semantic_sched.policy.job import Job, JobState
from vllm_semantic_sched.policy.overload.refusal import Code
from vllm_semantic_sched.sim.blocks import BlockPool
from vllm_semantic_sched.sim.cost import Chunk, StepCost, StepWork
from vllm_semantic_sched.sim.decoding import Decoding
from vllm_semantic_sched.sim.request import Run, Seat


class RequestTooLarge(ValueError):
    """A request that the engine could not hold even if it were alone."""


class Engine:
    """Seats, KV blocks and steps, as vLLM's V1 engine has them.

    A step, in this order: estimates that were outlived are revised; running requests are
    preempted for more urgent waiting ones; the stage decision bounds the prefills; decoding
    requests take the blocks that they need, at the expense of the tail of the running list;
    prefills go on; waiting requests are admitted while seats, blocks and tokens last. Decodes
    take their tokens from the budget before prefills do.

    Args:
        seats: sequences in a step at most (the paper's batch size).
        token_budget: tokens in a step at most; None for whole prompts whatever their length.
        host: where victims' KV may go; None: nowhere.
        keep_seats: record when each request had a seat.

    Attributes:
        running: jobs with a seat, most urgent first.
        waiting: how many wait for a seat, by true level.
    """

    def __init__(
        self,
        core: SchedulingCore,
        cost: StepCost,
        pool: BlockPool,
        seats: int,
        token_budget: int | None,
        host: BlockPool | None,
        keep_seats: bool = False,
    ) -> None:
        self.core = core
        self.pool = pool
        self.seats = seats
        self.running: list[Job] = []
        self._orders: list[tuple[float, float, int]] = []  # of these
        self.waiting = [0] * core.policy.levels
        self._cost = cost
        self._token_budget = math.inf if token_budget is None else token_budget
        self._host = host
        self._keep_seats = keep_seats
        self._runs: dict[Job, Run] = {}
        self._prefilling: dict[Job, None] = {}
        self._decoding = Decoding(pool, cost.uses_longest)
        self._chunks: dict[Job, int] = {}
        self._swapped_out: list[int] = []
        # Nothing was to be decided, and nothing has come, gone or moved since.
        self._same_again = False

    # Requests

    def submit(self, run: Run) -> None:
        """A request arrives at the queue.

        Raises:
            RequestTooLarge: its prompt and answer exceed the KV cache.
        """
        request = run.request
        needed = self.pool.needed(request.prompt_tokens + request.output_tokens)
        if needed > self.pool.total:
            raise RequestTooLarge(
                f"request {request.index} needs {needed} KV blocks for {request.prompt_tokens} "
                f"prompt and {request.output_tokens} output tokens; the engine has "
                f"{self.pool.total}"
            )
        self._runs[run.job] = run
        self.waiting[request.level] += 1
        self._same_again = False
        self.core.enqueue(run.job, self.core.waiting)

    def predicted(self, run: Run) -> None:
        """The prediction for a submitted request has come back."""
        self._decoding.observe(run)
        self._same_again = False
        self.core.predicted(run.job, run.prediction)
        if run.job in self.core.running:
            self._reposition(run.job)

    def refuse(self, job: Job, code: Code, now: float) -> Run:
        """The policy ends a request before it is complete."""
        run = self._runs.pop(job)
        self._same_again = False
        self._decoding.observe(run)
        if job in self.core.running:
            self._leave(run, now, code.value)
        else:
            self.waiting[run.request.level] -= 1
            if self._host is not None:
                self._host.give_back(self._host.needed(job.swapped))
        run.refused = code.value
        self.core.finish(job, Ending.ABORTED, JobState.REFUSED, code.value)
        return run

    @property
    def free_seats(self) -> int:
        """Seats that nobody holds."""
        return self.seats - len(self.running)

    def blocks_of(self, job: Job) -> int:
        """KV blocks that a submitted job holds."""
        return self._decoding.blocks(self._runs[job])

    # Steps

    def begin_step(self, now: float) -> float | None:
        """Decide what the coming step does; its duration in seconds, None if all is done."""
        core = self.core
        if not self.running and not len(core.waiting):
            return None
        self._swapped_out = []
        self._chunks = {}
        for job in core.step(self._observe, now):
            self._reposition(job)
        while (found := core.eviction.intruder()) is not None:
            self._preempt(self._runs[found[0]], now)
        if self._nothing_to_decide():
            self._grow(now)
            return self._cost.seconds(self._step_work())
        self._make_room(now)
        newcomer = core.waiting.peek()
        paused = self._paused(newcomer)
        limit = self._prefill_limit(newcomer)
        preempted = self._grow(now)
        budget = min(self._token_budget - len(self._decoding), limit)
        share = math.inf if limit is math.inf else max(1, limit // max(1, len(self._prefilling)))
        ordered = sorted(self._prefilling, key=core.running.order) if self._prefilling else ()
        for job in ordered:
            if job not in paused and budget > 0:
                budget -= self._schedule(job, min(budget, share))
        if not preempted:
            self._admit(now, budget, share)
        return self._cost.seconds(self._step_work())

    def end_step(self, now: float) -> list[Run]:
        """The step is over; the requests that are complete by it."""
        finished = self._decoding.advance()
        for job, tokens in self._chunks.items():
            job.computed += tokens
            if job.computed < job.tokens:
                continue
            run = self._runs[job]
            self._prefilling.pop(job)
            job.generated += 1
            if run.first_token is None:
                run.first_token = now
                self.core.first_token(job)
            if job.generated == run.request.output_tokens:
                finished.append(run)
            else:
                self._decoding.add(run)
        for run in finished:
            run.finish = now
            self._leave(run, now, "finish")
            del self._runs[run.job]
            self.core.finish(run.job, Ending.STOPPED)
        return finished

    def skip_steps(self, available: float) -> tuple[int, float]:
        """Take those of the coming steps at once that do nothing but go on decoding, into free
        blocks where they need more.

        Args:
            available: seconds within which nothing comes from outside.

        Returns:
            How many they are, and their duration. A step's time grows linearly with the context, so
            that the first and the last of them tell the sum.
        """
        if not self._same_again:
            return 0, 0.0
        decoding = self._decoding
        steps = min(self.core.uneventful_steps(), decoding.uneventful_steps)
        if decoding.growth(steps) > self.pool.free:
            steps = bisect.bisect_right(range(steps), self.pool.free, key=decoding.growth) - 1
        if steps < 2:
            return 0, 0.0

        def step_seconds(number: int) -> float:
            work = StepWork(
                decodes=len(decoding),
                context=decoding.context + number * len(decoding),
                longest_context=decoding.longest_context + number,
            )
            return self._cost.seconds(work)

        def seconds(count: int) -> float:
            return count * (first + step_seconds(count - 1)) / 2.0

        first = step_seconds(0)
        if seconds(steps) >= available:
            steps = bisect.bisect_left(range(1, steps + 1), available, key=seconds)
            if not steps:
                return 0, 0.0
        total = seconds(steps)
        self.pool.take(decoding.growth(steps))
        decoding.skip(steps)
        self.core.skip_steps(steps)
        return steps, total

    # Decisions, each the policy core's

    def _nothing_to_decide(self) -> bool:
        """Whether all that the step can do is go on decoding. Most steps are like that, and
        asking the policy core all its questions in them would double a simulation's time."""
        if not self._same_again or not self.core.fairness.steady:
            core = self.core
            full = len(self.running) >= self.seats
            self._same_again = not self._prefilling and (
                core.waiting.peek() is None or (full and not core.eviction.wants_room)
            )
        return self._same_again

    def _make_room(self, now: float) -> None:
        core = self.core
        if not core.eviction.wants_room:
            return
        room = Room(
            seats=self.free_seats,
            blocks=self.pool.free - self._decoding.growth(1),
            prefill_tokens=self._token_budget - len(self.running),
        )
        for victim in choose_evictions(
            core,
            room,
            ready=lambda job: True,
            needed_blocks=self._needed,
            freeable_blocks=self.blocks_of,
            preemption_seconds=lambda job: self._plan(job).seconds,
        ):
            self._preempt(self._runs[victim], now)

    def _paused(self, newcomer: Job | None) -> set[Job]:
        """Prefills that sit out this step for a more urgent newcomer that can come in."""
        if newcomer is None or not self._prefilling or self._token_budget is math.inf:
            return set()
        admissible = len(self.running) < self.seats and self._needed(
            newcomer
        ) <= self.pool.free - self._decoding.growth(1)
        if not admissible:
            return set()
        budget = int(self._token_budget) - len(self._decoding)
        return set(self.core.prefills_that_yield(newcomer, self._prefilling, budget))

    def _prefill_limit(self, newcomer: Job | None) -> float:
        """Prefill tokens that the stage decision allows; inf if it leaves the step as it is."""
        if not self.running or (newcomer is None and not self._prefilling):
            return math.inf
        levels = [job.effective_level for job in self._prefilling]
        if newcomer is not None:
            levels.append(newcomer.effective_level)
        best = self.running[0]
        decoding = self._runs[best] in self._decoding
        limit = self.core.prefill_token_limit(
            best.effective_level if decoding else None, min(levels)
        )
        return math.inf if limit is None else limit

    def _grow(self, now: float) -> bool:
        """Give a block to each decoding request that needs one; whether any was preempted."""
        decoding = self._decoding
        enough = self.pool.take(decoding.growth(1))
        if not enough:
            # The tail goes first, which has not got its own yet.
            for run in sorted(
                decoding.outgrowing(), key=lambda run: self.core.running.order(run.job)
            ):
                while run in decoding and not self.pool.take(1):
                    self._preempt(self._runs[self.running[-1]], now)
        decoding.grow()
        return not enough

    def _admit(self, now: float, budget: float, share: float) -> None:
        core = self.core
        while len(self.running) < self.seats and budget > 0:
            job = core.waiting.peek()
            if job is None:
                return
            needed = self._needed(job)
            if not self.pool.take(needed):
                return
            core.take(job, core.waiting)
            run = self._runs[job]
            self.waiting[run.request.level] -= 1
            run.blocks = needed
            run.loading, job.computed = job.swapped, job.swapped
            if self._host is not None:
                self._host.give_back(self._host.needed(run.loading))
            core.start(job)
            run.seated = now
            run.started = now if run.started is None else run.started
            self._prefilling[job] = None
            self._insert(job)
            budget -= self._schedule(job, min(budget, share))

    # Bookkeeping

    def _schedule(self, job: Job, most: float) -> int:
        """Let a request compute up to `most` tokens in this step."""
        tokens = int(min(job.tokens - job.computed, most))
        self._chunks[job] = tokens
        return tokens

    def _step_work(self) -> StepWork:
        work = StepWork(
            decodes=len(self._decoding),
            context=self._decoding.context,
            longest_context=self._decoding.longest_context,
            saved=self._swapped_out,
        )
        for job, tokens in self._chunks.items():
            run = self._runs[job]
            work.chunks.append(Chunk(job.computed, job.computed + tokens, run.loading))
            run.loading = 0
        return work

    def _preempt(self, run: Run, now: float) -> None:
        job = run.job
        plan = self._plan(job)
        self.core.preempt(job, plan)
        if self._host is not None and plan.saved:
            run.swaps += 1
            self._swapped_out.append(plan.saved)
            self._host.take(self._host.needed(plan.saved))
        else:
            run.recomputes += 1
        self._leave(run, now, "swap" if plan.saved else "recompute")
        self.waiting[run.request.level] += 1
        self.core.requeue(job, self.core.waiting)

    def _plan(self, job: Job) -> PreemptionPlan:
        self._observe(job)
        host = self._host
        room = HostRoom(host.block_size, host.free) if host is not None else None
        return self.core.plan_preemption(job, room)

    def _leave(self, run: Run, now: float, kind: str) -> None:
        """A request gives back its seat and its blocks."""
        self._same_again = False
        self._remove(run.job)
        self._decoding.discard(run)
        self._prefilling.pop(run.job, None)
        self.pool.give_back(run.blocks)
        run.blocks = 0
        if self._keep_seats:
            run.seats.append(Seat(run.seated, now, kind))

    def _observe(self, job: Job) -> None:
        self._decoding.observe(self._runs[job])

    def _needed(self, job: Job) -> int:
        return self.pool.needed(job.tokens)

    def _reposition(self, job: Job) -> None:
        self._same_again = False
        self._remove(job)
        self._insert(job)

    def _remove(self, job: Job) -> None:
        place = self.running.index(job)
        del self.running[place], self._orders[place]

    def _insert(self, job: Job) -> None:
        order = self.core.running.order(job)
        place = bisect.bisect(self._orders, order)
        self.running.insert(place, job)
        self._orders.insert(place, order)
