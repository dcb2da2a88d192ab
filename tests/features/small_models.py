"""Runs a small model with random weights on vLLM's CPU engine with `SemanticScheduler`, and prints
a line of JSON; started by test_small_models.py.

    python small_models.py POLICY KIND

KIND is one of `MODELS`, or `TENSOR_PARALLEL`: the plain model on two worker processes.
"""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import vllm.v1.executor.multiproc_executor  # noqa: F401 - whose workers are forked
from nursery import fork_what_vllm_spawns
from vllm import LLM, PoolingParams, SamplingParams
from vllm.model_executor.model_loader import dummy_loader
from vllm.model_executor.models import registry
from vllm.sampling_params import RequestOutputKind

from vllm_semantic_sched.engine.startup.settings import SWAP_CONNECTOR
from vllm_semantic_sched.lab.bench.tiny_model import write_tokenizer

SIZE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "plain": SIZE
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": 2,
    },
    "hybrid": SIZE
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "num_key_value_heads": 2,
        "shared_intermediate_size": 64,
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_d_head": 64,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
    },
    "whisper": {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "d_model": 128,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "vocab_size": 1000,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "decoder_start_token_id": 1,
        "num_mel_bins": 80,
        "max_source_positions": 1500,
        "max_target_positions": 448,
    },
    "embedding": SIZE
    | {
        "architectures": ["Qwen3Model"],
        "model_type": "qwen3",
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 32768,
    },
    "reranker": SIZE
    | {
        "architectures": ["BertForSequenceClassification"],
        "model_type": "bert",
        "num_labels": 1,
        "pad_token_id": 0,
        "vocab_size": 32768,
    },
}
POOLED = {"embedding": "embed", "reranker": "classify"}
TENSOR_PARALLEL = "tensor parallel"
HEARD: dict[str, Any] = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "processor_class": "WhisperProcessor",
    "feature_size": 80,
    "sampling_rate": 16_000,
    "hop_length": 160,
    "chunk_length": 30,
    "n_fft": 400,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": False,
}
SEATS = 2
LOW = ("a", "b", "c", "d")
ANSWER = 24  # tokens
URGENT_EVERY = 8  # steps
STEPS = 2000


def write_model(folder: Path, kind: str) -> None:
    config = MODELS[kind] | {"torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    if kind in POOLED:
        write_tokenizer(folder)
    if kind == "whisper":
        (folder / "preprocessor_config.json").write_text(json.dumps(HEARD))
        write_whisper_tokenizer(folder)


def write_whisper_tokenizer(folder: Path) -> None:
    """One that knows the bytes, and no word."""
    from transformers import WhisperTokenizer

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [*map(chr, printable), *map(chr, range(256, 324))]
    names = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", *letters]
    vocabulary = {name: number for number, name in enumerate(names)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = WhisperTokenizer(
        vocab_file=str(folder / "vocab.json"), merges_file=str(folder / "merges.txt")
    )
    tokenizer.save_pretrained(folder)


def make_engine(kind: str, policy: str, folder: Path) -> LLM:
    model = kind if kind in MODELS else "plain"
    write_model(folder, model)
    options: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 64}
    if kind == "whisper":
        options["max_num_batched_tokens"] = 2048  # a recording is encoded as a whole
    else:
        options["block_size"] = 32
    if kind in POOLED:
        options |= {"runner": "pooling", "max_num_batched_tokens": 256}
    if kind == TENSOR_PARALLEL:
        fork_what_vllm_spawns(fronts=False)
        swap = SWAP_CONNECTOR | {"kv_connector_extra_config": {"host_gib": 0.05}}
        options |= {
            "distributed_executor_backend": "mp",
            "tensor_parallel_size": 2,
            "kv_transfer_config": swap,
        }
    return LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=kind not in POOLED and kind != "whisper",
        additional_config={"semantic_sched": {"policy": policy}},
        scheduler_cls="vllm_semantic_sched.SemanticScheduler",
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=SEATS,
        gpu_memory_utilization=0.5,
        kv_cache_memory_bytes=2**26,
        **options,
    )


