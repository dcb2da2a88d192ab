"""An engine that runs the policy core's decisions, step by step, in virtual time."""

import bisect
import math
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

from vllm_semantic_sched.policy import step
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.calibration import AnswerEnd
from vllm_semantic_sched.policy.facts.capacity import EngineCapacity
from vllm_semantic_sched.policy.facts.job import Job, JobState
from vllm_semantic_sched.policy.order.inversions import InversionCause, Inversions
from vllm_semantic_sched.policy.orders import End, Orders, Victim
from vllm_semantic_sched.policy.overload.refusal import DROPPED
from vllm_semantic_sched.policy.profile.cost import loads_beside_steps
from vllm_semantic_sched.policy.profile.formula import EngineProfile
from vllm_semantic_sched.policy.record.spans import HELD
from vllm_semantic_sched.policy.retention import PreemptionKind
from vllm_semantic_sched.sim.accounts import Accounts, Outcome
from vllm_semantic_sched.sim.cost import Chunk, StepWork, slowest_of_batch, sum_of_tokens
from vllm_semantic_sched.sim.request import Run
from vllm_semantic_sched.sim.sections import EngineModel
from vllm_semantic_sched.sim.snapshot import EngineSnapshot
from vllm_semantic_sched.sim.workload import WorkloadError


class Skipped(NamedTuple):
    """Steps that were taken at once. `seconds`: until the clock stands where the next step is
    decided; `left`: of the last one, which is in flight then."""

    steps: int
    seconds: float
    left: float


_NONE_SKIPPED = Skipped(0, 0.0, 0.0)


def unguarded(doing: str) -> AbstractContextManager[None]:
    """The guard of a step whose errors are raised."""
    return _UNGUARDED


_UNGUARDED = nullcontext()


