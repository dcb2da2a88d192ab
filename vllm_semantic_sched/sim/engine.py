"""An engine that runs the policy core's decisions, step by step, in virtual time."""

import bisect
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.calibration import AnswerEnd
from vllm_semantic_sched.policy.eviction.retention import HostRoom, PreemptionKind, PreemptionPlan
from vllm_semantic_sched.policy.facts.capacity import EngineCapacity
from vllm_semantic_sched.policy.facts.job import Job, JobState
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.overload.refusal import DROPPED, Refusal
from vllm_semantic_sched.policy.profile.cost import loads_beside_steps
from vllm_semantic_sched.policy.profile.formula import EngineProfile
from vllm_semantic_sched.policy.record.spans import HELD
from vllm_semantic_sched.policy.step import SchedulingStep
from vllm_semantic_sched.policy.view import NO_LIMITS, PrefillLimits
from vllm_semantic_sched.sim.blocks import BlockPool, PrefixCache
from vllm_semantic_sched.sim.cost import Chunk, StepWork, slowest_of_batch, sum_of_tokens
from vllm_semantic_sched.sim.decoding import Decoding
from vllm_semantic_sched.sim.request import Run
from vllm_semantic_sched.sim.sections import EngineModel
from vllm_semantic_sched.sim.workload import WorkloadError


class Outcome(NamedTuple):
    """What a step brings, which the engine knows once the step is over."""

    prefilled: list[Run]  # they get a token by their last chunk
    ended: list[Run]  # they get their last token


class Skipped(NamedTuple):
    """Steps that were taken at once. `seconds`: until the clock stands where the next step is
    decided; `left`: of the last one, which is in flight then."""

    steps: int
    seconds: float
    left: float


_NONE_SKIPPED = Skipped(0, 0.0, 0.0)


