"""One scheduling step: every decision before the engine runs, in the order of `SchedulingStep.run`.
Engine and simulator both call it, and differ in what answers its questions (`view.EngineView`)."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar, TypeVarTuple

from vllm_semantic_sched.policy import holds, prefills
from vllm_semantic_sched.policy.core import URGENT, SchedulingCore
from vllm_semantic_sched.policy.facts.job import Job, JobState
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.facts.wait import Cause
from vllm_semantic_sched.policy.overload.control import Ended
from vllm_semantic_sched.policy.view import NO_LIMITS, EngineView, has_room


class StepOutcome(NamedTuple):
    """What the engine and the next steps need to know of a step. Versions are the core's."""

    begun: int  # version when it began
    quiet: int | None = None  # at which nothing was left to decide about seats, holds, prefills
    repeated: int | None = None  # at which it was found to repeat itself
    # It is to prefill a protected job, running or next: the engine must not put prefills off.
    protected_prefill: bool = False


_Args = TypeVarTuple("_Args")
_T = TypeVar("_T")


class SchedulingStep:
    """The sequence of a step over one engine."""

    def __init__(self, core: SchedulingCore) -> None:
        self._core = core
        self.last = StepOutcome(begun=-1)  # of the last step
        self.sharing = prefills.PrefillSharing()
        self._next: Job | None = None  # when the step was decided
        self._was_first: Job | None = None  # see `_keep_seats`
        self._held: tuple[Sequence[Job], Job | None] = ((), None)  # decodes, and for whom
        self._explained = -1  # version of the core

    def run(self, view: EngineView) -> StepOutcome:
        """Take every decision before a step; the engine then runs it. An error skips only the call
        that it comes from."""
        core, guarded = self._core, self._guarded
        begun = core.version
        # The previous step is over: whatever is stored from here on is stored at the present time.
        guarded("advancing virtual time", core.tick)
        # Everything after uses the level and the length that are known now.
        guarded("applying predictions", self._apply_predictions, view)
        # Outlived estimates, promotions by waiting, some more jobs ranked by a new policy. Jobs
        # that changed are judged again by the limits of their tier.
        guarded("revising estimates", self._revise_estimates, view)
        # Before room is made: no running request is preempted for one that ends in this step.
        guarded("ending what waited too long", self._end_overdue, view)
        # What outgrew a hard reservation or its tenant's cap is free when room is made.
        guarded("keeping reservations", self._keep_reservations, view)
        idle = guarded("looking for decisions", self._has_nothing_to_decide, view)
        decided_at = core.version
        # Running requests are preempted for more urgent waiting ones (`policy.eviction.victims`).
        guarded("making room for urgent requests", self._make_room, view, idle)
        # Those that were just preempted need no hold.
        watching = guarded("holding less urgent requests", self._hold, view)
        # Last, because it depends on who runs and who is next.
        quiet = bool(idle) and core.version == decided_at and not watching
        protected = guarded("limiting prefills", self._limit_prefills, view, quiet)
        self.last = StepOutcome(
            begun, decided_at if quiet else None, self.last.repeated, bool(protected)
        )
        return self.last

    def arrived(
        self, view: EngineView, job: Job, dedup_key: str | None = None, origin: str = ""
    ) -> None:
        """Admit or refuse a newly queued job, between two steps; others may end because of it.
        `dedup_key`, `origin`: see `policy.overload.dedup`."""
        overload = self._core.overload
        if overload is not None:
            seats = partial(_seats_open, view)
            _end(view, overload.admit(job, job.arrival, seats, dedup_key, origin))

    def first_token(self, view: EngineView, job: Job) -> None:
        """Record a job's first token after a step, and move the job if its rank changed."""
        if self._core.first_token(job):
            view.reposition([job])

    def achieved_nothing(self) -> None:
        """The step computed no token although jobs sat out: nobody does in the next one."""
        self._core.protection.achieved_nothing()
        self.sharing.achieved_nothing()

    def tokens_left(self, view: EngineView) -> None:
        """The step was filled and has tokens left: note whether the engine did not start the next
        job although it had room."""
        core, newcomer = self._core, self._core.waiting.peek()
        if newcomer is None or newcomer is not self._next or not view.reserved_blocks():
            return
        ready = view.is_ready(newcomer) and not view.obstacles(newcomer)
        if ready and not view.is_paused() and has_room(newcomer, view):
            core.eviction.passed_over = newcomer

    def filled(self, view: EngineView) -> None:
        """Record why requests wait once a step is filled, if that is logged and has changed."""
        core, waits = self._core, self._core.lifecycle.waits
        if waits is None or (core.version == self._explained and not waits.has_skipped):
            return
        waits.end_step()
        waits.because(self._why_waiting(view))
        self._explained = core.version

    @property
    def is_quiet(self) -> bool:
        """Whether the last step had nothing to decide about seats, holds and prefills, nor has the
        next one: no job has come, gone or moved since."""
        return self._core.version == self.last.quiet

    def repeats(self, view: EngineView) -> bool:
        """Whether the coming step decides what the last one did: no job has come, gone or moved
        since that began, no timer has expired, and none wants room. Then free blocks can only get
        fewer and remaining times shorter: nobody starts, nobody preempts. The engine may call
        `repeat` in place of `run` if the same prefills go on and none ended."""
        core, last = self._core, self.last
        unchanged = core.version == last.begun and core.overload is None
        if not unchanged or core.may_revise(view.now()):
            return False
        if core.version == last.repeated:
            return True
        # A step without prefills could find that the engine has become quiet.
        starts = view.free_seats() > 0 and core.waiting.peek() is not None
        same = self.is_quiet or starts or bool(view.prefilling())
        return same and not holds.may_hold(core) and not core.eviction.wants_room

    def repeat(self, view: EngineView) -> None:
        """Begin a step that decides what the last one did."""
        core = self._core
        if self.last.repeated != core.version:
            self.last = self.last._replace(repeated=core.version)
        core.tick()
        if core.protection.enabled:
            core.protection.begin_step(view.now(), busy=True)

    def _guarded(self, doing: str, part: Callable[[*_Args], _T], *args: *_Args) -> _T | None:
        """The result of a part; None if it failed and errors are not raised."""
        try:
            return part(*args)
        except Exception:
            if self._core.on_error is None:
                raise
            self._core.on_error(doing)
            return None

    # Parts

    def _apply_predictions(self, view: EngineView) -> None:
        changed: list[Job] = []
        for job, prediction in view.predictions():
            # One by one: an error costs one prediction, not all that came with it.
            self._guarded("applying a prediction", self._read, view, job, prediction, changed)
        self._changed(view, changed)

    def _read(
        self, view: EngineView, job: Job, prediction: Prediction | None, changed: list[Job]
    ) -> None:
        if job.state is JobState.RUNNING:
            view.observe(job)
        self._core.predicted(job, prediction)
        changed.append(job)

    def _revise_estimates(self, view: EngineView) -> None:
        self._changed(view, self._core.revise(view.observe, view.now()))

    def _end_overdue(self, view: EngineView) -> None:
        overload = self._core.overload
        if overload is not None:
            _end(view, overload.step(view.now(), view.kv_use()))

    def _keep_reservations(self, view: EngineView) -> None:
        while (found := self._core.eviction.over_quota_job()) is not None:
            job, reason = found
            if view.freeable_blocks(job) is None:
                break
            view.preempt(job, reason)

    def _has_nothing_to_decide(self, view: EngineView) -> bool:
        """Whether the step can only decode. Most are like that, and asking all questions in them
        would double the time of a simulation."""
        core = self._core
        if core.with_kv and view.loaded():
            return False
        if self.is_quiet and not core.seating.metered:
            return True
        if view.prefilling():
            return False
        if not len(core.waiting):
            return True
        nobody_starts = view.free_seats() <= 0 or core.waiting.peek() is None
        return nobody_starts and not core.eviction.wants_room

    def _make_room(self, view: EngineView, idle: bool | None) -> None:
        core = self._core
        core.eviction.clearing = None
        if idle:
            return
        loaded = view.loaded() if core.with_kv and not view.is_paused() else ()
        if loaded:
            free = view.free_seats() + len(loaded)
            self._preempt(view, core.eviction.claim_seats(loaded, free, view))
        head = core.waiting.peek()
        if head is not None and len(core.with_kv) and not view.is_paused():
            blocks = view.free_blocks() + view.coming_blocks()
            for session in core.eviction.idle_for(head, view, blocks):
                view.preempt(session, URGENT, head)
        if core.eviction.wants_room and not view.is_paused():
            # Those behind the head leave it the next seat (`_keep_seats`).
            level = math.inf if head is None else head.effective_level
            seats = view.free_seats() + sum(job.effective_level > level for job in loaded)
            blocks = view.free_blocks() + view.coming_blocks()
            prefill_tokens = view.token_budget() - len(core.running)
            self._preempt(view, core.eviction.plan(view, seats, blocks, prefill_tokens))
        self._keep_seats(view)

    def _preempt(self, view: EngineView, victims: Mapping[Job, Job]) -> None:
        for victim, beneficiary in victims.items():
            view.preempt(victim, URGENT, beneficiary)

    def _keep_seats(self, view: EngineView) -> None:
        """Keep seats for jobs that are about to return, and for a more urgent newcomer."""
        core = self._core
        if returning := view.returning():
            view.keep_seats_for(returning)
        newcomer = self._next = core.waiting.peek()
        if newcomer is None:
            return
        if (clearing := core.eviction.clearing) is not None:
            view.admit_first(clearing)  # else others would take what is being freed for it
            return
        loaded = view.loaded() if core.with_kv else ()
        seats = view.free_seats() + len(loaded)
        if not loaded or not 0 < seats <= len(loaded) or newcomer is self._was_first:
            self._was_first = None
            return
        needed = view.needed_blocks(newcomer)
        if newcomer.effective_level < loaded[0].effective_level and needed <= view.free_blocks():
            view.admit_first(newcomer)
            self._was_first = newcomer  # once: if it does not start, those with KV go on

    def _hold(self, view: EngineView) -> bool:
        """Choose decoding jobs to hold; returns whether the next steps may hold some, too."""
        core, now = self._core, view.now()
        self._held = ((), None)
        watching = holds.may_hold(core)
        if core.protection.enabled:
            affordable = core.protection.begin_step(now, busy=len(core.running) > 0)
            # A paused engine waits for all that run, the most urgent ones or not.
            if affordable and watching and not view.is_paused():
                self._held = holds.choose(core, view)
        if self._held[0]:
            view.hold(self._held[0])
        return watching

    def _limit_prefills(self, view: EngineView, quiet: bool) -> bool:
        """Bound the prefills of the step; returns whether it is to prefill a protected job."""
        core, (held, protected) = self._core, self._held
        limits, is_protected = NO_LIMITS, False
        if not quiet:
            limits = prefills.gate(core, view)
            if not limits.gated:
                limits = self.sharing.limits(core, view)
            is_protected = holds.has_protected(core) and prefills.prefills_protected(core, view)
        if limits is not NO_LIMITS:
            view.limit_prefills(limits)
        if limits.held:
            view.hold([*held, *limits.held])
        sit_out = dict.fromkeys(held, protected) | dict.fromkeys(limits.held, limits.beneficiary)
        moved = core.hold(sit_out, view.now())
        if moved:
            view.reposition(moved)
        return is_protected

    def _why_waiting(self, view: EngineView) -> Cause:
        if view.is_paused():
            return Cause.PAUSED
        if view.free_seats() <= 0:
            return Cause.SEAT
        if not len(self._core.waiting):
            return Cause.STEP
        newcomer = self._core.waiting.peek()
        if newcomer is None:  # a limit counts for those that it concerns
            return Cause.KV_PEAK
        return Cause.TOKENS if has_room(newcomer, view) else Cause.KV

    def _changed(self, view: EngineView, jobs: list[Job]) -> None:
        if jobs:
            view.reposition(jobs)
        overload = self._core.overload
        if overload is None:
            return
        for job in jobs:
            if not job.state.is_end:
                _end(view, overload.revised(job, view.now(), partial(_seats_open, view)))


def _end(view: EngineView, ended: Iterable[Ended]) -> None:
    for job, refusal in ended:
        view.end(job, refusal)


def _seats_open(view: EngineView) -> int:
    return 0 if view.is_paused() else max(0, view.free_seats())
