"""A vLLM engine that serves recorded loads by its own clock, for comparison with the simulator.

The clock is a `SteadyClock` that skips idle time. Other programs, changes of the machine's speed,
an HTTP server and a client therefore do not affect the comparison, which is about scheduling and
the cost of a step. Run as a script, this module is the engine process of `PacedProcess`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from steady_clock import SteadyClock

if TYPE_CHECKING:
    from vllm_semantic_sched.lab.profiling.live_engine import Step
    from vllm_semantic_sched.policy.profile.formula import EngineProfile

# (sequences, prompt tokens, output tokens, steps between arrivals) of the batches for the fit of
# costs.
_CALIBRATION = (
    *((1, tokens, 1, 0) for tokens in (16, 64, 200, 400)),
    *((1, tokens, 12, 0) for tokens in (32, 300)),
    *((4, tokens, 12, 0) for tokens in (32, 300)),
    *((8, tokens, 12, 0) for tokens in (32, 64, 150, 300)),
    # Prompts arrive while others decode.
    *((12, tokens, 24, 3) for tokens in (32, 64, 150, 300)),
)
_ROUNDS = 2
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@dataclass(frozen=True, slots=True)
class Served:
    """Times of a request in seconds on the engine's clock."""

    arrival: float
    first_token: float
    finish: float


@dataclass(frozen=True, slots=True)
class Service:
    """The requests of a load in order, its steps and the number of preemptions."""

    served: list[Served]
    steps: list[Step]
    preemptions: int


@dataclass(frozen=True, slots=True)
class Costs:
    """Cost of a step, and seconds per arrival."""

    profile: EngineProfile
    arrival: float

    def times(self, factor: float) -> Costs:
        """Return the costs on a machine that is `factor` times slower."""
        return Costs(self.profile.scaled(factor, factor, factor), factor * self.arrival)

    def pace(self, steps: Sequence[Step]) -> float:
        """Return the time of `steps` relative to these costs."""
        return sum(one.seconds for one in steps) / self.seconds(steps)

    def seconds(self, steps: Sequence[Step]) -> float:
        """Return the estimated time of all `steps` in seconds."""
        return sum(self.profile.step(one.batch) for one in steps)


def fit_costs(base: EngineProfile, steps: Sequence[Step], arrivals: Sequence[float]) -> Costs:
    """Fit measured steps and arrivals; `base` gives the costs that were not measured."""
    from vllm_semantic_sched.lab.profiling.fit import fit_profile

    profile, pace = fit_profile(base, steps)
    return Costs(profile, pace * float(np.mean(arrivals)))


