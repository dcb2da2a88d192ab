"""Counters of a server and CPU time of the machine, read before and after a load."""

from collections.abc import Mapping
from dataclasses import dataclass

import psutil
from prometheus_client.parser import text_string_to_metric_families

from vllm_semantic_sched.lab.bench.server import VllmServer

PREEMPTIONS = "vllm:num_preemptions_total"
STEPS = "vllm:iteration_tokens_total_count"
"""Engine steps that gave at least one token: vLLM observes this histogram once for each."""


@dataclass(frozen=True)
class Usage:
    """Counters at one moment, or their growth between two. CPU seconds: `ours` by process, `busy`
    of all processes of `total`, and `stolen` by the hypervisor while there was work."""

    counters: Mapping[str, float]
    ours: Mapping[str, float]
    busy: float
    stolen: float
    total: float

    @classmethod
    def now(cls, server: VllmServer) -> "Usage":
        """Read a server's counters and the machine's times; a process counts with its children."""
        own = psutil.Process().cpu_times()
        machine = psutil.cpu_times()
        stolen = float(getattr(machine, "steal", 0.0))
        idle = machine.idle + getattr(machine, "iowait", 0.0)
        # Guest time is part of user time and would count twice.
        total = sum(machine) - getattr(machine, "guest", 0.0) - getattr(machine, "guest_nice", 0.0)
        return cls(
            counters=read_counters(server.get_text("/metrics")),
            ours={**server.cpu_seconds(), "client": own.user + own.system},
            busy=total - idle - stolen,
            stolen=stolen,
            total=total,
        )

    def since(self, before: "Usage") -> "Usage":
        """The growth since an earlier moment."""
        return Usage(
            counters=_difference(self.counters, before.counters),
            ours=_difference(self.ours, before.ours),
            busy=self.busy - before.busy,
            stolen=self.stolen - before.stolen,
            total=self.total - before.total,
        )

    @property
    def elsewhere(self) -> float:
        """Share of the machine's CPU time that other programs used."""
        return max(0.0, self.busy - sum(self.ours.values())) / self.total if self.total else 0.0

    @property
    def steal(self) -> float:
        """Share of the machine's CPU time that the hypervisor took away."""
        return self.stolen / self.total if self.total else 0.0

    @property
    def engine_seconds(self) -> float:
        """CPU time of EngineCore and, where they are processes of their own, its workers."""
        return sum(used for name, used in self.ours.items() if name.startswith("VLLM::"))


def read_counters(metrics: str) -> dict[str, float]:
    """Sums over labels of vLLM's preemptions and steps and the scheduler's counters."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics):
        for name, _, value, *_ in family.samples:
            # A gauge has no meaningful difference.
            ours = name.startswith("semsched:") and name.endswith("_total")
            if ours or name in (PREEMPTIONS, STEPS):
                values[name] = values.get(name, 0.0) + value
    return values


def _difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}
