"""How vLLM fills its steps: with and without asynchronous scheduling, by options of its scheduler,
from the prefix cache."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from virtual_runs import (
    FEATURE_LOAD,
    MUCH_HELD,
    check_feature,
    decodes_beside_a_prefill,
    mean_ttft,
)
from vllm.v1.engine.core import EngineCore

from vllm_semantic_sched.lab.device import virtual
from vllm_semantic_sched.lab.device.load import LoadRequest
from vllm_semantic_sched.lab.device.virtual import VirtualEngine, run_virtual

pytestmark = pytest.mark.engine


def test_asynchronous_scheduling() -> None:
    check_feature(modes=[True])


def test_synchronous_scheduling() -> None:
    check_feature(modes=[False])


def test_second_model_runner() -> None:
    check_feature(runner=2)


# The prefix cache


@pytest.mark.parametrize("runner", [1, 2])
def test_prefix_cache(runner) -> None:
    check_feature(runner=runner, prefix_cache=True)


LATER = 0.3  # seconds; all that was sent at first decodes then


def sent(name: str, level: int, prompt: range, answer: int, arrival: float = 0.0) -> LoadRequest:
    return LoadRequest(name, arrival, level, tuple(prompt), answer)


def test_nobody_is_preempted_for_blocks_that_the_cache_has() -> None:
    """21 of the 22 blocks that the level 0 needs are in use by another; 5 to 9 are free."""
    load = [
        sent("x", 4, range(100, 440), 60),
        sent("y", 4, range(500, 840), 60),
        sent("urgent", 0, range(100, 445), 5, LATER),
    ]
    ran = run_virtual(
        load,
        seats=4,
        blocks=55,
        max_model_len=640,
        prefix_cache=True,
        policy=MUCH_HELD,
    )
    assert ran.engine.scheduler.counters.total("preemptions") == 0
    assert ran.records[2].ttft < 0.1


# Prefills


def test_chunked_prefill() -> None:
    """Steps of 64 tokens, for prompts of up to 400."""
    check_feature(blocks=50, budget=64)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"budget": 64}, id="batched"),
        pytest.param({"options": {"max_num_scheduled_tokens": 64}}, id="scheduled"),
    ],
)
def test_decodes_go_on_beside_a_long_prefill(options, asynchronous) -> None:
    """Of less urgent requests. The prompt takes 21 steps of 48 tokens, beside 16 decodes."""
    decodes = decodes_beside_a_prefill(16, asynchronous=asynchronous, **options)
    assert sum(count < 16 for count in decodes) <= 1
    assert len(decodes) <= 22


def test_prefill_in_one_step() -> None:
    check_feature(budget=640, options={"enable_chunked_prefill": False})


@pytest.fixture
def prompt_tokens(monkeypatch) -> list[int]:
    """Most tokens of a request in each step of several, with our scheduler."""
    most: list[int] = []
    add = VirtualEngine.__enter__

    def watch(engine: VirtualEngine) -> VirtualEngine:
        add(engine)
        if engine.config.scheduler != "semantic":
            return engine
        schedule = engine.scheduler.schedule

        def note(*args: Any) -> Any:
            output = schedule(*args)
            tokens = output.num_scheduled_tokens.values()
            if len(tokens) > 1:  # vLLM does not limit the prompt of a request that is alone
                most.append(max(tokens))
            return output

        engine.scheduler.schedule = note
        return engine

    monkeypatch.setattr(VirtualEngine, "__enter__", watch)
    return most


def test_long_prefill_threshold(prompt_tokens) -> None:
    """In steps of 128 tokens, which have to be shared."""
    shown = check_feature(budget=128, options={"long_prefill_token_threshold": 50})
    assert max(prompt_tokens) == 50
    for one in shown:
        assert one.engine.scheduler.scheduler_config.long_prefill_token_threshold == 50


def test_adaptive_long_prefill_threshold(prompt_tokens) -> None:
    """At least an even share of the step, unless sharing it by urgency gives less."""
    adaptive = {"long_prefill_token_threshold": 20, "long_prefill_token_threshold_adaptive": True}
    shown = check_feature(budget=256, options=adaptive)
    assert max(prompt_tokens) > 20
    for one in shown:
        assert one.engine.scheduler.adaptive_long_prefill_threshold


def test_prefill_interval(monkeypatch) -> None:
    """As vLLM's engines with data parallelism do, whichever release: prefills every fourth step."""
    steps = itertools.count()

    def throttled(core: EngineCore) -> bool:
        return next(steps) % 4 != 0

    monkeypatch.setattr(EngineCore, "_should_throttle_prefills", throttled)
    check_feature()


# Limits and reserves


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_num_scheduled_tokens": 200}, id="tokens"),
        pytest.param({"scheduler_reserve_full_isl": False}, id="no_full_isl"),
        pytest.param({"stream_interval": 10}, id="stream_interval"),
    ],
)
def test_option(options) -> None:
    check_feature(options=options)


def test_watermark() -> None:
    check_feature(options={"watermark": 0.1})


def test_urgent_request_takes_blocks_above_the_watermark() -> None:
    """Six of 60 are to stay free. When the level 0 comes for four, eight are."""
    load = [sent(f"low{number}", 4, range(100, 350), 200) for number in range(3)]
    load.append(sent("urgent", 0, range(600, 660), 5, LATER))
    ran = run_virtual(
        load,
        seats=8,
        blocks=60,
        max_model_len=640,
        policy=MUCH_HELD,
        options={"watermark": 0.1},
    )
    assert ran.engine.scheduler.counters.total("admission_preemptions") == 1
    assert ran.records[-1].ttft < 0.1


def test_most_active_sequences() -> None:
    """With blocks for all: seats are what they lack."""
    check_feature(seats=8, blocks=200, options={"max_num_active_seqs": 3})


# vLLM's priorities


def test_vllms_priorities(monkeypatch) -> None:
    """Clients of `--scheduling-policy priority` keep their numbers, here -2 to 2."""
    make = virtual._engine_request

    def make_with_priority(one: LoadRequest, *args: Any) -> Any:
        request = make(replace(one, level=None), *args)
        request.priority = one.level - 2
        return request

    monkeypatch.setattr(virtual, "_engine_request", make_with_priority)
    few = {"seats": 4, "blocks": 64, "max_model_len": 640}
    theirs = run_virtual(FEATURE_LOAD, scheduler="priority", **few)
    ours = run_virtual(
        FEATURE_LOAD,
        policy=MUCH_HELD | {"hints": {"priority": "vllm"}},
        options={"scheduling_policy": "priority"},
        **few,
    )
    assert [one.tokens for one in ours.records] == [one.tokens for one in theirs.records]
    assert mean_ttft(ours.records, [0]) < mean_ttft(theirs.records, [0])
    assert mean_ttft(ours.records, [0, 1]) < mean_ttft(ours.records, [2, 3, 4])
