"""SemanticScheduler as vLLM's scheduler, without a model."""

import subprocess
import sys
from collections import deque

import pytest
from failures import MAY_FAIL, method_of
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, PriorityRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_semantic_sched import SemanticScheduler
from vllm_semantic_sched.engine.metrics.table import COUNTERS, GAUGES
from vllm_semantic_sched.engine.version import UnsupportedVersion, check_vllm_version
from vllm_semantic_sched.lab.bench.standalone import (
    build_scheduler,
    make_request,
    model_output,
    run_step,
)
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets, Prediction

pytestmark = pytest.mark.engine

# Steps take no time here, so the profile is better left as it is.
HINTS_ONLY = "predictor: {enabled: false}\ncorrect_profile: false\n"


@pytest.fixture
def policy(tmp_path):
    """Writes a policy that reads hints only; returns its path for `build`."""

    def write(text: str = "") -> dict[str, str]:
        path = tmp_path / "policy.yaml"
        path.write_text(HINTS_ONLY + text)
        return {"policy": str(path)}

    return write


def build(settings, **options):
    return build_scheduler(SemanticScheduler, semantic_sched=settings, **options)


def running(scheduler) -> list[str]:
    return [request.request_id for request in scheduler.running]


def add(scheduler, *names: str, **fields) -> None:
    for name in names:
        scheduler.add_request(make_request(name, **fields))


def finish_all(scheduler, limit: int = 5000) -> int:
    """Steps until everything has finished."""
    for steps in range(limit):
        if not scheduler.get_num_unfinished_requests():
            return steps
        run_step(scheduler)
    raise AssertionError(f"not finished after {limit} steps")


def assert_clean(scheduler) -> None:
    """No request, job or block is left."""
    run_step(scheduler)
    assert not scheduler.requests and not scheduler.jobs
    assert not scheduler.core.waiting and not len(scheduler.core.running)
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # vLLM keeps one as null block


def test_urgent_request_gets_a_seat_in_the_next_step(policy) -> None:
    scheduler = build(policy(), max_num_seqs=3)
    add(scheduler, "a", "b", "c", "d", urgency=4, output_tokens=50)
    run_step(scheduler)
    add(scheduler, "urgent", urgency=0)
    step = run_step(scheduler)
    assert "urgent" in step.num_scheduled_tokens
    assert running(scheduler) == ["urgent", "a", "b"]
    assert scheduler.counters.total("admission_preemptions") == 1
    finish_all(scheduler)
    assert_clean(scheduler)


def test_several_victims_are_preempted_for_one_long_prompt(policy) -> None:
    scheduler = build(policy(), max_num_seqs=8, num_blocks=33)
    add(scheduler, *"abcdefgh", urgency=4, prompt_tokens=40, output_tokens=30)
    run_step(scheduler)
    add(scheduler, "urgent", urgency=0, prompt_tokens=200, output_tokens=5)
    run_step(scheduler)
    assert running(scheduler)[0] == "urgent"
    assert scheduler.counters.total("admission_preemptions") > 1
    finish_all(scheduler)
    assert_clean(scheduler)


def test_nothing_is_preempted_when_it_would_not_suffice(policy) -> None:
    scheduler = build(policy(), max_num_seqs=8, num_blocks=33)
    add(scheduler, *"ab", urgency=1, prompt_tokens=200, output_tokens=30)
    add(scheduler, *"cd", urgency=4, prompt_tokens=20, output_tokens=30)
    run_step(scheduler)
    add(scheduler, "urgent", urgency=1, prompt_tokens=300, output_tokens=5)
    for _ in range(5):
        run_step(scheduler)
    assert scheduler.counters.total("admission_preemptions") == 0
    finish_all(scheduler)


def test_victim_is_protected_after_the_maximum_of_preemptions(policy) -> None:
    scheduler = build(policy("preemption: {max_per_request: 2}\n"), max_num_seqs=1)
    add(scheduler, "routine", urgency=4, output_tokens=40)
    run_step(scheduler)
    for name in "abc":
        add(scheduler, name, urgency=0, output_tokens=2)
        for _ in range(4):
            run_step(scheduler)
    assert scheduler.counters.total("admission_preemptions") == 2
    finish_all(scheduler)
    assert_clean(scheduler)


