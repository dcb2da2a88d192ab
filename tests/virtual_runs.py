"""Loads on the emulated device, in virtual time."""

from collections.abc import Sequence
from typing import Any

from vllm_semantic_sched.lab.device.load import Lengths, LoadConfig, LoadRequest, draw_load
from vllm_semantic_sched.lab.device.virtual import EngineConfig, VirtualEngine

# Short, so that a run takes a second.
SHORT_LOAD = draw_load(
    LoadConfig(
        requests=60, rate=12.0, prompts=Lengths(5.5, 0.6, 20, 900), answers=Lengths(4, 0.6, 2, 200)
    )
)


def run(load: Sequence[LoadRequest], **options: Any) -> tuple[dict[str, list[int]], list[str]]:
    """The tokens of each request, and the requests that were preempted."""
    preempted: list[str] = []
    with VirtualEngine(EngineConfig(**options)) as engine:
        preempt = engine.scheduler._preempt_request

        def note(request: Any, *args: Any, **more: Any) -> Any:
            preempted.append(request.request_id)
            return preempt(request, *args, **more)

        engine.scheduler._preempt_request = note
        engine.send(load)
        engine.run()
        assert all(one.ended is not None for one in engine.records.values())
        return {one.name: one.tokens for one in engine.records.values()}, preempted
