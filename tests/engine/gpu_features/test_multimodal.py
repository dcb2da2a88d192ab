"""Images: the encoder cache is a resource that a request may lack; sound has KV of its own in
encoder-decoder models; prompts with log-probabilities are computed without the prefix cache."""

from collections import Counter
from typing import Any

import pytest
from engine_steps import EngineSteps, image
from orders import preempt
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderDecoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import CrossAttentionSpec, KVCacheGroupSpec
from vllm.v1.request import Request

from vllm_semantic_sched.engine.vllm_api import hold_for_one_step
from vllm_semantic_sched.lab.bench.standalone import (
    BLOCK_SIZE,
    KV_SHAPE,
    make_request,
    run_step,
)

pytestmark = pytest.mark.engine

AT_ONCE = 3


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
    assert steps.until_scheduled("text", 20) in range(AT_ONCE + 1)
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


def hears(build, blocks: int) -> EngineSteps:
    """A model like Whisper, with cross-attention KV for a recording of 1,500 tokens (94 blocks)."""
    cross = KVCacheGroupSpec(["cross"], CrossAttentionSpec(**KV_SHAPE))
    scheduler = build(num_blocks=blocks, more_layers=[cross], encoder_cache=3000)
    scheduler.is_encoder_decoder = True
    scheduler.encoder_cache_manager = EncoderDecoderCacheManager(cache_size=3000)
    return EngineSteps(scheduler)


SOUND = {"prompt_tokens": 4, "mm_features": [image("sound", 0, 1500)]}


def test_urgent_sound_preempts_for_its_cross_attention_blocks(build) -> None:
    steps = hears(build, 200)
    steps.add("low1", "low2", urgency=4, output_tokens=100, **SOUND)
    steps.run(2)
    steps.add("urgent", urgency=0, output_tokens=5, **SOUND)
    assert steps.until_scheduled("urgent", 200) in range(AT_ONCE + 1)
    assert steps.scheduler.counters.total("preemptions") == 1
    steps.finish()


def test_sound_that_can_never_fit_is_refused(build) -> None:
    steps = hears(build, 90)
    steps.add("never", urgency=0, output_tokens=5, **SOUND)
    steps.run(2)
    assert not steps.scheduler.requests
    assert steps.scheduler.counters.total("refused") == 1


def test_prompt_logprobs_restart_at_first_token_after_preemption(build) -> None:
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    scheduler = build(max_num_seqs=2, max_num_batched_tokens=100, prefix_caching=True)
    params = SamplingParams(
        max_tokens=5, ignore_eos=True, prompt_logprobs=1, extra_args={"urgency": 4}
    )
    request = Request("prompt", list(range(1, 451)), params, None, block_hasher=hasher)
    scheduler.add_request(request)
    starts = []
    for step in range(60):
        if step % 3 == 2 and step < 18:
            for name in (f"a{step}", f"b{step}"):
                scheduler.add_request(
                    make_request(name, urgency=0, output_tokens=2, block_hasher=hasher)
                )
        output = run_step(scheduler)
        starts += [new.num_computed_tokens for new in output.scheduled_new_reqs[:1] if not step]
        cached = output.scheduled_cached_reqs
        starts += [
            computed
            for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            if name == "prompt" and name in cached.resumed_req_ids
        ]
    assert "prompt" not in scheduler.requests
    assert request.num_preemptions in range(1, 4)
    assert starts == [0] * (1 + request.num_preemptions)