def test_the_tail_of_running_is_the_least_urgent(policy) -> None:
    """vLLM takes its victims there when KV runs short."""
    scheduler = build(policy(), max_num_seqs=8)
    for level in (3, 0, 4, 1, 2):
        add(scheduler, f"level{level}", urgency=level, output_tokens=30)
        run_step(scheduler)
    assert running(scheduler) == [f"level{level}" for level in range(5)]


def test_kv_shortage_preempts_the_least_urgent(policy) -> None:
    scheduler = build(policy("preemption: {enabled: false}\n"), max_num_seqs=4, num_blocks=16)
    add(scheduler, "routine", urgency=4, prompt_tokens=60, output_tokens=100)
    run_step(scheduler)
    add(scheduler, "urgent", urgency=0, prompt_tokens=60, output_tokens=100)
    seen = set()
    while scheduler.get_num_unfinished_requests():
        run_step(scheduler)
        seen |= {r.request_id for r in scheduler.requests.values() if r.num_preemptions}
    assert seen == {"routine"}
    assert_clean(scheduler)


@pytest.mark.parametrize(("gated_level", "beside_the_decode"), [(0, []), (None, [3000, *9 * [1]])])
def test_gate_keeps_prefills_away_from_an_urgent_decode(
    policy, gated_level, beside_the_decode
) -> None:
    scheduler = build(policy(""), max_num_seqs=8)
    scheduler.core.gated_level = gated_level
    add(scheduler, "urgent", urgency=0, output_tokens=20)
    run_step(scheduler)
    add(scheduler, "long", urgency=3, prompt_tokens=3000)
    tokens = []
    for _ in range(10):
        step = run_step(scheduler)
        assert step.num_scheduled_tokens["urgent"] == 1
        if "long" in step.num_scheduled_tokens:
            tokens.append(step.num_scheduled_tokens["long"])
    assert tokens == beside_the_decode
    assert running(scheduler) == (["urgent", "long"] if tokens else ["urgent"])
    assert scheduler.max_num_scheduled_tokens == 8192
    finish_all(scheduler)
    assert_clean(scheduler)


@pytest.mark.parametrize(("gated_level", "beside_the_decode"), [(0, 0), (None, 199)])
def test_running_prefill_yields_to_an_urgent_request(
    policy, gated_level, beside_the_decode
) -> None:
    scheduler = build(policy(""), max_num_batched_tokens=200)
    scheduler.core.gated_level = gated_level
    add(scheduler, "long", urgency=3, prompt_tokens=2000)
    run_step(scheduler)
    add(scheduler, "urgent", urgency=0, prompt_tokens=20, output_tokens=5)
    # What it leaves of the step goes to the other one.
    assert run_step(scheduler).num_scheduled_tokens == {"urgent": 20, "long": 180}
    step = run_step(scheduler)
    assert step.num_scheduled_tokens.get("long", 0) == beside_the_decode
    assert step.num_scheduled_tokens["urgent"] == 1
    finish_all(scheduler)
    assert_clean(scheduler)


@pytest.mark.parametrize("urgency", ["abc", 99, -1, {"a": 1}, [0], 1.5, True])
def test_invalid_hint_is_counted_and_the_request_served(policy, urgency) -> None:
    scheduler = build(policy())
    add(scheduler, "a", urgency=urgency)
    assert scheduler.jobs["a"].level == 2
    assert scheduler.counters.total("invalid_hints") == 1
    assert scheduler.counters.total("policy_errors") == 0
    finish_all(scheduler)


END_TOKEN = 9


def answer(scheduler, name: str, length: int, ending: str, ignore_eos: bool = False) -> None:
    """A request with a predicted length of 10 tokens that gets an answer of `length`."""
    params = SamplingParams(
        max_tokens=length if ending == "cut" else 900,
        stop_token_ids=[END_TOKEN],
        ignore_eos=ignore_eos,
    )
    scheduler.add_request(
        Request(
            request_id=name,
            prompt_token_ids=[1, 2, 3],
            sampling_params=params,
            pooling_params=None,
        )
    )
    scheduler.core.predicted(scheduler.jobs[name], Prediction((0.0, 1.0), (1.0, 0.0)))
    while name in scheduler.requests:
        step = scheduler.schedule()
        output = model_output(scheduler, step)
        request = scheduler.requests[name]
        if request.num_output_tokens == length - 1 and ending == "stopped":
            output.sampled_token_ids[0] = [END_TOKEN]
        if request.num_output_tokens == length - 1 and ending == "aborted":
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        scheduler.update_from_output(step, output)