def prompt_of(kind: str, name: str) -> dict[str, Any]:
    seed = ord(name[0])
    if kind == "whisper":
        noise = numpy.random.default_rng(seed).standard_normal(16_000).astype("float32")
        sound = {"prompt_token_ids": [], "multi_modal_data": {"audio": (noise, 16_000)}}
        return {"encoder_prompt": sound, "decoder_prompt": {"prompt_token_ids": [1, 2, 3]}}
    return {"prompt_token_ids": [(7 * seed + 13 * place) % 900 + 20 for place in range(40)]}


def params_of(kind: str, name: str, several: int = 1) -> SamplingParams | PoolingParams:
    urgent = name not in LOW
    level = {"urgency": 0 if urgent else 4}
    if kind in POOLED:
        return PoolingParams(task=POOLED[kind], extra_kwargs=level)
    return SamplingParams(
        # The likeliest token is always the same one of a Whisper without training.
        temperature=1 if several > 1 or kind == "whisper" else 0,
        seed=ord(name[0]),
        n=several,
        max_tokens=3 if urgent else ANSWER,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=level,
        prompt_logprobs=1 if kind == "plain" and several == 1 and not urgent else None,
    )


def run(llm: LLM, kind: str, disturbed: bool, several: int = 1) -> dict[str, Any]:
    """The answers to less urgent requests, and the order in which all ended. `disturbed`: urgent
    requests come in between."""
    engine = llm.llm_engine
    tag = f"{disturbed}{several}"
    for name in LOW:
        engine.add_request(name + tag, prompt_of(kind, name), params_of(kind, name, several))
    answers: dict[str, Any] = {}
    order: list[str] = []
    urgent = 0
    for step in range(STEPS):
        if not engine.has_unfinished_requests():
            break
        if disturbed and step % URGENT_EVERY == URGENT_EVERY // 2 * (kind not in POOLED):
            name = f"u{urgent}"
            urgent += 1
            if urgent <= len(LOW):
                engine.add_request(name + tag, prompt_of(kind, "u"), params_of(kind, name))
        for output in engine.step():
            if not output.finished:
                continue
            name = output.request_id.removesuffix(tag)
            order.append(name)
            if name in LOW:
                answers[name] = content(output)
    return {"answers": answers, "order": order}


def content(output: Any) -> Any:
    if hasattr(output.outputs, "data"):
        return [round(float(number), 4) for number in output.outputs.data.flatten()]
    tokens = [answer.token_ids for answer in sorted(output.outputs, key=lambda each: each.index)]
    logprobs = [
        sorted((token, round(entry.logprob, 3)) for token, entry in place.items())
        for place in filter(None, output.prompt_logprobs or ())
    ]
    return [tokens, logprobs]


def report(policy: str, kind: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        llm = make_engine(kind, policy, Path(folder))
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        runs = {"calm": run(llm, kind, False), "disturbed": run(llm, kind, True)}
        preempted = scheduler.counters.total("preemptions")
        if kind == "plain":
            runs |= {"calm n": run(llm, kind, False, 3), "disturbed n": run(llm, kind, True, 3)}
        return {
            "kind": kind,
            **runs,
            "preempted": preempted,
            "preempted n": scheduler.counters.total("preemptions") - preempted,
            "loaded": scheduler.counters.total("loaded_tokens"),
            "errors": scheduler.counters.total("policy_errors"),
            "left": len(scheduler.jobs),
        }


def main() -> None:
    _, policy, kind = sys.argv
    # It would import vLLM once more, to look at the model's class.
    registry._run_in_subprocess = lambda look: look()
    # By default random weights are so small that all answers are alike.
    dummy_loader.initialize_single_dummy_weight = partial(
        dummy_loader.initialize_single_dummy_weight, low=-0.3, high=0.3
    )
    print(json.dumps(report(policy, kind)), flush=True)


if __name__ == "__main__":
    main()
