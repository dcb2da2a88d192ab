"""Runs the real engine with a small model in this process, once per policy, and writes what was
recorded: python -m parity.record_engine MODEL OUT POLICY..."""

from __future__ import annotations

import pickle
import random
import sys
from pathlib import Path

from vllm import LLM, SamplingParams

import vllm_semantic_sched.engine.prediction
import vllm_semantic_sched.engine.scheduler
from vllm_semantic_sched.engine.clock import ServiceClock

from .recording import Recording, ScriptedInstant, ScriptedPredictor, VirtualTime, record

REQUESTS = 60
TENANTS = ("", "a", "b")


def main() -> None:
    model, out, *policies = sys.argv[1:]
    time = VirtualTime()
    vllm_semantic_sched.engine.prediction.PredictionService = ScriptedPredictor
    vllm_semantic_sched.engine.prediction.InstantReader = ScriptedInstant
    vllm_semantic_sched.engine.scheduler.ServiceClock = lambda: ServiceClock(time)
    llm = LLM(
        model,
        additional_config={"semantic_sched": {"policy": policies[0]}},
        scheduler_cls="vllm_semantic_sched.SemanticScheduler",
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=512,
        max_num_seqs=6,
        max_num_batched_tokens=512,
        gpu_memory_utilization=0.7,
        kv_cache_memory_bytes=2**28,
        num_gpu_blocks_override=22,
        block_size=32,
    )
    Path(out).write_bytes(pickle.dumps([run(llm, policy, time) for policy in policies]))


def run(llm: LLM, policy: str, time: VirtualTime) -> Recording:
    """Serve one load under a policy, on the model that is loaded already."""
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    old = core.scheduler
    old.vllm_config.additional_config["semantic_sched"]["policy"] = policy
    core.scheduler = scheduler = type(old)(
        vllm_config=old.vllm_config,
        kv_cache_config=old.kv_cache_config,
        structured_output_manager=old.structured_output_manager,
        block_size=old.block_size,
        log_stats=old.log_stats,
    )
    recording = record(scheduler, policy)
    rng = random.Random(3)
    sent = 0
    while sent < REQUESTS or engine.has_unfinished_requests():
        for _ in range(rng.choice([0, 0, 0, 1, 1])):
            if sent < REQUESTS:
                send(engine, f"{policy}{sent}", rng)
                sent += 1
        engine.step()
        time.now += rng.choice([0.02, 0.05, 0.3, 1.0, 2.0])
    assert scheduler.counters.total("policy_errors") == 0
    return recording


def send(engine, request_id: str, rng: random.Random) -> None:
    extra = {"tenant": rng.choice(TENANTS)}
    if rng.random() < 0.5:
        extra["urgency"] = rng.randint(0, 4)
    if rng.random() < 0.2:
        extra["dedup_key"] = rng.choice("xyz")
    prompt = [rng.randint(5, 500) for _ in range(rng.choice([10, 40, 100, 300]))]
    params = SamplingParams(
        temperature=0.0, max_tokens=rng.randint(2, 40), ignore_eos=True, extra_args=extra
    )
    engine.add_request(request_id, {"prompt_token_ids": prompt}, params)


if __name__ == "__main__":
    main()