@pytest.mark.parametrize(
    ("ending", "length", "ignore_eos", "expected"),
    [
        ("stopped", 40, False, "longer"),
        ("stopped", 2, False, "shorter"),
        ("cut", 40, False, "longer"),
        ("cut", 2, False, "same"),
        ("aborted", 40, False, "same"),
        ("cut", 40, True, "same"),  # the model was not asked when to end
    ],
)
def test_length_estimates_learn_from_how_answers_end(
    policy, ending, length, ignore_eos, expected
) -> None:
    scheduler = build(policy())
    scheduler.core.estimates.buckets = LengthBuckets(edges=(50,), means=(10.0, 100.0))
    for number in range(20):
        answer(scheduler, str(number), length, ending, ignore_eos)
    mean = scheduler.core.estimates.buckets.means[0]
    assert {"longer": mean > 12, "shorter": mean < 9, "same": mean == 10}[expected]
    gauges = scheduler.gauges()
    taught = ending == "stopped" or (ending == "cut" and not ignore_eos)
    assert ("length_ratio" in gauges) == taught
    assert scheduler.counters.total("policy_errors") == 0
    assert_clean(scheduler)


class StubService:
    """A prediction service with answers ready."""

    pending, up, cached, restarts = 0, True, 3, 2

    def passes(self) -> list:
        return [(4, 0.02)]

    def __init__(self, *answers) -> None:
        self.answers = list(answers)
        self.submitted: list[tuple] = []

    def drain(self) -> list:
        answers, self.answers = self.answers, []
        return answers

    def submit(self, request_id, text, level=None) -> bool:
        self.submitted.append((request_id, text, level))
        return True

    def cancel(self, request_id) -> None:
        pass


def test_late_prediction_is_applied_when_it_arrives(policy) -> None:
    scheduler = build(policy(), max_num_seqs=1)
    service = scheduler.predictions.service = StubService()
    add(scheduler, "a", "b", "c", output_tokens=50)
    run_step(scheduler)
    assert running(scheduler) == ["a"]
    service.answers = [("c", Prediction((1.0, 0.0))), ("a", None), ("gone", None)]
    run_step(scheduler)
    assert running(scheduler) == ["c"]
    assert scheduler.counters.total("failed_predictions") == 2
    assert scheduler.counters.total("predictions", "0") == 1
    finish_all(scheduler)
    assert_clean(scheduler)


