"""Records what a scheduler on the real engine knew at each step, and what it decided."""

import copy
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from vllm_semantic_sched.engine.snapshot import VllmSnapshot
from vllm_semantic_sched.policy.facts.decision import DEFAULT_DECISION
from vllm_semantic_sched.policy.facts.decision import Decision as LevelDecision
from vllm_semantic_sched.policy.facts.job import Credit, Job
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets, Prediction
from vllm_semantic_sched.policy.orders import Orders
from vllm_semantic_sched.policy.record.lifecycle import Transition

BUCKETS = LengthBuckets((10, 30), (6.0, 20.0, 45.0))

Decision = tuple[Any, ...]


# What a snapshot answered: by question, and by request where it is about one.
Answers = dict[tuple[str, ...], Any]


@dataclass
class Arrival:
    """A request, as `SchedulingCore.arrive` and `step.arrived` get it.

    Attributes:
        snapshots: the answers of each snapshot that was taken, in order.
    """

    now: float
    job: Job
    arrived: tuple[Any, ...] | None = None
    snapshots: list[Answers] = field(default_factory=list)


@dataclass
class Step:
    """One call of schedule().

    Attributes:
        snapshots: the answers of each snapshot that was taken, in order: before the decisions, and
            when the step was filled.
        passed_over: the request that the engine did not start although it had room.
        host_blocks: free ones on the host.
        unready: requests without a seat that vLLM could not admit when the step was filled: those
            with a token in flight.
        after: computed and generated tokens by request, as vLLM counts them after scheduling.
        own_victims: tokens with KV, generated ones, and the room on the host of each request that
            vLLM preempted by itself.
        admitted: how many it admitted.
        tokens_left: the step would have taken more tokens.
    """

    now: float
    snapshots: list[Answers] = field(default_factory=list)
    passed_over: str | None = None
    host_blocks: int = 0
    unready: set[str] = field(default_factory=set)
    after: dict[str, tuple[int, int]] = field(default_factory=dict)
    own_victims: list[tuple[int, int, Any]] = field(default_factory=list)
    admitted: int = 0
    tokens_left: bool = False


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
        gated_level: see `SchedulingCore`.
        answers: tokens of each request that was not refused.
        counters: totals at the end, by name and labels.
    """

    policy: str
    seats: int = 0
    blocks: int = 0
    block_size: int = 0
    token_budget: int = 0
    host_blocks: int | None = None
    gated_level: int | None = None
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

    def ordered_by(self, orders: Orders) -> None:
        """All that a step has ordered."""
        limits = orders.prefills
        decisions = {
            "end": [(end.job.request_id, end.refusal.code.value) for end in orders.end],
            "preempt": [
                (victim.job.request_id, victim.plan, victim.reason, name_of(victim.beneficiary))
                for victim in orders.preempt
            ],
            "release": names_of(orders.release),
            "hold": sorted(names_of(orders.hold)),
            "limits": (sorted(names_of(limits.held)), limits.cap, limits.gated),
            "moved": sorted(names_of(orders.moved)),
            "seats kept": (sorted(names_of(orders.keep_seats_for)), name_of(orders.first)),
            "protected prefill": orders.protected_prefill,
            "settled": orders.settled,
        }
        self._decisions += [("order", kind, what) for kind, what in decisions.items()]

    def ordered(self, core: Any) -> None:
        """The order that the step left behind, with what each job gained."""
        self._decisions.append(("waiting", [state_of(job) for job in core.waiting.ordered()]))
        running = sorted(core.running, key=core.running.order)
        self._decisions.append(("running", [state_of(job) for job in running]))

    def take(self) -> list[Decision]:
        taken, self._decisions = self._decisions, []
        return taken


def name_of(job: Job | None) -> str | None:
    return None if job is None else job.request_id


def names_of(jobs: Iterable[Job]) -> list[str]:
    return [job.request_id for job in jobs]


class RecordingSnapshot:
    """Passes on questions to a snapshot, and keeps the answers with names in place of jobs."""

    def __init__(self, snapshot: VllmSnapshot, answers: Answers) -> None:
        self._snapshot = snapshot
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        answer = getattr(self._snapshot, name)
        if not callable(answer):
            self._answers[(name,)] = named(answer)
            return answer

        def ask(job: Job, *args: Any) -> Any:
            answered = answer(job, *args)
            self._answers[name, job.request_id] = named(answered)
            return answered

        return ask


class Name(str):
    """Stands for a job."""


def named(answer: Any) -> Any:
    if isinstance(answer, Job):
        return Name(answer.request_id)
    if type(answer) in (list, tuple, dict):
        return [named(each) for each in answer]
    return answer


def state_of(job: Job) -> tuple[Any, ...]:
    credit = job.credit or Credit()
    return (
        job.request_id,
        job.level,
        job.level_source.value,
        credit.promotions,
        credit.deadline,
        credit.share,
        job.preempted.times,
    )


class ScriptedPredictor:
    """Stands for `PredictionService`: answers each text a few steps later, some with None."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._random = random.Random(7)
        self._due: list[tuple[int, str]] = []
        self._calls = 0
        self.pending = self.cached = self.restarts = 0
        self.up = True

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
    decision = DEFAULT_DECISION

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

    # By expected cost nearly all of these flat predictions would get level 0.
    return Prediction(spread(5), spread(3), decision=LevelDecision(bounds=(0.3, 0.45, 0.6, 0.75)))


