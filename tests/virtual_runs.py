"""Loads on the emulated device, in virtual time."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from vllm_semantic_sched.lab.device.fuzz import hold_at_random, look_around
from vllm_semantic_sched.lab.device.load import Lengths, LoadConfig, LoadRequest, draw_load
from vllm_semantic_sched.lab.device.virtual import EngineConfig, Record, VirtualEngine

# Short, so that a run takes a second.
SHORT_LOAD = draw_load(
    LoadConfig(
        requests=60, rate=12.0, prompts=Lengths(5.5, 0.6, 20, 900), answers=Lengths(4, 0.6, 2, 200)
    )
)


def run(load: Sequence[LoadRequest], **options: Any) -> tuple[dict[str, list[int]], list[str]]:
    """The tokens of each request, and the requests that were preempted."""
    with VirtualEngine(EngineConfig(**options)) as engine:
        preempted = note_preemptions(engine)
        engine.send(load)
        engine.run()
        assert all(one.ended is not None for one in engine.records.values())
        return {one.name: one.tokens for one in engine.records.values()}, preempted


def note_preemptions(engine: VirtualEngine) -> list[str]:
    """A list to which each preemption from now on adds the request's name."""
    preempted: list[str] = []
    preempt = engine.scheduler._preempt_request

    def note(request: Any, *args: Any, **more: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *args, **more)

    engine.scheduler._preempt_request = note
    return preempted


SCHEMA = {
    "type": "object",
    "properties": {
        "level": {"enum": [0, 1, 2, 3, 4]},
        "why": {"type": "string", "maxLength": 40},
        "sure": {"type": "boolean"},
    },
    "required": ["level", "why", "sure"],
    "additionalProperties": False,
}
"""Of the answers of structured outputs."""

WITHOUT_BLANKS = {
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}
}
"""Options of an engine whose structured outputs have one way to be written."""


# A feature beside the scheduler

_DRAWN = draw_load(
    LoadConfig(
        requests=24,
        rate=60.0,
        prompts=Lengths(5.0, 0.5, 20, 400),
        answers=Lengths(3.5, 0.5, 2, 100),
        prefixes=2,
        prefix_tokens=64,
    )
)
_LEVELS = (4, 3, 2, 4, 1, 3, 4, 0)
FEATURE_LOAD = [replace(one, level=_LEVELS[at % 8]) for at, one in enumerate(_DRAWN)]
"""Sent in 0.4 seconds, and served in two on four seats. Prompts share their beginnings."""

MUCH_HELD: dict[str, Any] = {
    "correct_profile": False,
    "protect": {"level": 0, "price": 0.5, "worth": 240},
}
"""Policy keys by which holds are worth much, and the profile is taken as it is given."""


@dataclass(frozen=True)
class Shown:
    """What happened in a run. Of our scheduler, `preempted`: times that a request lost its seat or
    blocks to a waiting one; `held`: steps with holds. `accepted`: drafts; `engine`: after the run.
    """

    records: dict[str, Record]
    preempted: int
    held: int
    accepted: int
    engine: VirtualEngine


def check_feature(
    load: Sequence[LoadRequest] = FEATURE_LOAD,
    blocks: int | None = 64,
    seats: int = 4,
    modes: Iterable[bool] = (True, False),
    policy: dict[str, Any] = MUCH_HELD,
    preempts: bool = True,
    holds: bool = True,
    **options: Any,
) -> list[Shown]:
    """Run a load with so few seats and blocks that requests are preempted, and assert that the
    feature that `options` (of `EngineConfig`) switch on works beside the scheduler:

    - each request gets the tokens that it gets from vLLM's own scheduler with room for all, as far
      as its client stays: every fifth leaves at a drawn moment;
    - the device's sanitizer finds nothing (DeviceError), and neither blocks nor jobs are left;
    - requests of level 0 wait less for their first token than all others on average, and less than
      half as long as under vLLM's own scheduler in the same room;
    - requests were preempted for waiting ones, and some were held and got no token then, unless
      not `preempts` or `holds`.

    `modes`: asynchronous scheduling or not. Where requests may be held, half of the holds are drawn
    at random. Returns what happened in each mode.
    """
    chance = random.Random(7)
    load = [_leaving(one, chance) if at % 5 == 2 else one for at, one in enumerate(load)]
    stays = [replace(one, abort=None) for one in load]
    room = {"seats": seats, "blocks": blocks}
    options = {"max_model_len": 640, "policy": policy} | options
    right = _served(stays, **options | {"scheduler": "fcfs", "seats": len(load)})
    shown = []
    for asynchronous in modes:
        given = options | room | {"asynchronous": asynchronous}
        stock = _served(load, **given | {"scheduler": "fcfs"})
        ours = _served(load, **given)
        for name, record in ours.records.items():
            expected = right.records[name].tokens
            assert record.tokens == expected[: len(record.tokens)], name
            assert record.reason == "left" or len(record.tokens) == len(expected), name
        urgent = mean_ttft(ours.records.values(), [0])
        assert urgent < mean_ttft(ours.records.values(), [1, 2, 3, 4])
        assert urgent < 0.5 * mean_ttft(stock.records.values(), [0])
        assert ours.preempted or not preempts
        assert ours.held or not holds
        shown.append(ours)
    return shown


def mean_ttft(records: Iterable[Record], levels: Sequence[int]) -> float:
    """Seconds, of the requests of these levels that got a token."""
    return fmean(
        record.ttft
        for record in records
        if record.level in levels and record.first_token is not None
    )


def note_holds(engine: VirtualEngine) -> list[int]:
    """A list to which each step with holds from now on adds how many requests it held; asserts that
    they get no token in it."""
    held: list[int] = []
    scheduler = engine.scheduler
    schedule = scheduler.schedule

    def note(*args: Any) -> Any:
        output = schedule(*args)
        names = {job.request_id for job in scheduler.core.protection.held}
        assert not names & output.num_scheduled_tokens.keys()
        if names:
            held.append(len(names))
        return output

    scheduler.schedule = note
    return held


def decodes_beside_a_prefill(decodes: int, **options: Any) -> list[int]:
    """How many requests decode in each step that computes a part of a long prompt of level 0, of so
    many less urgent ones."""
    load = [
        LoadRequest(f"decode{number}", 0.0, 4, tuple(range(20 + number, 28 + number)), 400)
        for number in range(decodes)
    ]
    load.append(LoadRequest("long", 0.5, 0, tuple(range(100, 1100)), 5))
    options = {"seats": 2 * decodes, "policy": MUCH_HELD, "max_model_len": 1200} | options
    with VirtualEngine(EngineConfig(**options)) as engine:
        engine.send(load)
        engine.run(until=3.0)
        assert engine.records["long"].first_token is not None
        computing = [step for step in engine.steps if step.begin >= 0.5 and step.batch.prefills]
        return [step.batch.decodes for step in computing]


def _served(load: Sequence[LoadRequest], **options: Any) -> Shown:
    with VirtualEngine(EngineConfig(**options)) as engine:
        ours = engine.config.scheduler == "semantic"
        held = note_holds(engine) if ours else []
        if ours:
            hold_at_random(engine, random.Random(7))
        engine.send(load)
        engine.run()
        look_around(engine)
        counters = engine.scheduler.counters if ours else None
        return Shown(
            records=engine.records,
            preempted=round(counters.total("admission_preemptions")) if counters else 0,
            held=len(held),
            accepted=engine.runner.accepted,
            engine=engine,
        )


def _leaving(request: LoadRequest, chance: random.Random) -> LoadRequest:
    return replace(request, abort=request.arrival + chance.expovariate(5.0))