class PacedEngine:
    """A vLLM engine in this process.

    Args:
        options: of `vllm serve`: a model, then engine options.
        policy, profile: files of the SemanticScheduler.
        unit: see `SteadyClock`.
        logs: the policy has an event log, which goes by this engine's clock; prefixes are cached.

    Attributes:
        base: the profile as given.
        clock: times all steps.
    """

    def __init__(
        self, options: Sequence[str], policy: str, profile: str, unit: float | None, logs: bool
    ) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.llm_engine import LLMEngine

        from vllm_semantic_sched.policy.profile.formula import load_profile

        parser: Any = FlexibleArgumentParser(prog="vLLM", add_help=False)  # type: ignore[no-untyped-call]
        EngineArgs.add_cli_args(parser)
        given = ["--model", *options]
        arguments = EngineArgs.from_cli_args(parser.parse_args(given))
        arguments.scheduler_cls = "vllm_semantic_sched.SemanticScheduler"
        arguments.additional_config = {"semantic_sched": {"policy": policy, "profile": profile}}
        arguments.disable_log_stats = True
        arguments.enable_prefix_caching = logs  # else prompts are random
        self._engine = LLMEngine.from_engine_args(arguments)
        self._scheduler: Any = self._engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
        self.base = load_profile(profile)
        self._random = np.random.default_rng(0)
        self._sequence = 0
        self.clock = SteadyClock(unit)
        self._batches: list[Any] = []
        self._preempted = 0
        self._watch()
        self._logs = logs
        if logs:
            self._log_by_this_clock()

    @property
    def shape(self) -> dict[str, int]:
        """Number of seats, token budget, block size and KV blocks."""
        scheduler = self._scheduler
        return {
            "seats": int(scheduler.max_num_running_reqs),
            "token_budget": int(scheduler.max_num_scheduled_tokens),
            "block_size": int(scheduler.block_size),
            # One is vLLM's null block.
            "kv_blocks": int(scheduler.kv_cache_manager.block_pool.num_gpu_blocks) - 1,
        }

    def calibrate(self) -> tuple[list[Step], list[float]]:
        """Measure steps of many kinds; returns them and the seconds of each arrival."""
        steps: list[Step] = []
        arrivals: list[float] = []
        for _ in range(_ROUNDS):
            for place in self._random.permutation(len(_CALIBRATION)):
                count, prompt, output, apart = _CALIBRATION[place]
                arrived = number = 0
                while arrived < count or self._engine.has_unfinished_requests():
                    while arrived < count and number >= arrived * apart:
                        start = self.clock.now()
                        self._add(prompt, output, 0)
                        arrivals.append(self.clock.now() - start)
                        arrived += 1
                    steps += self._step()[1]
                    number += 1
        return steps, arrivals

    def serve(self, requests: Sequence[dict[str, Any]]) -> Service:
        """Serve requests as they arrive.

        Args:
            requests: `arrival`, `prompt_tokens`, `output_tokens`, `level`, by arrival.
        """
        steps: list[Step] = []
        self._preempted = 0
        if self._logs:
            self._end_log()
        begin = self.clock.now()

        def passed() -> float:
            return self.clock.now() - begin

        names: dict[str, int] = {}
        first: dict[int, float] = {}
        finish: dict[int, float] = {}
        place = 0
        while place < len(requests) or self._engine.has_unfinished_requests():
            while place < len(requests) and requests[place]["arrival"] <= passed():
                request = requests[place]
                name = self._add(
                    request["prompt_tokens"],
                    request["output_tokens"],
                    request["level"],
                    request.get("prefix", (0, 0)),
                )
                if self._logs:  # vLLM's input thread sees it while a step runs
                    job = next(reversed(self._scheduler.jobs.values()))
                    job.came = begin + request["arrival"]
                names[name] = place
                place += 1
            if not self._engine.has_unfinished_requests():
                self.clock.skip(max(0.0, requests[place]["arrival"] - passed()))
                continue
            outputs, step = self._step()
            steps += step
            if self._logs:
                self._scheduler.gauges()
            for output in outputs:
                index = names[output.request_id]
                first.setdefault(index, passed())
                if output.finished:
                    finish[index] = passed()
        served = [
            Served(request["arrival"], first[index], finish[index])
            for index, request in enumerate(requests)
        ]
        if self._logs:
            self._end_log()
        return Service(served, steps, self._preempted)

    def _log_by_this_clock(self) -> None:
        """Let the scheduler and its event log read this engine's clock."""
        from vllm_semantic_sched.engine import scheduler
        from vllm_semantic_sched.engine.metrics import event_log

        now = self.clock.now
        read = SimpleNamespace(time=now, monotonic=now, perf_counter=now)
        vars(scheduler)["time"] = vars(event_log)["time"] = read
        self._scheduler.clock.seconds = now

    def _end_log(self) -> None:
        """Wait until the log has all lines so far, and rename its file to PATH.1."""
        from vllm_semantic_sched.engine.metrics.gauges import describe

        log = self._scheduler._event_log
        log.engine(lambda: describe(self._scheduler), float("inf"))
        while log._events:
            time.sleep(0.05)
        time.sleep(0.3)
        log.file.doRollover()

    def _step(self) -> tuple[list[Any], list[Step]]:
        """Run a step of the engine; returns its output and, if it computed anything, its cost."""
        from vllm_semantic_sched.lab.profiling.live_engine import Step

        self._batches.clear()
        self.clock.adjust()
        start = self.clock.now()
        outputs = self._engine.step()
        seconds = self.clock.now() - start
        computed = self._batches and self._batches[0].sequences
        return outputs, [Step(self._batches[0], seconds)] if computed else []

    def _add(
        self,
        prompt_tokens: int,
        output_tokens: int,
        level: int,
        prefix: tuple[int, int] = (0, 0),
    ) -> str:
        """Send a request.

        Args:
            prefix: the prompt begins with so many tokens (second) of this beginning (first).
        """
        from vllm import SamplingParams

        self._sequence += 1
        params = SamplingParams(
            temperature=0.0,
            max_tokens=output_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={"urgency": level},
        )
        which, shared = prefix
        tokens = np.random.default_rng(which).integers(10, 200, shared).tolist()
        tokens += self._random.integers(10, 200, prompt_tokens - shared).tolist()
        name = str(self._sequence)
        self._engine.add_request(name, {"prompt_token_ids": tokens}, params)
        return name

    def _watch(self) -> None:
        from vllm_semantic_sched.engine.clock import batch_of

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