def record(scheduler: Any, policy: str) -> Recording:
    """Record everything that a `SemanticScheduler` does from now on."""
    core, log = scheduler.core, DecisionLog()
    capacity, swap = core.allocations.capacity, scheduler.preemptions.connector
    recording = Recording(
        policy,
        seats=capacity.seats,
        blocks=capacity.blocks,
        block_size=capacity.block_size,
        token_budget=scheduler.max_num_scheduled_tokens,
    )
    if swap is not None:
        recording.host_blocks = swap.slots
    recording.gated_level = core.gated_level
    core.lifecycle.listeners.append(log)
    events = recording.events

    def done() -> None:
        recording.decisions.append(log.take())

    def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
        inner = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: around(inner, *args, **kwargs))

    def unready() -> set[str]:
        snapshot = take_snapshot()
        names = (request.request_id for request in scheduler.waiting)
        return {name for name in names if not snapshot.is_ready(scheduler.jobs[name])}

    def arrive(inner: Any, job: Job, now: float) -> None:
        events.append(Arrival(now, copy.copy(job)))
        inner(job, now)

    def arrived(inner: Any, arrival: Any, snapshot: Any) -> None:
        if snapshot is not None:
            events[-1].arrived = arrival.dedup_key, arrival.origin
        inner(arrival, snapshot)

    def add_request(inner: Any, request: Any) -> None:
        inner(request)
        done()

    def snapshot(inner: Any, *args: Any, **kwargs: Any) -> Any:
        answers: Answers = {}
        events[-1].snapshots.append(answers)
        return RecordingSnapshot(inner(*args, **kwargs), answers)

    def before_step(inner: Any) -> None:
        here = events[-1]
        if (passed_over := core.eviction.passed_over) is not None:
            here.passed_over = passed_over.request_id
        if swap is not None:
            here.host_blocks = swap.ledger.pool.free
        inner()

    def apply(inner: Any, orders: Orders) -> None:
        log.ordered_by(orders)
        log.ordered(core)
        inner(orders)

    def report(inner: Any, job: Job, request: Any, kv_tokens: int, keep: bool) -> Any:
        room = scheduler.preemptions.host_room(request, kv_tokens) if keep else None
        events[-1].own_victims.append((kv_tokens, request.num_output_tokens, room))
        return inner(job, request, kv_tokens, keep)

    def schedule(inner: Any, *args: Any, **kwargs: Any) -> Any:
        here = Step(scheduler.clock())
        events.append(here)
        output = inner(*args, **kwargs)
        here.tokens_left = output.total_num_scheduled_tokens < scheduler.max_num_scheduled_tokens
        here.unready = unready()
        here.after = {
            name: (request.num_computed_tokens, request.num_output_tokens)
            for name, request in scheduler.requests.items()
        }
        taken = log.take()
        here.admitted = sum(entry[0] == "moved" and entry[3] == "running" for entry in taken)
        recording.decisions.append(taken)
        return output

    def update_from_output(inner: Any, *args: Any, **kwargs: Any) -> Any:
        events.append(Output(scheduler.clock()))
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

    take_snapshot = scheduler.snapshot
    wrap(core, "arrive", arrive)
    wrap(scheduler.arrivals, "arrived", arrived)
    wrap(scheduler, "add_request", add_request)
    wrap(scheduler, "snapshot", snapshot)
    wrap(scheduler, "before_step", before_step)
    wrap(scheduler.applier, "apply", apply)
    wrap(scheduler.preemptions, "_report", report)
    wrap(scheduler, "schedule", schedule)
    wrap(scheduler, "update_from_output", update_from_output)
    wrap(core.estimates, "observe_step", observe_step)
    wrap(core.lifecycle, "first_token", first_token)
    wrap(core, "finish", finish)
    return recording
