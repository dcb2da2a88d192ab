"""Runs the real engine with a small model in processes of its own, one after another, and writes
what was recorded: python -m parity.record_engine MODEL OUT ENGINES, where ENGINES is a JSON list of
`EngineCase`s. OUT gets a list of recordings per engine."""

import json
import multiprocessing
import pickle
import random
import sys
from dataclasses import dataclass
from pathlib import Path

from async_engine import schedule_asynchronously
from vllm import LLM, SamplingParams

import vllm_semantic_sched.engine.requests.prediction
import vllm_semantic_sched.engine.scheduler
from vllm_semantic_sched import SemanticScheduler
from vllm_semantic_sched.engine.clock import ServiceClock
from vllm_semantic_sched.policy.config import load_policy
from vllm_semantic_sched.policy.profile.formula import AUTO

from .recording import Recording, ScriptedInstant, ScriptedPredictor, VirtualTime, record

REQUESTS = 48
TENANTS = ("", "a", "b")
SWAP = {
    "kv_connector": "SemanticSwapConnector",
    "kv_connector_module_path": "vllm_semantic_sched.engine.kv_swap",
    "kv_role": "kv_producer",
    "kv_connector_extra_config": {"host_gib": 0.005},
}


@dataclass
class EngineCase:
    """An engine and what it serves, one after another.

    Attributes:
        policies: paths or shipped names.
    """

    asynchronous: bool
    swap: bool
    policies: list[str]


def main() -> None:
    model, out, engines = sys.argv[1:]
    recordings = []
    # A new process for each engine, forked after the imports, which take longer than the start.
    context = multiprocessing.get_context("fork")
    for number, fields in enumerate(json.loads(engines)):
        part = Path(f"{out}.{number}")
        process = context.Process(target=run_engine, args=(model, EngineCase(**fields), part))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)
        recordings.append(pickle.loads(part.read_bytes()))
    Path(out).write_bytes(pickle.dumps(recordings))


def run_engine(model: str, case: EngineCase, out: Path) -> None:
    time = VirtualTime()
    vllm_semantic_sched.engine.requests.prediction.PredictionService = ScriptedPredictor
    vllm_semantic_sched.engine.requests.prediction.InstantReader = ScriptedInstant
    vllm_semantic_sched.engine.scheduler.ServiceClock = lambda: ServiceClock(time)
    if case.asynchronous:
        schedule_asynchronously()
    llm = LLM(
        model,
        additional_config={"semantic_sched": {"policy": case.policies[0]}},
        scheduler_cls="vllm_semantic_sched.SemanticScheduler",
        kv_transfer_config=SWAP if case.swap else None,
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
    out.write_bytes(pickle.dumps([run(llm, time, policy) for policy in case.policies]))


def run(llm: LLM, time: VirtualTime, policy: str) -> Recording:
    """Serve the same requests under a policy, on the model that is loaded already."""
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    old = core.scheduler
    settings = {"policy": policy}
    if load_policy(policy).profile == AUTO:  # the replay knows neither model nor device
        settings["profile"] = "default"
    old.vllm_config.additional_config["semantic_sched"] = settings
    core.scheduler = scheduler = SemanticScheduler(
        vllm_config=old.vllm_config,
        kv_cache_config=old.kv_cache_config,
        structured_output_manager=old.structured_output_manager,
        block_size=old.block_size,
        log_stats=old.log_stats,
    )
    ours = isinstance(scheduler, SemanticScheduler)  # the policy `fcfs` gives vLLM's own
    recording = record(scheduler, policy) if ours else Recording(policy)
    rng = random.Random(3)
    sent = 0
    while sent < REQUESTS or engine.has_unfinished_requests():
        for _ in range(rng.choice([0, 0, 0, 1, 1])):
            if sent < REQUESTS:
                send(engine, str(sent), random.Random(sent))
                sent += 1
        for output in engine.step():
            answer = output.outputs[0]
            if answer.finish_reason == "length":
                recording.answers[output.request_id] = tuple(answer.token_ids)
        time.now += rng.choice([0.02, 0.05, 0.3, 1.0, 2.0])
    if ours:
        assert scheduler.counters.total("policy_errors") == 0
        scheduler.gauges()  # brings the counters up to date
        recording.counters = {
            "_".join((name, *labels)): total
            for (name, labels), total in scheduler.counters.totals.items()
        }
    return recording


def send(engine, request_id: str, rng: random.Random) -> None:
    extra = {"tenant": rng.choice(TENANTS)}
    if rng.random() < 0.5:
        extra["urgency"] = rng.randint(0, 4)
    if rng.random() < 0.45:
        extra["dedup_key"] = rng.choice("xy")
    prompt = [rng.randint(5, 500) for _ in range(rng.choice([10, 40, 100, 300]))]
    params = SamplingParams(
        temperature=0.0, max_tokens=rng.randint(2, 40), ignore_eos=True, extra_args=extra
    )
    engine.add_request(request_id, {"prompt_token_ids": prompt}, params)


if __name__ == "__main__":
    main()
