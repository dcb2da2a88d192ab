"""What the installed vLLM offers, found by looking at its classes instead of its version, so that a
patched or newer vLLM is used for what it has."""

import dataclasses
from typing import Any, NamedTuple

import vllm.outputs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.metrics.stats import SchedulerStats

# Dictionaries of SchedulerStats that keep any string as a key on their way to the API server, where
# stat logger plugins see them before vLLM's own loggers do. The second lists LoRA adapters.
_CARRIERS = ("num_kv_fetch_reqs_by_stage", "waiting_lora_adapters")


def find_carrier(statistics: Any) -> str | None:
    """The field of vLLM's dataclass SchedulerStats that can carry a message."""
    fields = {field.name for field in dataclasses.fields(statistics)}
    return next((name for name in _CARRIERS if name in fields), None)


CARRIER = find_carrier(SchedulerStats)
"""Of the installed vLLM."""


class Hooks(NamedTuple):
    """Which of the hooks in patches/ this vLLM has. `vllm_api` works around those that it lacks."""

    preempt_for_waiting: bool  # a call at the start of schedule(), and a public way to preempt
    refuse_request: bool  # an output with an HTTP status and Retry-After
    custom_stats: bool  # a field of SchedulerStats
    skip_next_step: bool  # a public way to hold a request
    on_preemption: bool  # a call before a preemption, and connectors that free blocks at once
    utilities: bool  # calls of the scheduler by API servers, and of new requests


def find_hooks(scheduler: type, core: type, stats: type, output: type, error: type | None) -> Hooks:
    """The hooks that vLLM's classes Scheduler, EngineCore, SchedulerStats, EngineCoreOutput and
    RequestError have."""
    return Hooks(
        preempt_for_waiting=hasattr(scheduler, "preempt_for_waiting"),
        refuse_request=hasattr(output, "error") and hasattr(error, "status"),
        custom_stats=hasattr(stats, "custom_stats"),
        skip_next_step=hasattr(scheduler, "skip_next_step"),
        on_preemption=hasattr(scheduler, "on_preemption"),
        utilities=hasattr(core, "call_scheduler"),
    )


REQUEST_ERROR: Any = getattr(vllm.outputs, "RequestError", None)
"""vLLM's class of errors that a request's last output carries; None if it has none."""

HELD_ADAPTERS_COUNT = hasattr(Scheduler, "has_request")
"""Whether vLLM counts the LoRA adapters of running requests that sit out a step, and keeps a
session that is preempted while the last token of its turn is in flight. From 0.33 on, which is
known by a method that came with it."""

OUTPUTS_CARRY_ERRORS = "error" in EngineCoreOutput.__struct_fields__
"""Whether a request's last output can carry an error; since 0.33."""

HOOKS = find_hooks(Scheduler, EngineCore, SchedulerStats, EngineCoreOutput, REQUEST_ERROR)
"""Of the installed vLLM."""