class StubTokenizer:
    """Decodes every prompt to one text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.decoded: list[int] = []  # tokens of each call

    def decode(self, token_ids) -> str:
        self.decoded.append(len(token_ids))
        return self.text


class StubInstant:
    """Reads a level off the first letter of a text, with full confidence."""

    def read(self, text: str) -> Prediction:
        return Prediction(tuple(float(level == int(text[0])) for level in range(5)))


def test_provisional_level_gives_a_seat_until_corrected(policy, monkeypatch) -> None:
    path = policy()["policy"]
    with open(path, "w") as file:
        file.write("correct_profile: false\n")
    monkeypatch.setattr(
        "vllm_semantic_sched.engine.requests.prediction.PredictionService",
        lambda *args, **kwargs: None,
    )
    scheduler = build({"policy": path}, max_num_seqs=1)
    feed = scheduler.predictions
    service = feed.service = StubService()
    feed.instant, feed.tokenizer = StubInstant(), StubTokenizer("3")
    add(scheduler, "calm", output_tokens=50)
    run_step(scheduler)
    feed.tokenizer.text = "0"
    add(scheduler, "urgent", output_tokens=50, prompt_tokens=600)
    # By default, to serve level 3 last costs 1, and level 0 four levels of 12. All of the long
    # prompt is decoded for the predictor, by its own thread.
    calm, (name, text, order) = service.submitted
    assert calm == ("calm", "3", -1.0)
    assert feed.tokenizer.decoded[1:] == [512]  # the instant reader sees its ends
    assert (name, text(), order) == ("urgent", "0", -48.0)
    assert feed.tokenizer.decoded[1:] == [512, 600]
    job = scheduler.jobs["urgent"]
    assert (job.level, job.level_source.value) == (0, "instant")
    run_step(scheduler)
    assert running(scheduler) == ["urgent"]
    service.answers = [("urgent", Prediction((0.0, 0.0, 0.0, 0.0, 1.0)))]
    run_step(scheduler)
    assert running(scheduler) == ["calm"]
    assert (job.level, job.level_source.value) == (4, "prediction")
    counters = scheduler.counters
    assert counters.total("instant_predictions") == 2
    assert counters.total("corrected_levels", "lowered") == 1
    assert counters.total("requests", "instant") == 2
    finish_all(scheduler)
    assert_clean(scheduler)


def test_prediction_service_counts_are_published(policy) -> None:
    scheduler = build(policy())
    service = scheduler.predictions.service = StubService()
    for _ in range(2):
        run_step(scheduler)
    service.cached = 5
    run_step(scheduler)
    scheduler.gauges()
    assert scheduler.counters.total("cached_predictions") == 5
    assert scheduler.counters.total("predictor_restarts") == 2
    assert {"cached_predictions", "predictor_restarts"} <= set(COUNTERS)
    assert {"length_ratio", *scheduler.gauges()} <= set(GAUGES)


def test_fcfs_uses_vllms_own_classes() -> None:
    scheduler = build({"policy": "fcfs"})
    assert type(scheduler) is Scheduler
    assert type(build({"policy": "fcfs"}, async_scheduling=True)) is AsyncScheduler
    assert type(scheduler.waiting) is FCFSRequestQueue
    scheduler = build({"policy": "fcfs"}, policy="priority")
    assert type(scheduler.waiting) is PriorityRequestQueue
    add(scheduler, "a", "b")
    finish_all(scheduler)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_fcfs_can_be_reset_paused_and_stopped(async_scheduling) -> None:
    scheduler = build({"policy": "fcfs"}, async_scheduling=async_scheduling)
    add(scheduler, "a", "b", output_tokens=5)
    run_step(scheduler)
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert scheduler.make_stats().num_waiting_reqs == 2
    for state in (PauseState.PAUSED_ALL, PauseState.UNPAUSED):
        scheduler.set_pause_state(state)
        run_step(scheduler)
    finish_all(scheduler)
    scheduler.shutdown()


def test_base_class_follows_the_scheduling_mode(policy) -> None:
    assert not isinstance(build(policy()), AsyncScheduler)
    assert isinstance(build(policy(), async_scheduling=True), AsyncScheduler)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"policy": "emms"}, ["emms", "'ems'", "fairness"]),
        ({"policy": "/does/not/exist.yaml"}, ["/does/not/exist.yaml"]),
        ({"polcy": "ems"}, ["polcy", "'policy'"]),
        ({"policy": 3}, ["policy", "string"]),
        ({"profile": "a100"}, ["a100", "a100-qwen1.5-4b"]),
    ],
)
def test_unusable_settings_stop_the_start(settings, words) -> None:
    with pytest.raises(PolicyError) as refusal:
        build(settings)
    for word in words:
        assert word in str(refusal.value)


def test_environment_overrides_the_command_line(monkeypatch) -> None:
    monkeypatch.setenv("SEMSCHED_POLICY", "fcfs")
    assert type(build({"policy": "does-not-matter"})) is Scheduler


@pytest.mark.parametrize("version", ["0.30.2", "0.34.0", "1.0", "dev"])
def test_unsupported_vllm_version_is_named(version, monkeypatch, caplog) -> None:
    with pytest.raises(UnsupportedVersion, match=rf"{version} is installed"):
        check_vllm_version(version)
    monkeypatch.setenv("SEMSCHED_ALLOW_UNTESTED_VLLM", "1")
    check_vllm_version(version)
    assert f"vLLM {version} is installed" in caplog.text


@pytest.mark.parametrize("name", ["SemanticScheduler", "Middleware", "engine.kv_swap"])
def test_unsupported_vllm_is_named_before_any_of_it_is_imported(name) -> None:
    code = (
        "import importlib.metadata as found, pkgutil, sys\n"
        "found.packages_distributions = lambda: {'vllm': ['vllm']}\n"
        "found.version = lambda name: '0.40.0'\n"
        f"try: pkgutil.resolve_name('vllm_semantic_sched.{name}')\n"
        "except RuntimeError as error: print(error, 'vllm' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "but vLLM 0.40.0 is installed" in done.stdout and done.stdout.endswith(" False\n")


def test_local_builds_of_supported_vllm_are_accepted() -> None:
    for version in ("0.32.0", "0.32.1+cpu", "0.32.0.dev3+g1234"):
        check_vllm_version(version)


@pytest.mark.parametrize("path", MAY_FAIL)
def test_exceptions_are_counted_and_all_requests_served(policy, monkeypatch, path) -> None:
    scheduler = build(policy(), max_num_seqs=3, num_blocks=40)
    add(scheduler, *"abcdef", urgency=4, output_tokens=30, prompt_tokens=60)
    for _ in range(3):
        run_step(scheduler)

    def fail(*args, **kwargs):
        raise RuntimeError("injected")

    monkeypatch.setattr(*method_of(scheduler, path), fail)
    add(scheduler, *"uvwxyz", urgency=0, output_tokens=30, prompt_tokens=60)
    if path == "core.requeue":
        scheduler.waiting.prepend_request(scheduler.waiting.pop_request())
    finish_all(scheduler)
    assert scheduler.counters.total("policy_errors") > 0
    assert not scheduler.requests


events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 4), st.integers(1, 150), st.integers(1, 40)),
        st.tuples(st.just("burst"), st.integers(4, 9), st.integers(1, 60), st.integers(2, 40)),
        st.tuples(st.just("abort"), st.integers(0, 100)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("reset")),
    ),
    min_size=5,
    max_size=40,
)


@settings(max_examples=40)
@given(events, st.sampled_from([0, 1]), st.sampled_from([None, 0]), st.booleans())
def test_random_traffic_frees_everything(
    tmp_path_factory, events, ahead, gated_level, holds
) -> None:
    """Asynchronous scheduling runs one step ahead of the outputs."""
    path = tmp_path_factory.mktemp("policy") / "p.yaml"
    protect = "protect: {level: 1, price: 0.9, worth: 1.0e+9}\n" if holds else ""
    path.write_text(f"{HINTS_ONLY}{protect}")
    scheduler = build(
        {"policy": str(path), "profile": "cpu-2core-tiny"},
        max_num_seqs=3,
        num_blocks=24,
        max_num_batched_tokens=128,
        async_scheduling=bool(ahead),
    )
    scheduler.core.gated_level = gated_level
    in_flight = deque()

    def step() -> None:
        output = scheduler.schedule()
        in_flight.append((output, model_output(scheduler, output)))
        while len(in_flight) > ahead:
            scheduler.update_from_output(*in_flight.popleft())

    for number, (kind, *values) in enumerate(events):
        if kind == "add":
            level, prompt, output = values
            add(
                scheduler,
                str(number),
                urgency=level,
                prompt_tokens=prompt,
                output_tokens=output,
            )
        elif kind == "burst":
            count, prompt, output = values
            for level in range(count):  # more than there are seats
                add(
                    scheduler,
                    f"{number} {level}",
                    urgency=level % 5,
                    prompt_tokens=prompt,
                    output_tokens=output,
                )
        elif kind == "abort" and scheduler.requests:
            names = list(scheduler.requests)
            name = names[values[0] % len(names)]
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        elif kind == "step":
            for _ in range(values[0]):
                step()
        elif kind == "reset" and not ahead:
            scheduler.reset_prefix_cache(reset_running_requests=True)
    for _ in range(3000):
        if not scheduler.get_num_unfinished_requests():
            break
        step()
    while in_flight:
        scheduler.update_from_output(*in_flight.popleft())
    assert scheduler.counters.total("policy_errors") == 0
    assert_clean(scheduler)