class Engine:
    """Seats, KV blocks and steps of vLLM's V1 engine. A `policy.view.EngineView`.

    `begin_step` takes the decisions of `policy.step`, then does what vLLM does with them:
    decoding requests take the blocks that they need, at the expense of the tail of the running
    list; running requests get tokens in the order of that list, and waiting ones are admitted while
    seats, blocks and tokens last.

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
        self.seats = model.seats
        capacity = EngineCapacity(model.seats, model.kv_blocks, model.block_size)
        core.set_capacity(capacity, keeps_accounts=False, seed=seed)
        self.pool = BlockPool(model.kv_blocks, model.block_size)
        self._host = BlockPool(model.host_blocks if model.swap else 0, model.block_size)
        self._prefixes = PrefixCache(self.pool, model.prefix_caching)
        self._is_paper = is_paper = model.kind == "paper"
        # The paper's engine takes whole prompts, whatever their length.
        self._token_budget = math.inf if is_paper else model.token_budget
        if not is_paper:
            batch = model.batch or profile.batch_terms
            profile = profile.model_copy(update={"batch": batch})
        self._step_seconds = partial(slowest_of_batch if is_paper else sum_of_tokens, profile)
        self._decoding = Decoding(self.pool, find_longest=is_paper)
        self.running: list[Job] = []  # jobs with a seat, most urgent first
        self.waiting = [0] * core.policy.levels  # requests without a seat, by true level
        self.step = SchedulingStep(core)
        self._keep_seats = keep_seats
        self._ended = ended
        self._runs: dict[Job, Run] = {}
        self._asynchronous = model.asynchronous and not is_paper
        self._in_flight: deque[Outcome] = deque()  # of steps that have begun, if asynchronous
        self._ending: dict[Job, None] = {}  # their last token is in flight
        self._overrun: list[Run] = []  # those of them that the coming step decodes once more
        self._stale: set[Job] = set()  # preempted in this step, with output in flight
        self._prefilling: dict[Job, None] = {}
        self._chunks: dict[Job, int] = {}
        self._swapped_out: list[int] = []
        self._predictions: list[Run] = []
        self._limits = NO_LIMITS
        core.seating.precedence.level_of = lambda job: self._runs[job].request.level
        self.held: dict[Job, float] = {}  # running jobs without a token in this step, since when
        self._hold_given = False  # in this step

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
        self._runs[run.job] = run
        self.waiting[request.level] += 1
        self.core.enqueue(run.job, self.core.waiting)
        self.step.arrived(self, run.job)

    def predicted(self, run: Run) -> None:
        """The prediction for a submitted request has come back; the next step applies it."""
        self._predictions.append(run)

    # Steps

    def begin_step(self) -> float | None:
        """Decide what the coming step does; its duration in seconds, None if all is done, or if
        nothing can be computed before a step in flight is over."""
        if not self.running and not len(self.core.waiting):
            return None
        if self._repeats():
            self.step.repeat(self)
            self._grow()
            for job, tokens in self._chunks.items():
                self._extend(job, tokens)
        else:
            self._decide()
        work = self._work()
        if self._in_flight and not work.sequences:
            return None
        if self._asynchronous:
            self._in_flight.append(self._advance())
        return self._step_seconds(work)

    def _decide(self) -> None:
        self._swapped_out = []
        self._chunks = {}
        self._limits = NO_LIMITS
        self._hold_given = False
        self._stale.clear()
        self.step.run(self)
        if self.held and not self._hold_given:
            self.hold(())
        if self.step.is_quiet:
            self._grow()
        else:
            self._arrange()
        self.step.filled(self)

    def _repeats(self) -> bool:
        """Whether the coming step does what the last one did, with the next tokens."""
        if self._predictions or self.held or not self.step.repeats(self):
            return False
        blocks = self._decoding.growth(1)
        for job, tokens in self._chunks.items():
            if job not in self._prefilling or job.tokens - job.computed < tokens:
                return False
            blocks += self._more_blocks(job, tokens)
        return blocks <= self.pool.free

    def _advance(self) -> Outcome:
        """Give the requests of a step their tokens."""
        ended, prefilled = self._decoding.advance(), []
        for job, tokens in self._chunks.items():
            job.computed += tokens
            if job.computed < job.tokens:
                continue
            run = self._runs[job]
            self._prefilling.pop(job)
            prefilled.append(run)
            job.generated += 1
            if job.generated == run.request.output_tokens:
                ended.append(run)
            else:
                self._decoding.add(run)
        if self._asynchronous:
            self._ending = dict.fromkeys(run.job for run in ended)
            # vLLM knows an end in advance only where it is that of `max_tokens`.
            self._overrun = [run for run in ended if run.job.max_output_tokens > run.job.generated]
        return Outcome(prefilled, ended)

    def end_step(self) -> list[Run]:
        """The step that began first is over; the requests that are complete by it."""
        outcome = self._in_flight.popleft() if self._asynchronous else self._advance()
        now = self.now()
        for run in outcome.prefilled:
            if not run.refused:
                self.core.restored(run.job)
                if run.first_token is None:
                    run.first_token = now
                    self.step.first_token(self, run.job)
        finished = [run for run in outcome.ended if not run.refused]
        for run in finished:
            run.finish = now
            self._forget(run, "finish")
            self.core.finish(run.job, AnswerEnd.STOPPED)
            del self._runs[run.job]
        return finished

    def skip_steps(self, available: float) -> Skipped:
        """Take at once the coming steps that only go on decoding, into free blocks where they need
        more, while nothing comes from outside: in `available` seconds from the end of the step in
        flight, if there is one. A step's time is linear in the context, so the first and the last
        give the sum.
        """
        if not self.step.is_quiet or self.held or self._overrun or any(map(any, self._in_flight)):
            return _NONE_SKIPPED
        decoding, in_flight = self._decoding, len(self._in_flight)
        steps = min(self.core.uneventful_steps(), decoding.uneventful_steps)
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

    # Questions of a step, see `policy.view.EngineView`

    def now(self) -> float:
        return self.core.lifecycle.clock()

    def predictions(self) -> Iterable[tuple[Job, Prediction | None]]:
        came, self._predictions = self._predictions, []
        return [(run.job, run.prediction) for run in came if run.job in self._runs]

    def observe(self, job: Job) -> None:
        run = self._runs[job]
        self._decoding.observe(run)
        if self._in_flight and run.offset is not None:
            job.generated -= 1  # that is known; it counts as computed, as in vLLM

    def running_by_urgency(self) -> Sequence[Job]:
        return self.running

    def prefilling(self) -> Collection[Job]:
        return self._prefilling

    def most_urgent_decode(self) -> Job | None:
        return self.running[0] if self.running and self.running[0] not in self._prefilling else None

    def can_advance(self, job: Job) -> bool:
        # vLLM gives a token to one that has got its last, unless `max_tokens` says so.
        return job not in self._ending or self._runs[job] in self._overrun

    def is_paused(self) -> bool:
        return False

    def free_seats(self) -> int:
        return self.seats - len(self.running)

    def free_blocks(self) -> int:
        """Free blocks less those that decodes take in the coming step, or when released."""
        return self.pool.free - self._decoding.growth(1) - self._decoding.held_growth

    def coming_blocks(self) -> int:
        return 0  # blocks are free at once

    def reserved_blocks(self) -> int:
        return 0  # KV is loaded within a step

    def obstacles(self, job: Job) -> Sequence[Collection[Job]]:
        return ()  # no adapters, no images

    def loaded(self) -> Sequence[Job]:
        return ()

    def idle(self) -> Sequence[Job]:
        return ()

    def returning(self) -> Collection[Job]:
        return ()

    def kv_use(self) -> float:
        pool = self.pool
        return (pool.total - pool.free) / pool.total if pool.limited else 0.0

    def token_budget(self) -> float:
        return self._token_budget

    def decode_tokens(self) -> int:
        """Tokens of the budget that decoding requests take."""
        held = 0 if self._hold_given else len(self._decoding.held)  # so far nobody is, in this step
        return self._decodes_now() + held

    def is_ready(self, job: Job) -> bool:
        return job not in self._stale

    def needed_blocks(self, job: Job) -> int:
        """KV blocks that a waiting job takes, less those that others hold of it."""
        return self.pool.needed(job.tokens) - self._prefixes.hits(self._runs[job])[1]

    def freeable_blocks(self, job: Job) -> int | None:
        return self._decoding.blocks(self._runs[job])

    def preemption_seconds(self, job: Job) -> float:
        return self._plan(job).seconds

    # Orders of a step

    def reposition(self, jobs: Iterable[Job]) -> None:
        moved = dict.fromkeys(job for job in jobs if job.state is JobState.RUNNING)
        for job in moved:
            self.running.remove(job)
        for job in moved:
            bisect.insort(self.running, job, key=self.core.running.order)

    def preempt(self, job: Job, reason: str, beneficiary: Job | None = None) -> None:
        run, plan = self._runs[job], self._plan(job)
        if self._in_flight and job not in self.held:
            self._stale.add(job)
        self.core.preempt(job, plan, reason, beneficiary)
        self._decoding.observe(run)  # its token in flight is not lost
        if plan.saved:
            run.swaps += 1
            if not self._saves_beside():
                self._swapped_out.append(plan.saved)
            self._host.allocate(self._host.needed(plan.saved))
        else:
            run.recomputes += 1
        self._leave(run, "swap" if plan.saved else "recompute")
        self.waiting[run.request.level] += 1
        self.core.requeue(job, self.core.waiting)
        if plan.kind is PreemptionKind.DROP:
            self.end(job, DROPPED)

    def end(self, job: Job, refusal: Refusal) -> None:
        run, code = self._runs[job], refusal.code.value
        self._decoding.observe(run)
        self._forget(run, code)
        del self._runs[job]
        run.refused = code
        self.core.finish(job, AnswerEnd.ABORTED, JobState.REFUSED, code, refusal.beneficiary)
        self._ended(run)

    def limit_prefills(self, limits: PrefillLimits) -> None:
        self._limits = limits

    def keep_seats_for(self, jobs: Collection[Job]) -> None:
        """Nobody has KV without a seat here."""

    def admit_first(self, job: Job) -> None:
        """Nobody has KV without a seat here."""

    def hold(self, jobs: Collection[Job]) -> None:
        self._hold_given = True
        coming = dict.fromkeys(jobs)
        for job in [job for job in self.held if job not in coming]:
            self._release(self._runs[job])
        for job in coming:
            if job not in self.held:
                self.held[job] = self.now()
                self._decoding.hold(self._runs[job])
            self._stop_overrun(job)

    # What vLLM does with a step

    def _arrange(self) -> None:
        seats = len(self.running)
        self._grow()
        limits, prefilling = self._limits, self._prefilling
        decodes = self._decodes_now()
        budget = decodes if limits.gated else self._token_budget
        budget -= self._serve(budget) if prefilling else decodes
        if len(self.running) == seats:  # vLLM admits nobody in a step in which it preempts
            self._admit(budget)

    def _serve(self, budget: float) -> float:
        """Give running requests their tokens in the order of the list, as vLLM does: a prefill as
        many as it may take, a decode one, while the budget lasts. Returns how many."""
        limits, given = self._limits, 0
        for job in self.running:
            if given >= budget:
                break
            if job not in self._prefilling:
                given += job not in self.held and self.can_advance(job)
            elif not limits.gated and job not in self.held:
                given += self._schedule(job, budget - given)
        return given

    def _grow(self) -> None:
        """Give a block to each decoding request that needs one."""
        decoding = self._decoding
        if not self.pool.allocate(decoding.growth(1)):
            # The tail goes first, which has not got its own yet.
            order = self.core.running.order
            for run in sorted(decoding.outgrowing(), key=lambda run: order(run.job)):
                while run in decoding and not self.pool.allocate(1):
                    self.preempt(self.running[-1], "kv_shortage", run.job)
        decoding.grow()

    def _admit(self, budget: float) -> None:
        waiting, skipped = self.core.waiting, []
        while len(self.running) < self.seats and budget > 0:
            job = waiting.peek()
            if job is None:
                break
            if job in self._stale:  # vLLM goes on with the next one
                rank = self.core.skip(job, waiting)
                if rank is None:
                    break
                skipped.append((job, rank))
                continue
            found, used = self._prefixes.hits(self._runs[job])
            if self.pool.needed(job.tokens) - used > self.pool.free:
                break  # all of it has to fit, though it takes only what it computes next
            budget -= self._seat(job, budget, found, used)
        for job, rank in skipped:
            self.core.put_back(job, rank, waiting)

    def _seat(self, job: Job, budget: float, found: int, used: int) -> int:
        """Give a waiting request a seat and its first tokens; how many. `found`, `used`: see
        `PrefixCache.hits`."""
        core, run = self.core, self._runs[job]
        core.take(job, core.waiting)
        self.waiting[run.request.level] -= 1
        run.blocks = used
        run.loading, job.computed = job.swapped, job.swapped
        if found * self.pool.block_size > job.computed:
            run.loading, job.computed = 0, found * self.pool.block_size
            run.shared = found
            self._prefixes.enter(run, job.computed)
        self._host.give_back(self._host.needed(job.swapped))
        if self._loads_beside(run.loading):
            run.loading = 0
        tokens = self._schedule(job, budget)
        job.computed += tokens  # the engine ranks what it has admitted after the step is filled
        core.start(job)
        job.computed -= tokens
        run.seated = self.now()
        run.started = run.seated if run.started is None else run.started
        self._prefilling[job] = None
        bisect.insort(self.running, job, key=core.running.order)
        return tokens

    def _schedule(self, job: Job, most: float) -> int:
        """Let a request compute up to `most` tokens in this step; how many it does: none if it was
        the last that could be preempted for its blocks."""
        cap = self._limits.cap
        tokens = int(min(job.tokens - job.computed, most, math.inf if cap is None else cap))
        while not self._extend(job, tokens):
            victim = self.running[-1]
            self.preempt(victim, "kv_shortage", job)
            if victim is job:
                return 0
        self._chunks[job] = tokens
        self._prefixes.enter(self._runs[job], job.computed + tokens)
        return tokens

    def _extend(self, job: Job, tokens: int) -> bool:
        """Give a prefill the blocks for its next tokens; False if there are not enough."""
        more = self._more_blocks(job, tokens)
        if not self.pool.allocate(more):
            return False
        self._runs[job].blocks += more
        return True

    def _more_blocks(self, job: Job, tokens: int) -> int:
        return self.pool.needed(job.computed + tokens) - self._runs[job].blocks

    def _work(self) -> StepWork:
        """The work of a step that has been arranged."""
        work = self._decodes(0)
        work.saved = self._swapped_out
        for job, tokens in self._chunks.items():
            run, start = self._runs[job], job.computed
            work.chunks.append(Chunk(start, start + tokens, run.loading))
            run.loading = 0
        return work

    def _decodes(self, later: int) -> StepWork:
        """The decodes of a step, so many steps later."""
        decoding = self._decoding
        count = len(decoding)
        context = decoding.context + later * count
        for run in self._overrun:
            count += 1
            context += run.job.tokens
        return StepWork(count, context, decoding.longest_context + later)

    def _decodes_now(self) -> int:
        """Requests that decode in the coming step."""
        return len(self._decoding) + len(self._overrun)

    # Bookkeeping

    def _plan(self, job: Job) -> PreemptionPlan:
        self.observe(job)
        host = self._host
        room = HostRoom(host.block_size, host.free) if host.total else None
        return self.core.plan_preemption(job, room, can_drop=True)

    def _saves_beside(self) -> bool:
        """Whether KV is saved beside the steps: the next one finds enough other blocks. In the
        paper's engine it is a part of the step."""
        filled = -(-self._token_budget // self.pool.block_size)
        return self.pool.free >= filled + self.seats

    def _loads_beside(self, tokens: int) -> bool:
        """Whether KV is loaded beside the steps. (The two steps that this takes are left out.)"""
        if self._is_paper:
            return False
        knobs = self.core.policy.retention
        return loads_beside_steps(tokens, self.core.profile, knobs.max_stall)

    def _release(self, run: Run) -> None:
        """A held request goes on from where it was."""
        self._end_hold(run)
        self._decoding.release(run)

    def _end_hold(self, run: Run) -> None:
        since = self.held.pop(run.job)
        run.held += self.now() - since
        if self._keep_seats:
            run.holds.append(run.span(since, self.now(), HELD))

    def _forget(self, run: Run, kind: str) -> None:
        """A request ends, with a seat or without."""
        job = run.job
        if job in self.core.running:
            self._leave(run, kind)
        else:
            self.waiting[run.request.level] -= 1
            self._host.give_back(self._host.needed(job.swapped))
        self._ending.pop(job, None)

    def _stop_overrun(self, job: Job) -> None:
        if job in self._ending:
            self._overrun = [run for run in self._overrun if run.job is not job]

    def _leave(self, run: Run, kind: str) -> None:
        """A request gives back its seat and its blocks."""
        if run.job in self.held:
            self._end_hold(run)
        self.running.remove(run.job)
        self._decoding.discard(run)
        self._stop_overrun(run.job)
        self._prefilling.pop(run.job, None)
        self._prefixes.enter(run, run.job.computed)
        self.pool.give_back(run.blocks - self._prefixes.leave(run))
        run.blocks = 0
        if self._keep_seats:
            held = sum(hold.end - hold.start for hold in run.holds)
            run.spans += [*run.holds, run.span(run.seated, self.now(), kind, held)]
            run.holds = []
