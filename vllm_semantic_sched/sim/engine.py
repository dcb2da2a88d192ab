"""An engine that runs the policy core's decisions, step by step, in virtual time."""

import bisect
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.calibration import AnswerEnd
from vllm_semantic_sched.policy.eviction.retention import HostRoom, PreemptionKind, PreemptionPlan
from vllm_semantic_sched.policy.facts.capacity import EngineCapacity
from vllm_semantic_sched.policy.facts.job import Job, JobState
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.overload.refusal import DROPPED, Refusal
from vllm_semantic_sched.policy.profile.formula import EngineProfile
from vllm_semantic_sched.policy.step import SchedulingStep
from vllm_semantic_sched.policy.view import NO_LIMITS, PrefillLimits
from vllm_semantic_sched.sim.blocks import BlockPool, PrefixCache
from vllm_semantic_sched.sim.cost import Chunk, StepWork, slowest_of_batch, sum_of_tokens
from vllm_semantic_sched.sim.decoding import Decoding
from vllm_semantic_sched.sim.request import Run
from vllm_semantic_sched.sim.sections import EngineModel
from vllm_semantic_sched.sim.spans import HELD
from vllm_semantic_sched.sim.workload import WorkloadError


class Engine:
    """Seats, KV blocks and steps of vLLM's V1 engine. A `policy.view.EngineView`.

    `begin_step` takes the decisions of `policy.step`, then does what vLLM does with them:
    decoding requests take the blocks that they need, at the expense of the tail of the running
    list; running requests get tokens in the order of that list, and waiting ones are admitted while
    seats, blocks and tokens last.
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
        is_paper = model.kind == "paper"
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
        """Decide what the coming step does; its duration in seconds, None if all is done."""
        if not self.running and not len(self.core.waiting):
            return None
        if self._repeats():
            self.step.repeat(self)
            self._grow()
            return self._work_seconds()
        self._swapped_out = []
        self._chunks = {}
        self._limits = NO_LIMITS
        self._hold_given = False
        self.step.run(self)
        if self.held and not self._hold_given:
            self.hold(())
        if self.step.is_quiet:
            self._grow()
        else:
            self._arrange()
        self.step.filled(self)
        return self._work_seconds()

    def _repeats(self) -> bool:
        """Whether the coming step does what the last one did, with the next tokens."""
        if self._predictions or self.held or not self.step.repeats(self):
            return False
        for job, tokens in self._chunks.items():
            if job not in self._prefilling or job.tokens - job.computed < tokens:
                return False
        return self._decoding.growth(1) <= self.pool.free

    def end_step(self) -> list[Run]:
        """The step is over; the requests that are complete by it."""
        now = self.now()
        finished = self._decoding.advance()
        for job, tokens in self._chunks.items():
            job.computed += tokens
            if job.computed < job.tokens:
                continue
            run = self._runs[job]
            self._prefilling.pop(job)
            self.core.restored(job)
            job.generated += 1
            if run.first_token is None:
                run.first_token = now
                self.step.first_token(self, job)
            if job.generated == run.request.output_tokens:
                finished.append(run)
            else:
                self._decoding.add(run)
        for run in finished:
            run.finish = now
            self._leave(run, "finish")
            self.core.finish(run.job, AnswerEnd.STOPPED)
            del self._runs[run.job]
        return finished

    def skip_steps(self, available: float) -> tuple[int, float]:
        """Take at once the coming steps that only go on decoding, into free blocks where they need
        more, while nothing comes from outside (`available`, seconds). Returns their number and
        duration. A step's time is linear in the context, so the first and the last give the sum.
        """
        if not self.step.is_quiet or self.held:
            return 0, 0.0
        decoding = self._decoding
        steps = min(self.core.uneventful_steps(), decoding.uneventful_steps)
        if decoding.growth(steps) > self.pool.free:
            steps = bisect.bisect_right(range(steps), self.pool.free, key=decoding.growth) - 1
        if steps < 2:
            return 0, 0.0

        def seconds(count: int) -> float:
            return count * (first + self._step_seconds(self._decodes(count - 1))) / 2.0

        first = self._step_seconds(self._decodes(0))
        if seconds(steps) >= available:
            steps = bisect.bisect_left(range(1, steps + 1), available, key=seconds)
            if not steps:
                return 0, 0.0
        total = seconds(steps)
        self.pool.allocate(decoding.growth(steps))
        decoding.skip(steps)
        self.core.tick(steps)
        return steps, total

    # Questions of a step, see `policy.view.EngineView`

    def now(self) -> float:
        return self.core.lifecycle.clock()

    def predictions(self) -> Iterable[tuple[Job, Prediction | None]]:
        came, self._predictions = self._predictions, []
        return [(run.job, run.prediction) for run in came if run.job in self._runs]

    def observe(self, job: Job) -> None:
        self._decoding.observe(self._runs[job])

    def running_by_urgency(self) -> Sequence[Job]:
        return self.running

    def prefilling(self) -> Collection[Job]:
        return self._prefilling

    def most_urgent_decode(self) -> Job | None:
        return self.running[0] if self.running and self.running[0] not in self._prefilling else None

    def can_advance(self, job: Job) -> bool:
        return True  # no token is in flight between steps, and KV is loaded within one

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
        return len(self._decoding) + held

    def is_ready(self, job: Job) -> bool:
        return True

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
        self.core.preempt(job, plan, reason, beneficiary)
        if plan.saved:
            run.swaps += 1
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
        run, code = self._runs.pop(job), refusal.code.value
        self._decoding.observe(run)
        if job in self.core.running:
            self._leave(run, code)
        else:
            self.waiting[run.request.level] -= 1
            self._host.give_back(self._host.needed(job.swapped))
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

    # What vLLM does with a step

    def _arrange(self) -> None:
        preempted = self._grow()
        limits, prefilling = self._limits, self._prefilling
        budget = len(self._decoding) if limits.gated else self._token_budget
        budget -= self._serve(budget) if prefilling else len(self._decoding)
        if not preempted:
            self._admit(budget)

    def _serve(self, budget: float) -> float:
        """Give running requests their tokens in the order of the list, as vLLM does: a prefill as
        many as it may take, a decode one, while the budget lasts. Returns how many."""
        limits, given = self._limits, 0
        for job in self.running:
            if given >= budget:
                break
            if job not in self._prefilling:
                given += job not in self.held
            elif not limits.gated and job not in self.held:
                given += self._schedule(job, budget - given)
        return given

    def _grow(self) -> bool:
        """Give a block to each decoding request that needs one; whether any was preempted."""
        decoding = self._decoding
        enough = self.pool.allocate(decoding.growth(1))
        if not enough:
            # The tail goes first, which has not got its own yet.
            order = self.core.running.order
            for run in sorted(decoding.outgrowing(), key=lambda run: order(run.job)):
                while run in decoding and not self.pool.allocate(1):
                    self.preempt(self.running[-1], "kv_shortage", run.job)
        decoding.grow()
        return not enough

    def _admit(self, budget: float) -> None:
        core = self.core
        while len(self.running) < self.seats and budget > 0:
            job = core.waiting.peek()
            if job is None:
                return
            run, needed = self._runs[job], self.pool.needed(job.tokens)
            found, used = self._prefixes.hits(run)
            if not self.pool.allocate(needed - used):
                return
            core.take(job, core.waiting)
            self.waiting[run.request.level] -= 1
            run.blocks = needed
            run.loading, job.computed = job.swapped, job.swapped
            if found * self.pool.block_size > job.computed:
                run.loading, job.computed = 0, found * self.pool.block_size
                run.shared = found
                self._prefixes.enter(run, job.computed)
            self._host.give_back(self._host.needed(run.loading))
            core.start(job)
            run.seated = self.now()
            run.started = run.seated if run.started is None else run.started
            self._prefilling[job] = None
            bisect.insort(self.running, job, key=core.running.order)
            budget -= self._schedule(job, budget)

    def _schedule(self, job: Job, most: float) -> int:
        """Let a request compute up to `most` tokens in this step."""
        cap = self._limits.cap
        tokens = int(min(job.tokens - job.computed, most, math.inf if cap is None else cap))
        self._chunks[job] = tokens
        self._prefixes.enter(self._runs[job], job.computed + tokens)
        return tokens

    def _work_seconds(self) -> float:
        """Duration of a step whose work has been arranged."""
        work = self._decodes(0)
        work.saved = self._swapped_out
        for job, tokens in self._chunks.items():
            run, start = self._runs[job], job.computed
            work.chunks.append(Chunk(start, start + tokens, run.loading))
            run.loading = 0
        return self._step_seconds(work)

    def _decodes(self, later: int) -> StepWork:
        """The decodes of a step, so many steps later."""
        decoding = self._decoding
        count = len(decoding)
        context = decoding.context + later * count
        return StepWork(count, context, decoding.longest_context + later)

    # Bookkeeping

    def _plan(self, job: Job) -> PreemptionPlan:
        self.observe(job)
        host = self._host
        room = HostRoom(host.block_size, host.free) if host.total else None
        return self.core.plan_preemption(job, room, can_drop=True)

    def _release(self, run: Run) -> None:
        """A held request goes on from where it was."""
        since = self.held.pop(run.job)
        run.held += self.now() - since
        if self._keep_seats:
            run.holds.append(run.span(since, self.now(), HELD))
        self._decoding.release(run)

    def _leave(self, run: Run, kind: str) -> None:
        """A request gives back its seat and its blocks."""
        if run.job in self.held:
            self._release(run)
        self.running.remove(run.job)
        self._decoding.discard(run)
        self._prefilling.pop(run.job, None)
        self._prefixes.enter(run, run.job.computed)
        self.pool.give_back(run.blocks - self._prefixes.leave(run))
        run.blocks = 0
        if self._keep_seats:
            held = sum(hold.end - hold.start for hold in run.holds)
            run.spans += [*run.holds, run.span(run.seated, self.now(), kind, held)]
            run.holds = []
