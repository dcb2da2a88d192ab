"""Serves the same requests under one scheduler, step by step in this process, and writes what each
was answered: 12 requests without urgency fill 8 seats, then 5 urgent ones come. The benchmark's
logits processor ends each answer at its length.

Which scheduler served them, and in what order, must not change an answer.
"""

import argparse
import json
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEDULERS = ("fcfs", "ours", "swap")
"""vLLM's; ours, which computes the KV of preempted requests again; ours, which swaps all of it."""
URGENT = 5
_OTHERS = 12
_SEATS = 8
_TOKENS = range(10, 4000)  # token ids of prompts
_END = 2  # the models' end token
_SPARE = 16  # tokens beyond the longest answer


@dataclass(frozen=True)
class Request:
    """What is asked: prompt and answer in tokens."""

    name: str
    prompt: list[int] = field(repr=False)
    answer: int
    urgency: int


def draw_requests(scale: float) -> list[Request]:
    """The requests, always the same; `scale` multiplies lengths."""
    chance = random.Random(3)
    requests = []
    for index in range(_OTHERS + URGENT):
        urgent = index >= _OTHERS
        longest = 200 if urgent else 400
        prompt = 4 + int(scale * chance.randrange(40, longest))
        answer = 2 + int(scale * (40 if urgent else chance.randrange(60, 160)))
        name = f"urgent{index - _OTHERS}" if urgent else f"other{index}"
        tokens = [chance.choice(_TOKENS) for _ in range(prompt)]
        urgency = 0 if urgent else 4
        requests.append(Request(name, tokens, answer, urgency))
    return requests


def policy(swap: bool) -> dict[str, Any]:
    """The default policy, told the urgency. By its cost, KV of a small model is never swapped."""
    from vllm_semantic_sched.policy.config.files import read_config

    data, _ = read_config("ems", kind="policy")
    data |= {"predictor": {"enabled": False}}
    if swap:
        data |= {"retention": {"mode": "swap"}}
    return dict(data)


def engine_arguments(scheduler: str, model: Path, out: Path, given: dict[str, Any]) -> Any:
    """The arguments of vLLM's `LLM`; a policy is written beside `out`."""
    from vllm_semantic_sched.engine.startup.settings import SWAP_CONNECTOR
    from vllm_semantic_sched.lab.bench.server import ANSWER_LENGTH

    arguments: dict[str, Any] = {
        "model": str(model),
        "max_model_len": 1024,
        "max_num_seqs": _SEATS,
        "max_num_batched_tokens": 256,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 256 * 2**20,
        "disable_log_stats": False,
        "logits_processors": [ANSWER_LENGTH],
    }
    if scheduler != "fcfs":
        path = out.with_suffix(".policy.json")  # JSON is YAML
        path.write_text(json.dumps(policy(scheduler == "swap")))
        arguments["scheduler_cls"] = "vllm_semantic_sched.SemanticScheduler"
        arguments["additional_config"] = {"semantic_sched": {"policy": str(path)}}
    if scheduler == "swap":
        extra = {"kv_connector_extra_config": {"host_gib": 0.25}}
        arguments["kv_transfer_config"] = SWAP_CONNECTOR | extra
    return arguments | given


def serve(engine: Any, requests: list[Request], before_urgent: int) -> dict[str, Any]:
    """Run all requests; urgent ones come after so many steps. Tokens by request, the order in which
    they ended, those that ended at another length, number of steps, and their median in seconds."""
    from vllm import SamplingParams

    from vllm_semantic_sched.lab.bench.workload import ANSWER_FIELD

    longest = max(request.answer for request in requests) + _SPARE
    tokens: dict[str, list[int]] = {}
    seconds: list[float] = []

    def add(request: Request) -> None:
        params = SamplingParams(
            temperature=0,
            max_tokens=longest,
            detokenize=False,
            extra_args={"urgency": request.urgency, ANSWER_FIELD: [request.answer, _END]},
        )
        engine.add_request(request.name, {"prompt_token_ids": request.prompt}, params)

    def step() -> None:
        begin = time.perf_counter()
        for output in engine.step():
            if output.finished:
                # vLLM appends a part of its own to the name.
                name = output.request_id.partition("-")[0]
                tokens[name] = list(output.outputs[0].token_ids)
        seconds.append(time.perf_counter() - begin)

    for request in requests:
        if request.urgency:
            add(request)
    for _ in range(before_urgent):
        step()
    for request in requests:
        if not request.urgency:
            add(request)
    while engine.has_unfinished_requests():
        step()
    wrong = [request.name for request in requests if len(tokens[request.name]) != request.answer]
    return {
        "tokens": tokens,
        "order": list(tokens),
        "wrong_lengths": wrong,
        "steps": len(seconds),
        "step": sorted(seconds)[len(seconds) // 2],
    }


def describe(engine: Any) -> dict[str, Any]:
    """What vLLM chose, and what our scheduler counted, if it is ours."""
    import torch

    config = engine.vllm_config
    scheduler = engine.engine_core.engine_core.scheduler
    counters = getattr(scheduler, "counters", None)
    totals = counters.totals.items() if counters is not None else ()
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "attention": getattr(config.attention_config.backend, "name", "attention as vLLM chooses"),
        "runner": 2 if config.use_v2_model_runner else 1,
        "asynchronous": bool(config.scheduler_config.async_scheduling),
        "graphs": str(config.compilation_config.cudagraph_mode),
        "counters": {" ".join((name, *labels)): value for (name, labels), value in totals if value},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("out", type=Path, help="JSON file to write")
    add("scheduler", choices=SCHEDULERS)
    add("model", type=Path)
    add("--engine", type=json.loads, default={}, help="more arguments of vLLM's LLM, as JSON")
    add("--scale", type=float, default=1.0, help="of all lengths (%(default)s)")
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    begin = time.perf_counter()
    llm = LLM(**engine_arguments(args.scheduler, args.model, args.out, args.engine))
    started = time.perf_counter() - begin
    engine = llm.llm_engine
    served = serve(engine, draw_requests(args.scale), max(4, int(30 * args.scale)))
    served |= {"scheduler": args.scheduler, "started": started} | describe(engine)
    args.out.write_text(json.dumps(served))
    print({name: value for name, value in served.items() if name != "tokens"})


if __name__ == "__main__":
    main()
