"""A vLLM engine in this process that serves a recorded load by its own clock, for comparison with
the simulator. Run as a module: reads a job as JSON from a file, writes what it measured.

The clock counts the CPU time of this process, and jumps over the time in which nothing is to do.
So what other programs take of the machine, and a client and a server in front of the engine, are
no part of the comparison: it is one of scheduling and of what a step costs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vllm_semantic_sched.policy.estimates.profile import EngineProfile

# (sequences, prompt tokens, output tokens, steps between their arrivals) of the batches from which
# costs are fitted.
_CALIBRATION = (
    *((1, tokens, 1, 0) for tokens in (16, 64, 200, 400)),
    *((1, tokens, 12, 0) for tokens in (32, 300)),
    *((4, tokens, 12, 0) for tokens in (32, 300)),
    *((8, tokens, 12, 0) for tokens in (32, 64, 150)),
    # Prompts beside answers under way.
    *((12, tokens, 24, 3) for tokens in (32, 64, 150)),
)
_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Served:
    """A request as it was served: seconds on the engine's clock."""

    arrival: float
    first_token: float
    finish: float


class PacedEngine:
    """Args:
    options: as after `vllm serve`: a model, then engine options.
    policy, profile: files of the SemanticScheduler.

    Attributes:
        base: the profile as given.
    """

    def __init__(self, options: Sequence[str], policy: str, profile: str) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.llm_engine import LLMEngine

        from vllm_semantic_sched.policy.estimates.profile import load_profile

        parser: Any = FlexibleArgumentParser(prog="vLLM", add_help=False)  # type: ignore[no-untyped-call]
        EngineArgs.add_cli_args(parser)
        given = ["--model", *options]
        arguments = EngineArgs.from_cli_args(parser.parse_args(given))
        arguments.scheduler_cls = "vllm_semantic_sched.SemanticScheduler"
        arguments.additional_config = {"semantic_sched": {"policy": policy, "profile": profile}}
        arguments.disable_log_stats = True
        arguments.enable_prefix_caching = False  # prompts are random; the simulator has none
        self._engine = LLMEngine.from_engine_args(arguments)
        self._scheduler: Any = self._engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
        self.base = load_profile(profile)
        self._random = np.random.default_rng(0)
        self._sequence = 0
        self._skipped = 0.0
        self._batches: list[Any] = []
        self._preempted = 0
        self._watch()

    @property
    def shape(self) -> dict[str, int]:
        """Seats, token budget, block size and KV blocks."""
        scheduler = self._scheduler
        return {
            "seats": int(scheduler.max_num_running_reqs),
            "token_budget": int(scheduler.max_num_scheduled_tokens),
            "block_size": int(scheduler.block_size),
            # One is vLLM's null block.
            "kv_blocks": int(scheduler.kv_cache_manager.block_pool.num_gpu_blocks) - 1,
        }

    def calibrate(self) -> dict[str, Any]:
        """What a step and an arrival cost now."""
        from vllm_semantic_sched.profiling.fit import fit_steps
        from vllm_semantic_sched.profiling.live_engine import Step

        steps, arrivals = [], []
        for _ in range(_ROUNDS):
            for place in self._random.permutation(len(_CALIBRATION)):
                count, prompt, output, apart = _CALIBRATION[place]
                arrived = number = 0
                while arrived < count or self._engine.has_unfinished_requests():
                    while arrived < count and number >= arrived * apart:
                        start = time.process_time()
                        self._add(prompt, output, 0)
                        arrivals.append(time.process_time() - start)
                        arrived += 1
                    self._batches.clear()
                    start = time.process_time()
                    self._engine.step()
                    seconds = time.process_time() - start
                    number += 1
                    if self._batches and self._batches[0].sequences:
                        steps.append(Step(self._batches[0], seconds))
        fit = fit_steps(steps)
        costs = {"alpha1": fit.alpha1, "alpha2": fit.alpha2, "batch": fit.batch.model_dump()}
        profile = with_costs(self.base, costs)
        # The fit is robust: slow steps hardly count. In a load they do.
        slow = sum(step.seconds for step in steps) / sum(profile.step(step.batch) for step in steps)
        return {
            "alpha1": slow * fit.alpha1,
            "alpha2": slow * fit.alpha2,
            "batch": {name: slow * term for name, term in costs["batch"].items()},
            "arrival": float(np.mean(arrivals)),
            "residual": fit.residual.median,
        }

    def serve(self, requests: Sequence[dict[str, Any]]) -> tuple[list[Served], int]:
        """Serve requests as they arrive; and how often one was preempted.

        Args:
            requests: `arrival`, `prompt_tokens`, `output_tokens`, `level`, by arrival.
        """
        self._skipped = -time.process_time()
        self._preempted = 0
        names: dict[str, int] = {}
        first: dict[int, float] = {}
        finish: dict[int, float] = {}
        place = 0
        while place < len(requests) or self._engine.has_unfinished_requests():
            while place < len(requests) and requests[place]["arrival"] <= self._now():
                request = requests[place]
                name = self._add(
                    request["prompt_tokens"], request["output_tokens"], request["level"]
                )
                names[name] = place
                place += 1
            if not self._engine.has_unfinished_requests():
                self._skipped += max(0.0, requests[place]["arrival"] - self._now())
                continue
            for output in self._engine.step():
                index = names[output.request_id]
                first.setdefault(index, self._now())
                if output.finished:
                    finish[index] = self._now()
        served = [
            Served(request["arrival"], first[index], finish[index])
            for index, request in enumerate(requests)
        ]
        return served, self._preempted

    def _now(self) -> float:
        return time.process_time() + self._skipped

    def _add(self, prompt_tokens: int, output_tokens: int, level: int) -> str:
        from vllm import SamplingParams

        self._sequence += 1
        params = SamplingParams(
            temperature=0.0,
            max_tokens=output_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={"urgency": level},
        )
        tokens = self._random.integers(10, 200, prompt_tokens).tolist()
        name = str(self._sequence)
        self._engine.add_request(name, {"prompt_token_ids": tokens}, params)
        return name

    def _watch(self) -> None:
        from vllm_semantic_sched.engine.step_clock import batch_of

        scheduler = self._scheduler
        schedule, preempt = scheduler.schedule, scheduler._preempt_request

        def watched_schedule(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._batches.append(batch_of(output, scheduler.requests))
            return output

        def watched_preempt(*args: Any, **kwargs: Any) -> Any:
            self._preempted += 1
            return preempt(*args, **kwargs)

        scheduler.schedule = watched_schedule
        scheduler._preempt_request = watched_preempt


def with_costs(base: EngineProfile, costs: dict[str, Any]) -> EngineProfile:
    """A profile with the costs that `PacedEngine.calibrate` measured."""
    return base.model_copy(
        update={
            "alpha1": costs["alpha1"],
            "alpha2": costs["alpha2"],
            "batch": base.batch_terms.model_copy(update=costs["batch"]),
        }
    )


def run_job(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Serve each load of a job.

    Args:
        job: `options`, `policy`, `profile`, and `loads`: name to requests whose arrivals are in
            units of the time that the engine needs for all of them.

    Yields:
        Per load: its name, the engine's shape, costs before and after it, requests with arrivals
        in seconds, what was served, preemptions.
    """
    from vllm_semantic_sched.policy.estimates.batch import Batch

    engine = PacedEngine(job["options"], job["policy"], job["profile"])
    engine.calibrate()  # what is slower the first time
    for name, requests in job["loads"].items():
        costs = engine.calibrate()
        profile = with_costs(engine.base, costs)
        seats = engine.shape["seats"]
        decode = sum(request["output_tokens"] for request in requests) / seats
        mean = int(np.mean([r["prompt_tokens"] + r["output_tokens"] / 2 for r in requests]))
        needed = decode * profile.step(Batch(decodes=seats, context=seats * mean)) + sum(
            profile.prefill(0, request["prompt_tokens"]) for request in requests
        )
        timed = [request | {"arrival": request["arrival"] * needed} for request in requests]
        served, preempted = engine.serve(timed)
        yield {
            "name": name,
            "shape": engine.shape,
            "costs": [costs, engine.calibrate()],
            "requests": timed,
            "served": [[one.arrival, one.first_token, one.finish] for one in served],
            "preemptions": preempted,
        }


def main() -> None:
    """Carry out the job in the file named first; results, a line each, go to the second."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with Path(sys.argv[2]).open("w", encoding="utf-8") as out:
        for result in run_job(job):
            out.write(json.dumps(result) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
