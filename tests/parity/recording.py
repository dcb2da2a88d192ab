"""Records what a scheduler on the real engine knew at each step, and what it decided."""

import copy
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from vllm_semantic_sched.engine.vllm_api import tokens_with_kv
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets, Prediction
from vllm_semantic_sched.policy.record.lifecycle import Transition
from vllm_semantic_sched.policy.view import PrefillLimits
from vllm_semantic_sched.predict.second_look import SecondLooks

BUCKETS = LengthBuckets((10, 30), (6.0, 20.0, 45.0))

Decision = tuple[Any, ...]


@dataclass
class Arrival:
    """A request, as `SchedulingCore.arrive` and `SchedulingStep.arrived` get it."""

    now: float
    job: Job
    arrived: tuple[Any, ...] = ()


@dataclass
class Step:
    """One call of schedule().

    Attributes:
        predictions: (request, prediction) that came back.
        progress: computed and generated tokens of running requests, and how many of the computed
            ones are not in flight.
        free_blocks, coming_blocks, kv_use: of the KV cache, before the step's decisions.
        reserved_blocks: that the engine sets aside for running prefills.
        passed_over: the request that the engine did not start although it had room.
        host_blocks: free ones on the host.
        answers: of the view to questions about one request that the simulator has no notion of,
            by question and request.
        unready, unready_after: requests without a seat that vLLM could not admit, as the step began
            and when it was filled; those with a token in flight.
        after: computed and generated tokens by request, as vLLM counts them after scheduling.
        preempted, admitted: how many vLLM preempted and admitted by itself.
    """

    now: float
    predictions: list[tuple[str, Prediction | None]] = field(default_factory=list)
    progress: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    free_blocks: int = 0
    coming_blocks: int = 0
    kv_use: float = 0.0
    reserved_blocks: int = 0
    passed_over: str | None = None
    host_blocks: int = 0
    answers: dict[tuple[str, str], Any] = field(default_factory=dict)
    unready: set[str] = field(default_factory=set)
    unready_after: set[str] = field(default_factory=set)
    after: dict[str, tuple[int, int]] = field(default_factory=dict)
    preempted: int = 0
    admitted: int = 0


@dataclass
class Output:
    """One call of update_from_output(): first tokens and ends, in order.

    Attributes:
        observed: arguments of `Estimator.observe_step`.
        ended: (request, generated tokens, arguments of `SchedulingCore.finish`).
    """

    now: float
    observed: list[tuple[Any, ...]] = field(default_factory=list)
    first_tokens: list[str] = field(default_factory=list)
    ended: list[tuple[str, int, tuple[Any, ...]]] = field(default_factory=list)


@dataclass
class Recording:
    """Inputs of the policy in order, and its decisions after each of them.

    Attributes:
        host_blocks: on the host; None without swap.
        answers: tokens of each request that was not refused.
        counters: totals at the end, by name and labels.
    """

    policy: str
    seats: int = 0
    blocks: int = 0
    block_size: int = 0
    token_budget: int = 0
    host_blocks: int | None = None
    events: list[Arrival | Step | Output] = field(default_factory=list)
    decisions: list[list[Decision]] = field(default_factory=list)
    answers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)


class DecisionLog:
    """Decisions since the last `take`; a `lifecycle.Listener`."""

    def __init__(self) -> None:
        self._decisions: list[Decision] = []

    def moved(self, transition: Transition) -> None:
        job, before, state, _, reason, plan = transition[:6]
        was = before.value if before is not None else None
        self._decisions.append(("moved", job.request_id, was, state.value, reason, plan))

    def first_token(self, job: Job) -> None:
        self._decisions.append(("first token", job.request_id))

    def held(self, job: Job, seconds: float) -> None:
        """What is held is recorded as it is ordered."""

    def limited(self, limits: PrefillLimits) -> None:
        held = sorted(job.request_id for job in limits.held)
        self._decisions.append(("limits", held, limits.cap, limits.gated))

    def holds(self, jobs: Iterable[Job]) -> None:
        self._decisions.append(("hold", sorted(job.request_id for job in jobs)))

    def ordered(self, core: Any) -> None:
        """The order that the step left behind, with what each job gained."""
        self._decisions.append(("waiting", [state_of(job) for job in core.waiting.ordered()]))
        running = sorted(core.running, key=core.running.order)
        self._decisions.append(("running", [state_of(job) for job in running]))

    def take(self) -> list[Decision]:
        taken, self._decisions = self._decisions, []
        return taken


def state_of(job: Job) -> tuple[Any, ...]:
    return (
        job.request_id,
        job.level,
        job.level_source.value,
        job.promotions,
        job.deadline_boost,
        job.share_boost,
        job.preemptions,
    )


