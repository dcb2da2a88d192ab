"""Sound has KV of its own in encoder-decoder models; prompts with log-probabilities are computed
without the prefix cache."""

import pytest
from engine_steps import EngineSteps, image
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderDecoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import CrossAttentionSpec, KVCacheGroupSpec
from vllm.v1.request import Request

from vllm_semantic_sched.lab.bench.standalone import (
    BLOCK_SIZE,
    KV_SHAPE,
    make_request,
    run_step,
)

pytestmark = pytest.mark.engine

AT_ONCE = 3


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
    assert steps.scheduler.counters.total("refused_requests") == 1


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
