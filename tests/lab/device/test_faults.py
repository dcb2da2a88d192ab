"""What this scheduler once did wrong on GPU servers, with vLLM's whole engine core on the emulated
device: asynchronous scheduling, connectors, drafts, adapters, sessions."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from engine_steps import calls_in
from vllm.lora.request import LoRARequest

from vllm_semantic_sched.engine.startup.settings import SWAP_CONNECTOR
from vllm_semantic_sched.lab.device import virtual
from vllm_semantic_sched.lab.device.load import LoadRequest
from vllm_semantic_sched.lab.device.remote import REMOTE_CONNECTOR, RemoteKV
from vllm_semantic_sched.lab.device.virtual import EngineConfig, VirtualEngine

pytestmark = pytest.mark.engine

AT_ONCE = 4  # steps until the first token of a request that has the right to a seat
LATER = 0.3  # seconds; all that was sent at first runs then
HINTS_ONLY: dict[str, Any] = {"correct_profile": False}


def requests(
    names: Iterable[str], level: int, prompt: int = 20, answer: int = 5, arrival: float = 0.0
) -> list[LoadRequest]:
    """Requests of a level, each with its own prompt."""
    return [
        LoadRequest(name, arrival, level, tuple(range(20 + place, 20 + place + prompt)), answer)
        for place, name in enumerate(names, hash(level) * 100)
    ]


def served(load: Sequence[LoadRequest], until: float = 60.0, **options: Any) -> VirtualEngine:
    """The engine after the load."""
    with VirtualEngine(EngineConfig(**{"policy": HINTS_ONLY} | options)) as engine:
        engine.send(load)
        engine.run(until)
        return engine


def steps_until_token(engine: VirtualEngine, name: str) -> list[Any]:
    """The steps from the arrival of a request to its first token."""
    record = engine.records[name]
    assert record.first_token is not None, f"{name} never started"
    return [one for one in engine.steps if record.arrival <= one.begin < record.first_token]


# A long prefill leaves running decodes their tokens


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("decodes", "prefill", "answer"),
    [
        pytest.param(4, 0, 100, id="more urgent"),
        pytest.param(4, 4, 400, id="same level, less work left"),
        pytest.param(0, 0, 400, id="all of level 0"),
    ],
)
def test_decodes_go_on_beside_a_long_prefill(decodes, prefill, answer, asynchronous) -> None:
    """They need 32 of 512 tokens a step, so a prompt of 8,000 takes one step of 17 more."""
    load = requests((f"decode{number}" for number in range(32)), decodes, 8, answer)
    load += requests(["long"], prefill, 8000, 5, LATER)
    options = {"seats": 64, "blocks": 6000, "budget": 512, "asynchronous": asynchronous}
    ours, stock = (
        steps_until_token(served(load, 4.0, scheduler=scheduler, **options), "long")
        for scheduler in ("semantic", "fcfs")
    )
    assert sum(step.batch.decodes < 32 for step in ours if step.batch.prefills) <= 1
    assert len(ours) <= len(stock) + 3


# A level 0 takes a seat and blocks at once, also where a step in flight may write to the blocks of
# its victim for a while


def multi(*inside: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(inside)},
    }


NOTHING_FOUND = REMOTE_CONNECTOR | {"kv_connector_extra_config": {"found": 0.0}}
ENGINES: dict[str, dict[str, Any]] = {
    "no connector": {},
    "ours": {"connector": SWAP_CONNECTOR},
    "MultiConnector": {"connector": multi(SWAP_CONNECTOR)},
    "MultiConnector, another one too": {"connector": multi(SWAP_CONNECTOR, NOTHING_FOUND)},
    "kv_both": {"connector": NOTHING_FOUND},
    "kv_consumer": {"connector": NOTHING_FOUND | {"kv_role": "kv_consumer"}},
    "kv_producer": {"connector": NOTHING_FOUND | {"kv_role": "kv_producer"}},
    "drafts": {"drafts": 3, "acceptance": 0.0},
    "drafts, ours": {"drafts": 3, "acceptance": 0.0, "connector": SWAP_CONNECTOR},
    "sliding window": {"shape": "sliding-8b", "blocks": 400},
    "sliding window, kv_both": {
        "shape": "sliding-8b",
        "blocks": 400,
        "connector": NOTHING_FOUND,
    },
}
FULL = {"seats": 2, "blocks": 60, "max_model_len": 512, "budget": 128, "asynchronous": True}


@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize("name", ENGINES)
def test_level_0_takes_a_seat_at_once(name, runner) -> None:
    load = requests("xy", 4, answer=100) + requests(["urgent"], 0, arrival=LATER)
    engine = served(load, runner=runner, **FULL | ENGINES[name])
    assert len(steps_until_token(engine, "urgent")) <= AT_ONCE
    assert engine.scheduler.counters.total("admission_preemptions") == 1
    assert {one.reason for one in engine.records.values()} == {"stop"}


@pytest.mark.parametrize("name", [name for name in ENGINES if "sliding" not in name])
def test_level_0_takes_blocks_at_once(name) -> None:
    """Seats are free, but the pool is full."""
    load = requests("wxyz", 4, prompt=190, answer=45) + requests(["urgent"], 0, 90, 5, LATER)
    engine = served(load, **FULL | ENGINES[name] | {"seats": 8})
    assert len(steps_until_token(engine, "urgent")) <= AT_ONCE
    assert engine.scheduler.counters.total("admission_preemptions") >= 1
    assert {one.reason for one in engine.records.values()} == {"stop"}


def test_several_in_flight_give_way_in_one_step() -> None:
    load = requests((f"low{number}" for number in range(6)), 4, answer=100)
    names = [f"urgent{number}" for number in range(3)]
    load += requests(names, 0, arrival=LATER)
    engine = served(load, **FULL | ENGINES["kv_both"] | {"seats": 6})
    assert max(len(steps_until_token(engine, name)) for name in names) <= AT_ONCE


@pytest.fixture
def finding(monkeypatch):
    """Let a connector find KV as told by name of the request: nothing, all (True), or None while it
    is still looking."""
    find = RemoteKV.get_num_new_matched_tokens

    def finding(**found: bool | None) -> None:
        def find_some(connector: RemoteKV, request: Any, computed: int) -> Any:
            if (has := found.get(request.request_id, False)) is None:
                return None, False
            return find(connector, request, computed) if has else (0, False)

        monkeypatch.setattr(RemoteKV, "get_num_new_matched_tokens", find_some)

    return finding


# A request whose KV is loaded beside steps keeps the right to the seat that was freed for it


@pytest.mark.parametrize("asynchronous", [False, True])
def test_level_0_with_remote_kv_starts_when_it_is_loaded(asynchronous, finding) -> None:
    """The decode side of disaggregated prefill."""
    finding(urgent=True)
    extra = {"found": 1.0, "whole": True, "seconds": 0.06}
    connector = REMOTE_CONNECTOR | {"kv_connector_extra_config": extra}
    load = requests("xyz", 4, answer=200) + requests(["urgent"], 0, 100, arrival=1.0)
    options = {"asynchronous": asynchronous, "connector": connector}
    engine = served(load, **FULL | options)
    loading = [one for one in steps_until_token(engine, "urgent") if one.begin < 1.0 + 0.06]
    assert len(loading) < 10  # of 200
    assert len(steps_until_token(engine, "urgent")) <= len(loading) + 2 * AT_ONCE


# Adapters


ADAPTERS = {"enable_lora": True, "max_loras": 1}


@pytest.fixture
def with_adapters(monkeypatch):
    """Let the requests whose names end with A or B use an adapter of that name."""
    make = virtual._engine_request

    def make_with_adapter(one: LoadRequest, *args: Any) -> Any:
        request = make(one, *args)
        if one.name[-1] in "AB":
            request.lora_request = LoRARequest(one.name[-1], ord(one.name[-1]), "/nowhere")
        return request

    monkeypatch.setattr(virtual, "_engine_request", make_with_adapter)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_adapter_of_a_held_decode_keeps_its_slot(with_adapters, asynchronous, finding) -> None:
    """Nobody is held before 0.33: vLLM would admit the other adapter, and die once the held decode
    comes back. The head of the queue cannot start, so that the next one is looked at."""
    finding(big=None)
    policy = HINTS_ONLY | {"protect": {"level": 0, "price": 0.9, "worth": 100_000}}
    load = requests(["urgent"], 0, answer=100) + requests(["lowA"], 4, answer=100)
    load += requests(["big"], 1, prompt=1850, arrival=0.1)
    load += requests(["otherB"], 4, answer=20, arrival=0.1)
    options = {"seats": 8, "blocks": 122, "max_model_len": 1900, "connector": NOTHING_FOUND}
    options |= {"policy": policy, "asynchronous": asynchronous, "options": ADAPTERS}
    engine = served(load, 3.0, **options)
    ended = {name for name, record in engine.records.items() if record.ended is not None}
    assert ended == {"urgent", "lowA", "otherB"}
    assert engine.scheduler.counters.total("policy_errors") == 0


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("level", [0, 1])
def test_urgent_request_of_another_adapter_gets_the_slot(
    with_adapters, level, asynchronous
) -> None:
    """A stream of level 4 uses the slot at all times; each answer takes 15 to 25 steps."""
    load = []
    for number in range(120):
        answer = 15 + 7 * number % 11
        load += requests([f"low{number}A"], 4, answer=answer, arrival=0.02 * number)
    load += requests(["urgentB"], level, arrival=LATER)
    options = {"seats": 4, "asynchronous": asynchronous}
    engine = served(load, options=ADAPTERS, **options)
    assert len(steps_until_token(engine, "urgentB")) <= 40


# Sessions whose input comes turn by turn, and limits on seats


@pytest.fixture
def sessions(monkeypatch):
    """Let the requests whose names begin with "session" wait for another turn."""
    make = virtual._engine_request

    def make_session(one: LoadRequest, *args: Any) -> Any:
        request = make(one, *args)
        request.resumable = one.name.startswith("session")
        return request

    monkeypatch.setattr(virtual, "_engine_request", make_session)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_idle_session_takes_one_seat(sessions, asynchronous) -> None:
    """Four of eight are free beside four idle ones: nobody waits, nobody is preempted."""
    load = requests((f"session{number}" for number in range(4)), 2, answer=1)
    load += requests("abc", 4, answer=100, arrival=LATER)
    load += requests(["urgent"], 0, arrival=LATER + 0.2)
    options = {"seats": 8, "asynchronous": asynchronous}
    policy = HINTS_ONLY | {"admission": {"queue": {"requests": 1}}}
    engine = served(load, LATER + 0.6, policy=policy, **options)
    assert engine.scheduler.num_waiting_for_streaming_input == 4
    for name in ("a", "b", "c", "urgent"):
        assert len(steps_until_token(engine, name)) <= AT_ONCE, name
    for what in ("preemptions", "refused_requests", "policy_errors"):
        assert engine.scheduler.counters.total(what) == 0, what


@pytest.mark.parametrize("asynchronous", [False, True])
def test_seats_are_those_that_vllm_admits_to(asynchronous) -> None:
    """`--max-num-active-seqs` 2 of 8, one of them reserved for level 0."""
    tiers = [{"name": "a", "reserve": {"seats": 1}}, {"name": "b"}, {"name": "c"}]
    policy = HINTS_ONLY | {"base": "priority", "levels": 3, "tiers": tiers}
    load = requests("pqrs", 2, answer=50) + requests(["urgent"], 0, arrival=LATER)
    options = {"policy": policy, "options": {"max_num_active_seqs": 2}}
    engine = served(load, seats=8, asynchronous=asynchronous, **options)
    before = [one for one in engine.steps if one.begin < LATER]
    assert {step.batch.sequences for step in before[1:]} == {1}
    assert len(steps_until_token(engine, "urgent")) <= AT_ONCE
    assert engine.scheduler.counters.total("preemptions") == 0


# Steps that skip many requests


def test_step_skipping_1000_requests_costs_few_times_vllms() -> None:
    """A connector looks for their KV."""

    def calls(scheduler: str) -> int:
        extra = {"found": 1.0, "lookups": 10**9}
        connector = REMOTE_CONNECTOR | {"kv_connector_extra_config": extra}
        config = EngineConfig(scheduler=scheduler, policy=HINTS_ONLY, seats=16, connector=connector)
        with VirtualEngine(config) as engine:
            load = requests((f"r{number}" for number in range(1000)), 4)
            engine.send([replace(one, prompt=one.prompt[:8]) for one in load])
            engine.run(0.01)
            assert not engine.steps and len(engine.scheduler.requests) == 1000
            return calls_in(engine.step)

    assert calls("semantic") <= 3.5 * calls("fcfs")
