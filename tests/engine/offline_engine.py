"""Runs offline engines with `SemanticScheduler`, one after another, and prints a line of JSON for
each; started by test_offline.py.

    python offline_engine.py MODEL POLICY MODE...

MODE is `in turn` or `asynchronous`.
"""

import json
import os
import sys
import time
from typing import Any

from async_engine import schedule_asynchronously
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from vllm_semantic_sched import refusal_of

HINTS = [4, 0, None, {"nested": [1]}, "abc", -1, [0], 99]


def make_engine(model: str, policy: str, asynchronous: bool) -> LLM:
    if asynchronous:
        schedule_asynchronously()
    return LLM(
        model,
        additional_config={"semantic_sched": {"policy": policy}},
        scheduler_cls="vllm_semantic_sched.SemanticScheduler",
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=2,
        gpu_memory_utilization=0.7,
        kv_cache_memory_bytes=2**28,
        num_gpu_blocks_override=64,
        block_size=32,
        async_scheduling=asynchronous,
    )


def answers_to_hints(llm: LLM) -> list[list[int]]:
    params = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, extra_args={"urgency": hint})
        for hint in HINTS
    ]
    answers = llm.generate(["tell me about rain"] * len(HINTS), params, use_tqdm=False)
    return [answer.outputs[0].token_ids for answer in answers]


def choose_despite_preemptions(llm: LLM) -> list[str]:
    """What two requests with a grammar answer that urgent ones preempt."""
    urgent = SamplingParams(max_tokens=5, ignore_eos=True, extra_args={"urgency": 0})
    either = StructuredOutputsParams(choice=[name * 20 for name in ("yes", "no")])
    choices = SamplingParams(
        temperature=0, max_tokens=60, extra_args={"urgency": 4}, structured_outputs=either
    )
    engine, chosen = llm.llm_engine, []
    for name in ("a", "b"):
        engine.add_request(name, "is it raining", choices)
    # Their grammar compiles on another thread, so count their tokens rather than the steps.
    tokens, arrivals, deadline = {}, [3, 6], time.monotonic() + 120
    while engine.has_unfinished_requests() and time.monotonic() < deadline:
        for output in engine.step():
            tokens[output.request_id] = len(output.outputs[0].token_ids)
            if output.finished and output.request_id in ("a", "b"):
                chosen.append(output.outputs[0].text)
        if arrivals and min(tokens.get("a", 0), tokens.get("b", 0)) >= arrivals[0]:
            engine.add_request(f"urgent {arrivals.pop(0)}", "help", urgent)
    return chosen


def predict_one(llm: LLM, scheduler: Any) -> None:
    """Answer until a prompt was read. The process that reads has the lowest priority: on a busy
    machine it starts only while this one sleeps, and short answers can end before their prompts are
    read."""
    deadline, unhinted = time.monotonic() + 200, SamplingParams(max_tokens=200, ignore_eos=True)
    while not scheduler.predictions.ready and time.monotonic() < deadline:
        time.sleep(0.1)
    while not scheduler.counters.total("predictions") and time.monotonic() < deadline:
        llm.generate("tell me about snow", unhinted, use_tqdm=False)
        time.sleep(0.1)


def report(model: str, policy: str, mode: str) -> dict[str, Any]:
    llm = make_engine(model, policy, mode == "asynchronous")
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    count = scheduler.counters.total
    tokens = answers_to_hints(llm)
    # The least urgent one has a seat before the others arrive, and is preempted.
    before = count("preemptions")
    chosen = choose_despite_preemptions(llm)
    preempted = count("preemptions") - before
    same = SamplingParams(max_tokens=5, ignore_eos=True, extra_args={"dedup_key": "k"})
    older, newer = llm.generate(["first", "second"], same, use_tqdm=False)
    refusal = refusal_of(older)
    predict_one(llm, scheduler)
    return {
        "mode": mode,
        "asynchronous": scheduler.vllm_config.scheduler_config.async_scheduling,
        "chosen": chosen,
        "preempted": preempted,
        "tokens": tokens,
        "invalid": count("invalid_hints"),
        "predicted": count("predictions"),
        "errors": count("policy_errors"),
        "left": len(scheduler.jobs),
        "refused": [refusal.code.value, older.outputs[0].finish_reason, older.finished],
        "served": [refusal_of(newer), len(newer.outputs[0].token_ids)],
    }


def main() -> None:
    model, policy, *modes = sys.argv[1:]
    # A process for each engine, forked after the imports, which take longer than its start.
    for mode in modes:
        child = os.fork()
        if not child:
            print(json.dumps(report(model, policy, mode)), flush=True)
            sys.exit()
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{mode}: the engine's process failed")


if __name__ == "__main__":
    main()
