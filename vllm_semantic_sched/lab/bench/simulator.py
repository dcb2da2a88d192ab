"""Time and memory of the simulator by number of requests."""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SCENARIO = "speed"
"""The scenario that is measured by default."""


@dataclass(frozen=True, slots=True)
class Speed:
    """One run: CPU seconds, engine steps, and the peak memory of its process."""

    requests: int
    seconds: float
    steps: int
    mebibytes: float

    @property
    def microseconds(self) -> float:
        """CPU time per request."""
        return self.seconds / self.requests * 1e6


def measure(sizes: Sequence[int], scenario: str = SCENARIO) -> list[Speed]:
    """Simulate `scenario` at each size, each in a new process with its own peak memory."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1, maxtasksperchild=1) as pool:
        return [pool.apply(_measure_one, (size, scenario)) for size in sizes]


def _measure_one(requests: int, name: str) -> Speed:
    from vllm_semantic_sched.sim.metrics import Recorder
    from vllm_semantic_sched.sim.scenario import load_scenarios
    from vllm_semantic_sched.sim.simulation import simulate

    scenario = load_scenarios(name, {"workload.requests": requests})[0]
    scheduler = next(iter(scenario.policies))
    recorder = Recorder(scenario.slos(scheduler))
    start = time.process_time()
    steps = simulate(scenario, scheduler, finished=recorder.add).steps
    recorder.levels()
    seconds = time.process_time() - start
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux starts ru_maxrss from the parent's value, so read the peak of this process.
    if (status := Path("/proc/self/status")).is_file():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        kibibytes = int(line.split()[1])
    return Speed(requests, seconds, steps, kibibytes / 1024)
