"""What an emulated device did during a load, from the steps that its worker writes down."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LABEL = "emulated device: real vLLM, step times from a profile"
"""Stands wherever a figure of an emulated device is shown."""


@dataclass(frozen=True)
class DeviceUse:
    """Of a window. `tokens`: output tokens per busy second; `idle`: share of the time in which the
    device had nothing to do, around steps of at least half as many requests as the largest one (in
    smaller ones it may wait for arrivals); `host_p50`, `host_p99`: seconds of a step's work on the
    host, from an output to the next submission: update, arrivals, schedule()."""

    tokens: float
    idle: float
    host_p50: float
    host_p99: float


NOTHING = DeviceUse(tokens=math.nan, idle=math.nan, host_p50=math.nan, host_p99=math.nan)


def read_use(trace: Path, begin: float, end: float) -> DeviceUse:
    """Figures of the steps that ended in a window, in seconds of `time.monotonic()`; NaN if there
    were none. The last line may be unfinished."""
    lines = trace.read_text(encoding="utf-8").splitlines() if trace.is_file() else []
    steps = [json.loads(line) for line in lines if line.endswith("}")]
    steps = [step for step in steps if begin <= step["end"] < end]
    if not steps:
        return NOTHING
    half = max(map(_requests, steps)) / 2
    full = [step for step in steps if _requests(step) >= half]
    idle = sum(step["idle"] for step in full)
    p50, p99 = np.percentile([step["host"] for step in steps], [50, 99])
    return DeviceUse(
        tokens=sum(step["sampled"] for step in steps) / _busy(steps),
        idle=idle / (_busy(full) + idle),
        host_p50=float(p50),
        host_p99=float(p99),
    )


def _requests(step: Mapping[str, float]) -> float:
    return step["decodes"] + step["prefills"]


def _busy(steps: Sequence[Mapping[str, float]]) -> float:
    return sum(step["seconds"] + step["waited"] for step in steps)
