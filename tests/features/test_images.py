"""Images: the same answers, and the encoder cache as a resource that a request may lack."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from engine_steps import EngineSteps, image
from orders import preempt
from virtual_runs import FEATURE_LOAD, check_feature
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from vllm_semantic_sched.engine.vllm_api import hold_for_one_step
from vllm_semantic_sched.lab.bench.standalone import make_request, run_step
from vllm_semantic_sched.lab.device.load import Image, LoadRequest
from vllm_semantic_sched.lab.device.model import SHAPES

pytestmark = pytest.mark.engine

SOON = 3  # steps
TOKEN = SHAPES["idefics3-8b"]["image_token_id"]


def with_image(request: LoadRequest, name: str, tokens: int, offset: int = 20) -> LoadRequest:
    prompt = (*request.prompt[:offset], *[TOKEN] * tokens, *request.prompt[offset:])
    return replace(request, prompt=prompt, images=(Image(name, offset, tokens),))


def with_images() -> list[LoadRequest]:
    """The load; every other request has one of five images."""
    chance = random.Random(5)
    return [
        with_image(request, f"image {chance.randint(0, 4)}", 150) if number % 2 else request
        for number, request in enumerate(FEATURE_LOAD)
    ]


def test_requests_with_images_get_the_same_answers(models) -> None:
    check_feature(
        with_images(),
        shape="idefics3-8b",
        model=models("idefics3-8b"),
        prefix_cache=True,
        max_model_len=800,
        blocks=80,
    )


def test_full_encoder_cache_changes_no_answer(models, monkeypatch) -> None:
    """It holds one image: a request whose image does not fit waits, and one that resumes has its
    image encoded again."""
    create = partial(EncoderCacheManager, cache_size=160)
    monkeypatch.setattr(EncoderCacheManager, "create_manager", lambda **options: create())
    (shown,) = check_feature(
        with_images(),
        shape="idefics3-8b",
        model=models("idefics3-8b"),
        max_model_len=800,
        blocks=80,
        modes=[True],
    )
    assert shown.engine.scheduler.encoder_cache_manager.cache_size == 160


def add_with_image(steps: EngineSteps, name: str, **fields: Any) -> None:
    """A request whose prompt begins with an image of 100 tokens."""
    steps.add(name, output_tokens=5, mm_features=[image(name, 0, 100)], **fields)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_prefill_does_not_yield_to_image_blocked_by_its_own(
    build, build_stock, asynchronous
) -> None:
    """The images of both do not fit into the encoder cache together."""

    def drained(build) -> EngineSteps:
        scheduler = build(
            encoder_cache=120,
            max_num_seqs=8,
            max_num_batched_tokens=40,
            async_scheduling=asynchronous,
        )
        steps = EngineSteps(scheduler)
        add_with_image(steps, "long", urgency=4, prompt_tokens=400)
        steps.run(2)
        add_with_image(steps, "urgent", urgency=0, prompt_tokens=120)
        steps.run()
        steps.add("text", urgency=4, prompt_tokens=30, output_tokens=5)
        steps.finish(100)
        return steps

    ours, stock = drained(build), drained(build_stock)
    assert ours.count <= stock.count + 10
    assert ours.longest_empty() <= 3


def test_image_starts_when_the_encoder_cache_has_room(build, build_stock) -> None:
    """A running prefill needs the cache for 50 steps; text of level 0 comes behind the image."""

    def first(build) -> dict[str, int]:
        scheduler = build(encoder_cache=120, max_num_seqs=3, max_num_batched_tokens=40)
        steps = EngineSteps(scheduler)
        add_with_image(steps, "long", urgency=4, prompt_tokens=2000)
        steps.add("low1", "low2", urgency=4, output_tokens=300)
        steps.run(2)
        add_with_image(steps, "urgent", urgency=0, prompt_tokens=120)
        steps.run()
        steps.add("text", urgency=0, output_tokens=5)
        steps.run(120)
        return steps.first

    ours, stock = first(build), first(build_stock)
    assert ours.get("urgent", 1000) <= stock["urgent"] + 15
    assert ours.get("text", 1000) <= stock["text"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_urgent_image_gets_room_in_the_encoder_cache(build, asynchronous) -> None:
    """The image of a running request takes ten steps."""
    scheduler = build(
        encoder_cache=120,
        max_num_seqs=8,
        max_num_batched_tokens=12,
        async_scheduling=asynchronous,
    )
    steps = EngineSteps(scheduler)
    add_with_image(steps, "running", urgency=4, prompt_tokens=110)
    steps.run(2)
    add_with_image(steps, "urgent", urgency=0, prompt_tokens=110)
    assert steps.until_scheduled("urgent", 20) in range(SOON + 1)
    steps.finish(100)
    assert scheduler.counters.total("preemptions") == 1


def test_image_larger_than_encoder_cache_blocks_no_other(build) -> None:
    scheduler = build(encoder_cache=120, max_num_seqs=3, max_num_batched_tokens=400)
    steps = EngineSteps(scheduler)
    steps.add("low1", "low2", "low3", urgency=4, output_tokens=60)
    steps.run(2)
    steps.add(
        "never", urgency=0, prompt_tokens=200, output_tokens=5, mm_features=[image("i", 0, 150)]
    )
    steps.run()
    steps.add("text", urgency=0, output_tokens=5)
    assert steps.until_scheduled("text", 20) in range(SOON + 1)
    steps.run(30)
    assert "text" in steps.ended


@pytest.mark.parametrize("disturbance", ["none", "preempted", "held"])
def test_request_stopped_inside_an_image_gives_the_cache_back(build, disturbance) -> None:
    scheduler = build(encoder_cache=200, max_num_batched_tokens=80)
    request = make_request(
        "image", 300, output_tokens=5, urgency=4, mm_features=[image("i", 50, 100)]
    )
    scheduler.add_request(request)
    encoded: Counter[str] = Counter()
    for step in range(60):
        if scheduler.running and 60 < request.num_computed_tokens < 140:
            if disturbance == "preempted" and not request.num_preemptions:
                preempt(scheduler, request)
            elif disturbance == "held" and step < 8:
                hold_for_one_step(scheduler, request)
        encoded.update(run_step(scheduler).scheduled_encoder_inputs.keys())
    assert "image" not in scheduler.requests
    assert encoded["image"] == 1
    cache = scheduler.encoder_cache_manager
    assert cache.num_freeable_slots == cache.cache_size
    assert scheduler.counters.total("policy_errors") == 0