def serve_load(
    engine: PacedEngine, requests: Sequence[dict[str, Any]], unit: float | None = None
) -> dict[str, Any]:
    """Serve a load between two calibrations.

    Args:
        requests: as for `PacedEngine.serve`, but arrivals are in units of `unit` seconds.
        unit: by default the time that the engine needs for all of them.

    Returns:
        The engine's shape, the requests with arrivals in seconds, their times, preemptions, and
        the costs: `profile` and `seconds_per_arrival` are measured before and after the load and
        multiplied by the load's `pace` (1 if its steps took as long as those before and after).
    """
    steps, arrivals = engine.calibrate()
    needed = unit or _seconds_needed(engine, fit_costs(engine.base, steps, arrivals), requests)
    timed = [request | {"arrival": request["arrival"] * needed} for request in requests]
    service = engine.serve(timed)
    more_steps, more_arrivals = engine.calibrate()
    costs = fit_costs(engine.base, steps + more_steps, arrivals + more_arrivals)
    pace = costs.pace(service.steps)
    costs = costs.times(pace)
    return {
        "shape": engine.shape,
        "profile": costs.profile.model_dump(mode="json"),
        "seconds_per_arrival": costs.arrival,
        "pace": pace,
        "unit": needed,
        "requests": timed,
        "served": [[one.arrival, one.first_token, one.finish] for one in service.served],
        "preemptions": service.preemptions,
    }


def _seconds_needed(engine: PacedEngine, costs: Costs, requests: Sequence[dict[str, Any]]) -> float:
    """Time that a full batch needs for all requests."""
    from vllm_semantic_sched.policy.profile.formula import Batch

    seats = engine.shape["seats"]
    decode = sum(request["output_tokens"] for request in requests) / seats
    mean = int(np.mean([r["prompt_tokens"] + r["output_tokens"] / 2 for r in requests]))
    prefills = Batch()
    for request in requests:
        prefills.add_prefill(0, request["prompt_tokens"])
    full = Batch(decodes=seats, context=seats * mean)
    return decode * costs.profile.step(full) + costs.profile.step_prefill(prefills)


class EngineFailed(RuntimeError):
    """The engine did not start or ended by itself. The message quotes the end of its log."""


class PacedProcess:
    """A `PacedEngine` in another process; runs as long as a `with` block lasts.

    Args:
        options, policy, profile, unit, logs: as for `PacedEngine`.

    Attributes:
        unit: of its clock.

    Raises:
        EngineFailed: the engine did not start, or ended by itself.
    """

    def __init__(
        self,
        options: Sequence[str],
        policy: str,
        profile: str,
        unit: float | None,
        logs: bool = False,
    ) -> None:
        settings = [policy, profile, json.dumps(unit), json.dumps(logs)]
        self._command = [sys.executable, __file__, *settings, *options]

    def __enter__(self) -> PacedProcess:
        self._log = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | _ENVIRONMENT,
            text=True,
        )
        try:
            self.unit: float = self._answer()["unit"]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def serve(
        self, requests: Sequence[dict[str, Any]], unit: float | None = None
    ) -> dict[str, Any]:
        """See `serve_load`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer is reported below
            self._process.stdin.write(json.dumps([requests, unit]) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            raise EngineFailed(f"the engine ended with {code}:\n{self._log.read()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def main() -> None:
    """Start an engine, then serve the load in each line of stdin.

    Writes one line of JSON to stdout after the start and after each load.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # anything else that is printed goes to the log
    policy, profile, unit, logs, *options = sys.argv[1:]
    engine = PacedEngine(options, policy, profile, json.loads(unit), json.loads(logs))
    engine.calibrate()  # the first steps are slower
    answer: dict[str, Any] = {"unit": engine.clock.unit}
    while True:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        line = sys.stdin.readline()
        if not line:
            return
        answer = serve_load(engine, *json.loads(line))


if __name__ == "__main__":
    main()
