"""vLLM's real scheduler without engine and model: simulated KV cache and model output. Fast enough
for unit tests and for timing `schedule()` with 100,000 requests."""

import itertools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm import config
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.predict.instant import InstantReader

_MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 1000,
    "max_position_embeddings": 131072,
}
BLOCK_SIZE = 16
KV_SHAPE: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 1}
KV_SHAPE["dtype"] = torch.float32
_PREDICTION = Prediction((0.0, 0.0, 0.1, 0.8, 0.1))
_WORDS = ("my", "father", "has", "pain", "in", "his", "chest", "since", "noon")


def _model_config() -> config.ModelConfig:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL))
        return config.ModelConfig(model=folder, dtype="float32", skip_tokenizer_init=True)


def _cache_config(blocks: int, prefix_caching: bool) -> config.CacheConfig:
    cache = config.CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=prefix_caching)
    cache.num_gpu_blocks = blocks
    return cache


def build_scheduler(
    scheduler_class: type[Scheduler] = Scheduler,
    max_num_seqs: int = 4,
    num_blocks: int = 1000,
    max_num_batched_tokens: int = 8192,
    semantic_sched: dict[str, Any] | None = None,
    async_scheduling: bool = False,
    prefix_caching: bool = False,
    kv_transfer_config: config.KVTransferConfig | None = None,
    lora_config: config.LoRAConfig | None = None,
    layers: Sequence[KVCacheGroupSpec] | None = None,
    more_layers: Sequence[KVCacheGroupSpec] = (),
    encoder_cache: int = 0,
    **scheduler_options: Any,
) -> Scheduler:
    """Build a scheduler as vLLM's engine core does, with `semantic_sched` in `--additional-config`;
    `more_layers` are beside `layers`, by default one of full attention; `encoder_cache` is the
    tokens of images that it holds, and as many may be encoded in a step."""
    vllm_config = config.VllmConfig(
        model_config=_model_config(),
        cache_config=_cache_config(num_blocks, prefix_caching),
        device_config=config.DeviceConfig("cpu"),
        scheduler_config=config.SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=_MODEL["max_position_embeddings"],
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            **scheduler_options,
        ),
        # Without an engine there is no device to derive a profile for.
        additional_config={"semantic_sched": {"profile": "default"} | (semantic_sched or {})},
        kv_transfer_config=kv_transfer_config,
        lora_config=lora_config,
    )
    # Set late: vLLM turns it off on a CPU.
    vllm_config.scheduler_config.async_scheduling = async_scheduling
    if layers is None:
        layers = [KVCacheGroupSpec(["layer"], FullAttentionSpec(**KV_SHAPE))]
    groups = [*layers, *more_layers]
    scheduler = scheduler_class(
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=BLOCK_SIZE,
        log_stats=True,
    )
    if encoder_cache:
        _read_images(scheduler, encoder_cache)
    return scheduler


def _read_images(scheduler: Scheduler, encoder_cache: int) -> None:
    """Schedule as for a model that reads images, which this one does not."""
    scheduler.max_num_encoder_input_tokens = encoder_cache
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=encoder_cache)
    scheduler.scheduler_config.disable_chunked_mm_input = False


def make_request(
    request_id: str,
    prompt_tokens: int = 20,
    output_tokens: int = 20,
    urgency: Any = None,
    priority: int = 0,
    tenant: str | None = None,
    **fields: Any,
) -> Request:
    """Make a request that ends after exactly `output_tokens`; `fields` are of vLLM's request."""
    given = {"urgency": urgency, "tenant": tenant}
    extra = {key: value for key, value in given.items() if value is not None} or None
    return Request(
        request_id=request_id,
        prompt_token_ids=[1 + (hash(request_id) + i) % 900 for i in range(prompt_tokens)],
        sampling_params=SamplingParams(max_tokens=output_tokens, ignore_eos=True, extra_args=extra),
        pooling_params=None,
        priority=priority,
        **fields,
    )


def model_output(scheduler: Scheduler, step: SchedulerOutput) -> ModelRunnerOutput:
    """Return a model's output: one token for each request whose prefill is complete."""
    scheduled = list(step.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=scheduled,
        req_id_to_index={request_id: index for index, request_id in enumerate(scheduled)},
        sampled_token_ids=[
            [] if scheduler.requests[request_id].is_prefill_chunk else [7]
            for request_id in scheduled
        ],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


class StubReader:
    """Stands in for the predictor's service: every prompt is of level 3, its answer short."""

    pending = cached = restarts = 0
    up = True

    def __init__(self) -> None:
        self._submitted: list[str] = []

    def submit(self, request_id: str, *args: Any, **kwargs: Any) -> bool:
        """Take a prompt, whatever it says."""
        self._submitted.append(request_id)
        return True

    def drain(self) -> list[tuple[str, Prediction]]:
        """Answer all prompts since the last call."""
        submitted = self._submitted
        self._submitted = []
        return [(request_id, _PREDICTION) for request_id in submitted]

    def passes(self) -> list[tuple[int, float]]:
        """Empty: no network runs."""
        return []

    def cancel(self, request_id: str) -> None:
        """No-op: an answer to a request that has ended is ignored."""

    def close(self) -> None:
        """No-op: there is no process."""


def _decode(tokens: Sequence[int]) -> str:
    """The same words for every prompt, so many as it has tokens."""
    return " ".join(itertools.islice(itertools.cycle(_WORDS), len(tokens)))


def read_texts(scheduler: Any) -> None:
    """Let one of our schedulers read prompts, by the instant reader and a stub of the network."""
    feed = scheduler.predictions
    feed.service = StubReader()
    feed.tokenizer = SimpleNamespace(decode=_decode)
    feed.instant = InstantReader.load()


def run_step(scheduler: Scheduler) -> SchedulerOutput:
    """Run one engine step: schedule, then update from simulated model output."""
    step = scheduler.schedule()
    scheduler.update_from_output(step, model_output(scheduler, step))
    return step
