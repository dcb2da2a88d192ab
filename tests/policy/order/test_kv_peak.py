"""Admission by the predicted peak of KV use."""

from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job, seated

from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.config.order import KvPeakKnobs
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.capacity import EngineCapacity
from vllm_semantic_sched.policy.facts.job import Credit, StatedLength
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets, Prediction
from vllm_semantic_sched.policy.order import kv_peak
from vllm_semantic_sched.policy.order.kv_peak import KvPeak
from vllm_semantic_sched.policy.profile.formula import load_profile

ON = KvPeakKnobs(enabled=True)
BLOCK = 16


def stated_end(job, share: float) -> float:
    return job.prompt_tokens + job.max_output_tokens


def make_peak(blocks: int | None = 100) -> KvPeak:
    peak = KvPeak(stated_end)
    peak.set_capacity(EngineCapacity(16, blocks, BLOCK))
    return peak


def sized(prompt: int, output: int, level: int = 2, **fields):
    return make_job(level, prompt_tokens=prompt, max_output_tokens=output, **fields)


def simulated_peak(running: list[list[int]], candidate) -> int:
    """Most tokens at any step in which the candidate runs, token by token. A job in `running` is
    its tokens and the steps it has left."""
    jobs = [*map(list, running), [candidate.tokens, candidate.max_output_tokens]]
    highest = 0
    while jobs[-1][1] > 0:
        for job in jobs:
            job[0] += 1
            job[1] -= 1
        highest = max(highest, sum(tokens + BLOCK - 1 for tokens, left in jobs if left >= 0))
    return highest


actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 60), st.integers(1, 60)),
        st.tuples(st.just("discard"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("advance"), st.integers(1, 15), st.just(0)),
    ),
    max_size=40,
)


@given(actions, st.integers(1, 60), st.integers(1, 80))
def test_peak_is_that_of_growing_token_by_token(actions, prompt, output) -> None:
    peak = make_peak()
    running: dict = {}  # tokens and steps left
    for kind, first, second in actions:
        if kind == "add":
            job = sized(first, second)
            peak.add(seated(job))
            running[job] = [first, second]
        elif kind == "discard" and running:
            job = list(running)[first % len(running)]
            peak.discard(job)
            del running[job]
        elif kind == "advance":
            for _ in range(first):
                peak.tick()
                for job, state in list(running.items()):
                    state[0] += 1
                    state[1] -= 1
                    if state[1] == 0:
                        peak.discard(job)
                        del running[job]
    assert len(peak) == len(running)
    candidate = sized(prompt, output)
    assert peak.peak_with(candidate) == simulated_peak(list(running.values()), candidate)
    if running:
        assert peak.steps_to_outlived == min(left for _, left in running.values())


@given(actions, st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 100))
def test_a_job_alone_is_always_admitted(actions, prompt, output, blocks) -> None:
    peak = make_peak(blocks=blocks)
    jobs = []
    for kind, first, second in actions:
        if kind == "add":
            jobs.append(sized(first, second))
            peak.add(seated(jobs[-1]))
    for job in jobs:
        peak.discard(job)
    assert peak.admits(sized(prompt, output))


def test_a_job_waits_until_its_growth_fits() -> None:
    peak = make_peak(blocks=20)  # 320 tokens
    running = sized(100, 60)
    peak.add(seated(running))
    long, short = sized(100, 60), sized(100, 10)
    # Each grows to 160, and each counts a block to spare: 350 tokens, but 250 after ten steps.
    assert not peak.admits(long)
    assert peak.admits(short)
    assert peak.admits(sized(100, 60, level=1)), "urgent jobs are exempt"
    assert peak.admits(sized(100, 60, credit=Credit(waiting=3.0, promotions=3))), (
        "overdue jobs are exempt"
    )
    peak.tick(40)  # twenty more steps until the running job ends
    assert peak.admits(long)
    assert make_peak(blocks=None).admits(long)


def test_outlived_estimates_are_revised() -> None:
    peak = KvPeak(lambda job, share: job.tokens + 10)
    peak.set_capacity(EngineCapacity(16, 100, BLOCK))
    job = make_job(prompt_tokens=50)
    peak.add(seated(job))
    peak.tick(9)
    assert not peak.revise(lambda job: None)
    peak.tick()
    assert peak.revise(lambda job: setattr(job, "generated", 10))
    assert peak.steps_to_outlived == 10
    assert peak.peak_with(make_job(prompt_tokens=1)) == 60 + 1 + 2 * (BLOCK - 1) + 2 * 10


def core_with(**knobs) -> SchedulingCore:
    policy = parse_policy({"predictor": {"enabled": False}, "kv_peak": {"enabled": True, **knobs}})
    core = SchedulingCore(policy, load_profile("default"))
    core.set_capacity(EngineCapacity(16, 20, BLOCK))
    return core


def enqueue(core, level: int, prompt: int, output: int, stated=None):
    job = core.arrive(
        core.draft(
            f"r{level}",
            prompt_tokens=prompt,
            max_output_tokens=output,
            hint=core.read_hints({"urgency": level}, 0),
            awaits_prediction=False,
            stated=StatedLength(output, output) if stated is None else stated,
        ),
        0.0,
    )
    core.enqueue(job, core.waiting)
    return job


def test_no_job_passes_one_that_does_not_fit_yet() -> None:
    core = core_with()
    first = enqueue(core, 2, 100, 60)
    core.take(first, core.waiting)
    core.start(first)
    blocked, small = enqueue(core, 2, 100, 60), enqueue(core, 3, 10, 5)
    assert core.waiting.peek() is None
    urgent = enqueue(core, 0, 100, 60)
    assert core.waiting.peek() is urgent
    core.take(urgent, core.waiting)
    core.requeue(urgent, core.waiting)  # it was not ready
    core.waiting.remove(urgent)
    core.finish(first, end=None)
    assert core.waiting.peek() is blocked
    core.take(blocked, core.waiting)
    assert core.waiting.peek() is small


def test_an_outlived_estimate_is_a_change_of_the_core(monkeypatch) -> None:
    monkeypatch.setattr(kv_peak, "_QUANTILE", 0.1)
    core = core_with()
    core.estimates.buckets = LengthBuckets((10, 50), (5.0, 30.0, 200.0))
    job = enqueue(core, 2, 100, 500, StatedLength())
    core.predicted(job, Prediction((1.0,), (0.5, 0.0, 0.5)))
    core.take(job, core.waiting)
    core.start(job)
    assert core.steps_to_timer() == 2  # a tenth ends within two tokens; on average it is 103
    core.tick(2)
    core.moved.clear()
    core.tick()
    core.revise(lambda job: setattr(job, "generated", 3), now=1.0)
    assert list(core.moved) == [job]
    assert core.steps_to_timer() > 0