class Engine(Accounts):
    """Seats, KV blocks and steps of vLLM's V1 engine.

    `begin_step` has a step decided by the policy and carries its orders out, then does what vLLM
    does: decoding requests take the blocks that they need, at the expense of the tail of the
    running list; running requests get tokens in the order of that list, and waiting ones are
    admitted while seats, blocks and tokens last.

    An asynchronous engine begins the next step before the last one has ended, as vLLM does: its
    requests have then got their tokens already, whatever these are. Only `end_step` tells which
    ones were the first or the last.
    """

    def __init__(
        self,
        core: SchedulingCore,
        model: EngineModel,
        profile: EngineProfile,  # true times
        keep_seats: bool = False,  # record when each request had a seat and was held
        ended: Callable[[Run], None] = lambda run: None,  # told of those that the policy ends
        seed: int = 0,  # of what is random in the policy's limits
    ) -> None:
        self.core = core
        super().__init__(model)
        capacity = EngineCapacity(model.seats, model.kv_blocks, model.block_size)
        core.set_capacity(capacity, keeps_accounts=False, seed=seed)
        is_paper = self._is_paper
        if not is_paper:
            batch = model.batch or profile.batch_terms
            profile = profile.model_copy(update={"batch": batch})
        self._step_seconds = partial(slowest_of_batch if is_paper else sum_of_tokens, profile)
        self.waiting = [0] * core.policy.levels  # requests without a seat, by true level
        self._keep_seats = keep_seats
        self._ended = ended
        self._asynchronous = model.asynchronous and not is_paper
        self._chunks: dict[Job, int] = {}
        self.swapped_out: list[int] = []
        self._predictions: list[Run] = []
        self._orders = Orders()  # of the last step
        # No job has come, gone or moved since the last step began, or was decided.
        self._unchanged = self._settled = False
        self._repeating = False  # the last step repeated the one before
        core.watch_order(
            Inversions(
                core.policy.levels,
                self._seat_inverted,
                self._finish_inverted,
                level_of=lambda job: self.runs[job].request.level,
            )
        )
        self.held: dict[Job, float] = {}  # running jobs without a token in this step, since when

    def _seat_inverted(self, job: Job, cause: InversionCause) -> None:
        self.runs[job].seat_inversion = cause

    def _finish_inverted(self, job: Job) -> None:
        self.runs[job].finish_inversion = True

    # Requests

    def submit(self, run: Run) -> None:
        """Queue a request. WorkloadError if its prompt and answer exceed the KV cache."""
        request = run.request
        needed = self.pool.needed(request.prompt_tokens + request.output_tokens)
        if needed > self.pool.total:
            raise WorkloadError(
                f"request {request.index} needs {needed} KV blocks for {request.prompt_tokens} "
                f"prompt and {request.output_tokens} output tokens; the engine has "
                f"{self.pool.total}"
            )
        self.runs[run.job] = run
        self.waiting[request.level] += 1
        self.core.enqueue(run.job, self.core.waiting)
        self._change()
        for end in step.arrived(self.core, EngineSnapshot(self), run.job):
            self._end(end)

    def predicted(self, run: Run) -> None:
        """The prediction for a submitted request has come back; the next step applies it."""
        self._predictions.append(run)

    def observed(self, job: Job) -> Job:
        """A job of this engine, with its output tokens up to date."""
        self.decoding.observe(self.runs[job])
        return job

    def demote(self, job: Job) -> None:
        """Move a running job down by a level, for a baseline. It loses its seat if a more urgent
        one waits, whatever that costs."""
        self.core.levels.change(job, job.level + 1)
        self.core.rank_running(self.observed)
        self._change()
        first = self.core.waiting.peek()
        if first is not None and first.level < job.level and not self.in_flight:
            self._preempt_for_blocks(job, first)

    # Steps

    def begin_step(self) -> float | None:
        """Decide what the coming step does; its duration in seconds, None if all is done, or if
        nothing can be computed before a step in flight is over."""
        if not self.running and not len(self.core.waiting):
            return None
        if self._repeats():
            step.repeat(self.core, self.now())
            self._grow()
            for job, tokens in self._chunks.items():
                self._extend(job, tokens)
        else:
            self._decide()
        work = self._work()
        if self.in_flight and not work.sequences:
            return None
        if self._asynchronous:
            self.in_flight.append(self._advance())
        return self._step_seconds(work)

    def _decide(self) -> None:
        self.swapped_out = []
        self._chunks = {}
        self.stale.clear()
        orders = step.step(self.core, self.snapshot(), self.now(), unguarded)
        self._orders = orders
        self._unchanged, self._settled = orders.empty, orders.settled
        self._repeating = False
        self._apply(orders)
        if self._settled:
            self._grow()
        else:
            self._arrange()
        step.filled(self.core, EngineSnapshot(self))

    def snapshot(self) -> EngineSnapshot:
        """The engine before a step, which gets the predictions that have come back."""
        came, self._predictions = self._predictions, []
        predictions = [(run.job, run.prediction) for run in came if run.job in self.runs]
        return EngineSnapshot(self, predictions)

    def _change(self) -> None:
        """A job has come, gone or moved since the last step was decided."""
        self._unchanged = self._settled = False

    def _repeats(self) -> bool:
        """Whether the coming step does what the last one did, with the next tokens: no job has
        come, gone or moved since that began, no timer is due, and none wants room. Then free blocks
        can only get fewer and remaining times shorter: nobody starts, nobody preempts."""
        core = self.core
        if self._predictions or self.held or not self._unchanged or core.overload is not None:
            return False
        if core.timer_is_due(self.now()):
            return False
        if not self._repeating:
            # A step without prefills could find that there is nothing left to decide.
            starts = len(self.running) < self.seats and core.waiting.peek() is not None
            if not (self._settled or starts or self.prefilling):
                return False
            if core.may_hold or core.eviction.wants_room:
                return False
            self._repeating = True
        blocks = self.decoding.growth(1)
        for job, tokens in self._chunks.items():
            if job not in self.prefilling or job.tokens - job.computed < tokens:
                return False
            blocks += self._more_blocks(job, tokens)
        return blocks <= self.pool.free

    def _advance(self) -> Outcome:
        """Give the requests of a step their tokens."""
        ended, prefilled = self.decoding.advance(), []
        for job, tokens in self._chunks.items():
            job.computed += tokens
            if job.computed < job.tokens:
                continue
            run = self.runs[job]
            self.prefilling.pop(job)
            prefilled.append(run)
            job.generated += 1
            if job.generated == run.request.output_tokens:
                ended.append(run)
            else:
                self.decoding.add(run)
        if self._asynchronous:
            self.ending = dict.fromkeys(run.job for run in ended)
            # vLLM knows an end in advance only where it is that of `max_tokens`.
            self.overrun = [run for run in ended if run.job.max_output_tokens > run.job.generated]
        return Outcome(prefilled, ended)

    def end_step(self) -> list[Run]:
        """The step that began first is over; the requests that are complete by it."""
        outcome = self.in_flight.popleft() if self._asynchronous else self._advance()
        now = self.now()
        for run in outcome.prefilled:
            if not run.refused:
                self.core.restored(run.job)
                if run.first_token is None:
                    run.first_token = now
                    self.core.first_token(run.job)
                    if self.core.moved:
                        self._change()
        finished = [run for run in outcome.ended if not run.refused]
        for run in finished:
            run.finish = now
            self._forget(run, "finish")
            self.core.finish(run.job, AnswerEnd.STOPPED)
            self._change()
            del self.runs[run.job]
        return finished

    def skip_steps(self, available: float) -> Skipped:
        """Take at once the coming steps that only go on decoding, into free blocks where they need
        more, while nothing comes from outside: in `available` seconds from the end of the step in
        flight, if there is one. A step's time is linear in the context, so the first and the last
        give the sum.
        """
        if not self._settled or self.held or self.overrun or any(map(any, self.in_flight)):
            return _NONE_SKIPPED
        decoding, in_flight = self.decoding, len(self.in_flight)
        steps = min(self.core.steps_to_timer(), decoding.uneventful_steps)
        if decoding.growth(steps) > self.pool.free:
            steps = bisect.bisect_right(range(steps), self.pool.free, key=decoding.growth) - 1
        if steps < 2:
            return _NONE_SKIPPED

        def seconds(count: int) -> float:
            return count * (first + self._step_seconds(self._decodes(count - 1))) / 2.0

        def until_decided(count: int) -> float:
            return seconds(count - in_flight)

        first = self._step_seconds(self._decodes(0))
        if until_decided(steps) >= available:
            steps = bisect.bisect_left(range(1, steps + 1), available, key=until_decided)
            if not steps:
                return _NONE_SKIPPED
        decided = until_decided(steps)
        left = seconds(steps) - decided
        self.pool.allocate(decoding.growth(steps))
        decoding.skip(steps)
        self.core.tick(steps)
        return Skipped(steps, decided, left)

    def now(self) -> float:
        """Seconds of virtual time."""
        return self.core.lifecycle.clock()

    # Orders of a step

    def _apply(self, orders: Orders) -> None:
        """Carry out what a step has ordered; the policy counts it as done."""
        for end in orders.end:
            self._end(end)
        for victim in orders.preempt:
            self._preempt(victim)
        moved = [job for job in orders.moved if job.state is JobState.RUNNING]
        for job in moved:
            self.running.remove(job)
        for job in moved:
            bisect.insort(self.running, job, key=self.core.running.order)
        self._hold(orders.hold)

    def _preempt_for_blocks(self, job: Job, beneficiary: Job) -> None:
        """Preempt a running job as vLLM does where blocks are short; the policy learns of it."""
        self._change()
        self._preempt(
            step.preempt(self.core, EngineSnapshot(self), job, "kv_shortage", beneficiary)
        )

    def _preempt(self, victim: Victim) -> None:
        """Take seat and blocks of a job that the policy counts as waiting."""
        job, plan = victim.job, victim.plan
        run = self.runs[job]
        if self.in_flight and job not in self.held:
            self.stale.add(job)
        if run.offset is not None:
            job.generated = run.offset + self.decoding.tick  # its token in flight is not lost
            self.prefixes.enter(run, job.tokens - 1)
        if plan.saved:
            run.swaps += 1
            if not self._saves_beside():
                self.swapped_out.append(plan.saved)
            self.host.allocate(self.host.needed(plan.saved))
        else:
            run.recomputes += 1
        self._leave(run, "swap" if plan.saved else "recompute")
        self.waiting[run.request.level] += 1
        if plan.kind is PreemptionKind.DROP:
            self._end(End(job, DROPPED))
        elif self.in_flight:
            self.core.requeue(job, self.core.waiting)

    def _end(self, end: End) -> None:
        """Forget a job that the policy has ended."""
        job, code = end.job, end.refusal.code.value
        run = self.runs[job]
        self._change()
        self._forget(run, code)
        del self.runs[job]
        run.refused = code
        self._ended(run)

    def _hold(self, jobs: Collection[Job]) -> None:
        """Give these running jobs, and no others, no token in the coming step."""
        if not jobs and not self.held:
            return
        coming = dict.fromkeys(jobs)
        for job in [job for job in self.held if job not in coming]:
            self._release(self.runs[job])
        for job in coming:
            if job not in self.held:
                self.held[job] = self.now()
                self.decoding.hold(self.runs[job])
            self._stop_overrun(job)

    # What vLLM does with a step

    def _arrange(self) -> None:
        seats = len(self.running)
        self._grow()
        limits, prefilling = self._orders.prefills, self.prefilling
        decodes = self.decodes_now()
        budget = decodes if limits.gated else self.token_budget
        budget -= self._serve(budget) if prefilling else decodes
        if len(self.running) == seats:  # vLLM admits nobody in a step in which it preempts
            self._admit(budget)

    def _serve(self, budget: float) -> float:
        """Give running requests their tokens in the order of the list, as vLLM does: a prefill as
        many as it may take, a decode one, while the budget lasts. Returns how many."""
        limits, given = self._orders.prefills, 0
        for job in self.running:
            if given >= budget:
                break
            if job not in self.prefilling:
                given += job not in self.held and self.can_advance(job)
            elif not limits.gated and job not in self.held:
                given += self._schedule(job, budget - given)
        return given

    def _grow(self) -> None:
        """Give a block to each decoding request that needs one."""
        decoding = self.decoding
        if not self.pool.allocate(decoding.growth(1)):
            # The tail goes first, which has not got its own yet.
            order = self.core.running.order
            for run in sorted(decoding.outgrowing(), key=lambda run: order(run.job)):
                while run in decoding and not self.pool.allocate(1):
                    self._preempt_for_blocks(self.running[-1], run.job)
        decoding.grow()

    def _admit(self, budget: float) -> None:
        waiting, skipped = self.core.waiting, []
        while len(self.running) < self.seats and budget > 0:
            job = waiting.peek()
            if job is None:
                break
            if job in self.stale:  # vLLM goes on with the next one
                rank = self.core.skip(job, waiting)
                if rank is None:
                    break
                skipped.append((job, rank))
                continue
            cached, used = self.prefixes.hits(self.runs[job])
            if self.pool.needed(job.tokens) - used > self.pool.free:
                break  # all of it has to fit, though it takes only what it computes next
            budget -= self._seat(job, budget, cached, used)
        for job, rank in skipped:
            self.core.put_back(job, rank, waiting)

    def _seat(self, job: Job, budget: float, cached: int, used: int) -> int:
        """Give a waiting request a seat and its first tokens; how many. `cached`, `used`: see
        `PrefixCache.hits`."""
        core, run = self.core, self.runs[job]
        self._change()
        core.take(job, core.waiting)
        self.waiting[run.request.level] -= 1
        run.blocks = used
        found = cached * self.pool.block_size
        run.loading, job.computed = max(0, job.swapped - found), max(job.swapped, found)
        if cached:
            self.prefixes.share(run)
            run.found += found
        self.host.give_back(self.host.needed(job.swapped))
        if self._loads_beside(run.loading):
            run.loading = 0
        tokens = self._schedule(job, budget)
        job.computed += tokens  # the engine ranks what it has admitted after the step is filled
        core.start(job)
        job.computed -= tokens
        run.seated = self.now()
        run.started = run.seated if run.started is None else run.started
        self.prefilling[job] = None
        bisect.insort(self.running, job, key=core.running.order)
        return tokens

    def _schedule(self, job: Job, most: float) -> int:
        """Let a request compute up to `most` tokens in this step; how many it does: none if it was
        the last that could be preempted for its blocks."""
        cap = self._orders.prefills.cap
        tokens = int(min(job.tokens - job.computed, most, math.inf if cap is None else cap))
        while not self._extend(job, tokens):
            victim = self.running[-1]
            self._preempt_for_blocks(victim, job)
            if victim is job:
                return 0
        self._chunks[job] = tokens
        self.prefixes.enter(self.runs[job], job.computed + tokens)
        return tokens

    def _extend(self, job: Job, tokens: int) -> bool:
        """Give a prefill the blocks for its next tokens; False if there are not enough."""
        more = self._more_blocks(job, tokens)
        if not self.pool.allocate(more):
            return False
        self.runs[job].blocks += more
        return True

    def _more_blocks(self, job: Job, tokens: int) -> int:
        return self.pool.needed(job.computed + tokens) - self.runs[job].blocks

    def _work(self) -> StepWork:
        """The work of a step that has been arranged."""
        work = self._decodes(0)
        work.saved = self.swapped_out
        for job, tokens in self._chunks.items():
            run, start = self.runs[job], job.computed
            work.chunks.append(Chunk(start, start + tokens, run.loading))
            run.loading = 0
        return work

    def _decodes(self, later: int) -> StepWork:
        """The decodes of a step, so many steps later."""
        decoding = self.decoding
        count = len(decoding)
        context = decoding.context + later * count
        for run in self.overrun:
            count += 1
            context += run.job.tokens
        return StepWork(count, context, decoding.longest_context + later)

    # Bookkeeping

    def _saves_beside(self) -> bool:
        """Whether KV is saved beside the steps: the next one finds enough other blocks. In the
        paper's engine it is a part of the step."""
        filled = -(-self.token_budget // self.pool.block_size)
        return self.pool.free >= filled + self.seats

    def _loads_beside(self, tokens: int) -> bool:
        """Whether KV is loaded beside the steps. (The two steps that this takes are left out.)"""
        if self._is_paper:
            return False
        return loads_beside_steps(tokens, self.core.profile)

    def _release(self, run: Run) -> None:
        """A held request goes on from where it was."""
        self._end_hold(run)
        self.decoding.release(run)

    def _end_hold(self, run: Run) -> None:
        since = self.held.pop(run.job)
        run.held += self.now() - since
        if self._keep_seats:
            run.holds.append(run.span(since, self.now(), HELD))

    def _forget(self, run: Run, kind: str) -> None:
        """A request ends, with a seat or without."""
        job = run.job
        if job in self.running:
            self._leave(run, kind)
        else:
            self.waiting[run.request.level] -= 1
            self.host.give_back(self.host.needed(job.swapped))
        self.ending.pop(job, None)

    def _stop_overrun(self, job: Job) -> None:
        if job in self.ending:
            self.overrun = [run for run in self.overrun if run.job is not job]

    def _leave(self, run: Run, kind: str) -> None:
        """A request gives back its seat and its blocks."""
        if run.job in self.held:
            self._end_hold(run)
        self.running.remove(run.job)
        self.decoding.discard(run)
        self._stop_overrun(run.job)
        self.prefilling.pop(run.job, None)
        self.prefixes.enter(run, run.job.computed)
        self.pool.give_back(run.blocks - self.prefixes.leave(run))
        run.blocks = 0
        if self._keep_seats:
            held = sum(hold.end - hold.start for hold in run.holds)
            run.spans += [*run.holds, run.span(run.seated, self.now(), kind, held)]
            run.holds = []
