"""Many waiting requests that cannot start: those that can are not behind them, and no step looks at
each of them."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from engine_steps import EngineSteps, awaiting_grammar, calls_in
from remote_kv import RemoteDevice, remote_config
from vllm.config import LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.v1.request import RequestStatus

pytestmark = pytest.mark.engine

ADAPTERS = [LoRARequest(f"adapter {number}", number, "/nowhere") for number in range(1, 6)]
SEATS = 16
SOON = 2  # steps

Build = Callable[..., Any]


def names(prefix: str, count: int) -> Iterable[str]:
    return (f"{prefix}{number}" for number in range(count))


def behind_adapters(build: Build, count: int, seats: int, level: int = 4) -> EngineSteps:
    """Two slots, taken by requests of level 0; requests of three other adapters wait. `seats`:
    those that are taken."""
    steps = EngineSteps(build(max_num_seqs=SEATS, lora_config=LoRAConfig(max_loras=2)))
    for adapter in ADAPTERS[:2]:
        steps.add(adapter.lora_name, urgency=0, output_tokens=500, lora_request=adapter)
    steps.add(*names("low", seats - 2), urgency=4, output_tokens=500)
    steps.run()
    for number, name in enumerate(names("blocked", count)):
        adapter = ADAPTERS[2 + number % 3]
        steps.add(name, urgency=level, output_tokens=50, lora_request=adapter)
    return steps


def behind_grammars(
    build: Build, count: int, seats: int, level: int = 4, grammar: object = None
) -> EngineSteps:
    steps = EngineSteps(build(max_num_seqs=SEATS))
    steps.add(*names("low", seats), urgency=4, output_tokens=500)
    steps.run()
    blocked = [awaiting_grammar(name, grammar, urgency=level) for name in names("blocked", count)]
    steps.add_requests(*blocked)
    return steps


KINDS = {"adapters": behind_adapters, "grammars": behind_grammars}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("seats", "most"), [(8, 0.5), (SEATS, 2.0)])
def test_step_passes_over_1000_requests(build, build_stock, kind, seats, most) -> None:
    """With free seats, vLLM's own looks at each of them; without, at none."""

    def calls(build: Build) -> int:
        steps = KINDS[kind](build, 1000, seats)
        steps.run(3)
        return calls_in(steps.scheduler.schedule)

    assert calls(build) < most * calls(build_stock)


def test_each_grammar_is_asked_for_in_turn_while_all_seats_are_taken(build) -> None:
    """A request is in the order again once its grammar is ready."""
    steps = behind_grammars(build, 1000, SEATS)
    scheduler = steps.scheduler
    steps.run()
    for name in ("blocked3", "blocked997"):
        scheduler.requests[name].structured_output_request.grammar = object()
        steps.run(10)
    assert [job.request_id for job in scheduler.core.waiting.ordered()] == [
        "blocked3",
        "blocked997",
    ]
    assert scheduler.counters.total("policy_errors") == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seats", [8, SEATS])
@pytest.mark.parametrize("level", [0, 4])
def test_request_that_can_start_is_not_behind_1000_that_cannot(build, kind, seats, level) -> None:
    """Also where all seats are taken, and in the step in which they all come."""
    steps = KINDS[kind](build, 1000, seats, level)
    steps.add("urgent", urgency=1, output_tokens=5)
    assert steps.until_scheduled("urgent", 10) in range(SOON + 1)
    assert steps.scheduler.counters.total("policy_errors") == 0


def test_request_is_not_behind_1000_grammars_that_failed(build) -> None:
    """While all seats are taken, vLLM does not end those."""
    steps = behind_grammars(build, 1000, SEATS, level=0, grammar=ValueError("no such rule"))
    steps.add("urgent", urgency=1, output_tokens=5)
    assert steps.until_scheduled("urgent", 10) in range(SOON + 1)
    steps.finish(600)


def test_requests_start_once_their_adapter_has_a_slot(build) -> None:
    """All of them, and the first in the step after the slot comes free."""
    steps = behind_adapters(build, 30, seats=2)
    steps.run(3)
    steps.scheduler.finish_requests("adapter 1", RequestStatus.FINISHED_ABORTED)
    steps.add("urgent", urgency=1, output_tokens=50, lora_request=ADAPTERS[4])
    steps.run()
    running = {request.request_id for request in steps.scheduler.running}
    assert running == {"adapter 2", "urgent", *(f"blocked{at}" for at in range(2, 30, 3))}


def test_step_that_passes_over_200_loads_is_faster_than_vllms(build, build_stock) -> None:
    """KV of 200 requests is on its way, and that of one has come."""

    def calls(build: Build) -> int:
        waiting = list(names("loads", 200))
        config = remote_config(dict.fromkeys(waiting, 20))
        scheduler = build(max_num_seqs=SEATS, num_blocks=4000, kv_transfer_config=config)
        steps = EngineSteps(scheduler, RemoteDevice(scheduler, load_steps=1000))
        steps.add(*names("low", 8), urgency=4, output_tokens=500)
        steps.run()
        steps.add(*waiting, urgency=4, prompt_tokens=24, output_tokens=50)
        steps.run(3)
        scheduler.finished_recving_kv_req_ids.add("loads100")
        counted = calls_in(scheduler.schedule)
        assert "loads100" in {request.request_id for request in scheduler.running}
        return counted

    assert calls(build) < calls(build_stock)