class ScriptedPredictor:
    """Stands for `PredictionService`: answers each text a few steps later, some with None."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.second_looks = SecondLooks()
        self._random = random.Random(7)
        self._due: list[tuple[int, str]] = []
        self._calls = 0
        self.pending = self.cached = self.restarts = 0
        self.up = True

    def look_again(self, *args: Any) -> None:
        """No second looks."""

    def start(self, known: LengthBuckets | None = None) -> LengthBuckets:
        return BUCKETS

    def submit(self, request_id: str, text: str, level: int) -> bool:
        self._due.append((self._calls + self._random.randint(0, 12), request_id))
        return True

    def passes(self) -> list[Any]:
        return []

    def drain(self) -> list[tuple[str, Prediction | None]]:
        self._calls += 1
        due = [name for when, name in self._due if when <= self._calls]
        self._due = [(when, name) for when, name in self._due if when > self._calls]
        return [(name, self._prediction()) for name in due]

    def cancel(self, request_id: str) -> None:
        self._due = [entry for entry in self._due if entry[1] != request_id]

    def close(self) -> None:
        pass

    def _prediction(self) -> Prediction | None:
        return None if self._random.random() < 0.1 else random_prediction(self._random)


class ScriptedInstant:
    """Stands for `InstantReader`; sure of some texts, and often wrong."""

    length_buckets = BUCKETS

    def __init__(self) -> None:
        self._random = random.Random(11)

    @classmethod
    def load_beside(cls, path: str | None, buckets: LengthBuckets | None) -> Self:
        return cls()

    def read(self, text: str) -> Prediction:
        return random_prediction(self._random)


def random_prediction(rng: random.Random) -> Prediction:
    def spread(count: int) -> tuple[float, ...]:
        weights = [rng.random() ** 4 for _ in range(count)]
        return tuple(weight / sum(weights) for weight in weights)

    return Prediction(spread(5), spread(3))


def record(scheduler: Any, policy: str) -> Recording:
    """Record everything that a `SemanticScheduler` does from now on."""
    core, step, view, log = scheduler.core, scheduler.step, scheduler.view, DecisionLog()
    capacity, swap = core.holdings.capacity, scheduler.preemptions.connector
    recording = Recording(
        policy, capacity.seats, capacity.blocks, capacity.block_size, view.token_budget()
    )
    if swap is not None:
        recording.host_blocks = swap.slots
    core.lifecycle.listeners.append(log)
    events = recording.events

    def done() -> None:
        recording.decisions.append(log.take())

    def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
        inner = getattr(owner, name, None)
        if inner is None:
            return
        setattr(owner, name, lambda *args, **kwargs: around(inner, *args, **kwargs))

    def unready() -> set[str]:
        names = (request.request_id for request in scheduler.waiting)
        return {name for name in names if not view.is_ready(scheduler.jobs[name])}

    def arrive(inner: Any, job: Job, now: float) -> None:
        events.append(Arrival(now, copy.copy(job)))
        inner(job, now)

    def arrived(inner: Any, view: Any, job: Job, *key: Any) -> None:
        events[-1].arrived = key
        inner(view, job, *key)

    def add_request(inner: Any, request: Any) -> None:
        inner(request)
        done()

    def run(inner: Any, view: Any) -> Any:
        here = events[-1]
        here.unready = unready()
        here.free_blocks, here.kv_use = view.free_blocks(), view.kv_use()
        here.coming_blocks, here.reserved_blocks = view.coming_blocks(), view.reserved_blocks()
        if (passed_over := core.eviction.passed_over) is not None:
            here.passed_over = passed_over.request_id
        if swap is not None:
            here.host_blocks = swap.ledger.pool.free
        for request in scheduler.running:
            here.progress[request.request_id] = (
                request.num_computed_tokens,
                request.num_output_tokens,
                tokens_with_kv(request),
            )
        outcome = inner(view)
        log.ordered(core)
        return outcome

    def predictions(inner: Any) -> Any:
        for job, prediction in inner():
            events[-1].predictions.append((job.request_id, prediction))
            yield job, prediction

    def limit_prefills(inner: Any, limits: PrefillLimits) -> None:
        log.limited(limits)
        inner(limits)

    def hold(inner: Any, jobs: Collection[Job]) -> None:
        log.holds(jobs)
        inner(jobs)

    def question(name: str) -> None:
        def ask(inner: Any, job: Job) -> Any:
            answer = inner(job)
            if isinstance(events[-1], Step):
                events[-1].answers[name, job.request_id] = answer
            return answer

        wrap(view, name, ask)

    def schedule(inner: Any, *args: Any, **kwargs: Any) -> Any:
        here = Step(view.now())
        events.append(here)
        output = inner(*args, **kwargs)
        here.unready_after = unready()
        here.after = {
            name: (request.num_computed_tokens, request.num_output_tokens)
            for name, request in scheduler.requests.items()
        }
        taken = log.take()
        moves = [entry for entry in taken if entry[0] == "moved"]
        here.preempted = sum(entry[4] == "kv_shortage" for entry in moves)
        here.admitted = sum(entry[3] == "running" for entry in moves)
        recording.decisions.append(taken)
        return output

    def update_from_output(inner: Any, *args: Any, **kwargs: Any) -> Any:
        events.append(Output(view.now()))
        output = inner(*args, **kwargs)
        done()
        return output

    def observe_step(inner: Any, *args: Any) -> None:
        events[-1].observed.append(args)
        inner(*args)

    def first_token(inner: Any, job: Job) -> None:
        if isinstance(events[-1], Output) and job.first_token is None:
            events[-1].first_tokens.append(job.request_id)
        inner(job)

    def finish(inner: Any, job: Job, *args: Any) -> None:
        if isinstance(events[-1], Output):
            events[-1].ended.append((job.request_id, job.generated, args[:3]))
        inner(job, *args)

    wrap(core, "arrive", arrive)
    wrap(step, "arrived", arrived)
    wrap(scheduler, "add_request", add_request)
    wrap(step, "run", run)
    wrap(view, "predictions", predictions)
    wrap(view, "limit_prefills", limit_prefills)
    wrap(view, "hold", hold)
    for name in ("freeable_blocks", "can_advance", "needed_blocks"):
        question(name)
    wrap(scheduler, "schedule", schedule)
    wrap(scheduler, "update_from_output", update_from_output)
    wrap(core.estimates, "observe_step", observe_step)
    wrap(core.lifecycle, "first_token", first_token)
    wrap(core, "finish", finish)
    return recording
