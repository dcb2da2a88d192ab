"""KV connectors on the emulated device: ours, vLLM's own that offload to host memory, and one that
loads and sends as those of LMCache and NIXL do."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from virtual_runs import FEATURE_LOAD, MUCH_HELD, Shown, check_feature
from vllm.distributed.kv_events import MEDIUM_GPU, BlockRemoved
from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

from vllm_semantic_sched.engine.startup.settings import SWAP_CONNECTOR
from vllm_semantic_sched.lab.device.copies import EmulatedCopies
from vllm_semantic_sched.lab.device.fuzz import look_around
from vllm_semantic_sched.lab.device.load import Lengths, LoadConfig, draw_load
from vllm_semantic_sched.lab.device.offloading import OffloadingCopies
from vllm_semantic_sched.lab.device.remote import REMOTE_CONNECTOR, RemoteKV
from vllm_semantic_sched.lab.device.virtual import EngineConfig, VirtualEngine

pytestmark = pytest.mark.engine

AT_ONCE = (
    8  # steps until the first token, with those in which a connector looks for KV and loads it
)
RECOMPUTE = {"kv_load_failure_policy": "recompute"}
SWAP = MUCH_HELD | {"retention": {"mode": "swap"}}


def multi(*inside: dict[str, Any], role: str = "kv_both") -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"connectors": list(inside)},
    }


def remote(role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    return REMOTE_CONNECTOR | RECOMPUTE | {"kv_role": role, "kv_connector_extra_config": extra}


def offloading(connector: str) -> dict[str, Any]:
    extra = {"cpu_bytes_to_use": 2**30}
    return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}


OURS = SWAP_CONNECTOR | {"kv_connector_extra_config": {"host_gib": 0.5}}
LMCACHE = remote(found=0.6, lookups=3, seconds=0.02)
OFFLOADING = offloading("OffloadingConnector")
SIMPLE = offloading("SimpleCPUOffloadConnector")
PREFILL_SIDE = remote("kv_producer", found=0.0, sent=1.0, seconds=0.1)
DECODE_SIDE = remote("kv_consumer", found=1.0, whole=True, seconds=0.02)


def look_into(connector: Any) -> None:
    """vLLM's and our connectors keep nothing of requests that have ended."""
    for inside in getattr(connector, "sub_connectors", [connector]):
        if (offload := getattr(inside, "connector_scheduler", None)) is not None:
            assert not offload._req_status
        elif (simple := getattr(inside, "scheduler_manager", None)) is not None:
            assert not simple._reqs_to_load and not simple._reqs_to_store
        elif (ledger := getattr(inside, "ledger", None)) is not None:
            assert not len(ledger) and not ledger.pool.used


def check_connector(connector: dict[str, Any] | None, **options: Any) -> list[Shown]:
    """See `check_feature`, with the prefix cache, which vLLM's own connectors need."""
    options = {"prefix_cache": True, "policy": SWAP} | options
    shown = check_feature(connector=connector, **options)
    for ours in shown:
        look_into(ours.engine.scheduler.connector)
    return shown


def running(
    connector: dict[str, Any] | None, asynchronous: bool = True, **options: Any
) -> VirtualEngine:
    """An engine with few seats and blocks, and the load to come."""
    given = {
        "seats": 4,
        "blocks": 64,
        "max_model_len": 640,
        "prefix_cache": True,
        "policy": SWAP,
        "connector": connector,
        "asynchronous": asynchronous,
    }
    return VirtualEngine(EngineConfig(**given | options))


def after(engine: VirtualEngine) -> None:
    """Run to the end, after which nothing is left."""
    engine.run()
    look_around(engine)
    look_into(engine.scheduler.connector)


@pytest.fixture
def loads(monkeypatch) -> Counter[str]:
    """Loads on the device, by connector."""
    counts: Counter[str] = Counter()

    def count(cls: type, method: str, name: str, is_load: Callable[..., bool]) -> None:
        original = getattr(cls, method)

        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[name] += is_load(*args)
            return original(*args, **kwargs)

        monkeypatch.setattr(cls, method, counted)

    count(RemoteKV, "_load", "remote", lambda *args: True)
    count(EmulatedCopies, "_copy", "ours", lambda self, what, *args: what == "load")
    count(OffloadingCopies, "copy", "offloading", lambda self, blocks, slots, save: not save)
    return counts


def test_swap_connector(loads) -> None:
    for shown in check_connector(OURS):
        assert shown.engine.scheduler.counters.total("loaded_tokens") > 0
        assert shown.engine.scheduler.counters.total("lost_copies") == 0
    assert loads["ours"] > 0


def test_connector_that_looks_up_and_loads_beside_steps(loads) -> None:
    check_connector(LMCACHE)
    assert loads["remote"] > 20


@pytest.mark.parametrize("failing", [0.0, 0.3])
def test_decode_side(failing, loads) -> None:
    connector = DECODE_SIDE["kv_connector_extra_config"] | {"failing": failing}
    check_connector(DECODE_SIDE | {"kv_connector_extra_config": connector})
    assert loads["remote"] > 20


def test_prefill_side() -> None:
    """The blocks of a prompt are free when its KV has been sent."""
    for shown in check_connector(PREFILL_SIDE):
        assert shown.engine.scheduler.requires_kv_delivery
        assert shown.engine.runner.timeline.copies_end > shown.engine.steps[-1].end


def test_prefill_side_beside_the_swap_connector() -> None:
    """What vLLM has to deliver is not saved for a victim: its KV is recomputed."""
    connector = multi(OURS, PREFILL_SIDE, role="kv_producer")
    for shown in check_connector(connector, modes=[True]):
        counters = shown.engine.scheduler.counters
        assert counters.total("saved_tokens") == counters.total("loaded_tokens") == 0
        assert counters.total("recomputed_tokens") > 0


@pytest.mark.parametrize("simple", [False, True])
def test_offloading_of_vllm(simple, loads, monkeypatch) -> None:
    """Beside preemptions that we decide on, its own saves and loads."""
    monkeypatch.setattr("vllm.envs.VLLM_USE_SIMPLE_KV_OFFLOAD", simple, raising=False)
    for shown in check_connector(None, options={"kv_offloading_size": 1.0}):
        name = "SimpleCPUOffloadConnector" if simple else "OffloadingConnector"
        assert type(shown.engine.scheduler.connector).__name__ == name
    assert loads["offloading"] > 0


@pytest.mark.parametrize("seed", [0, 1])
def test_victim_is_not_loaded_in_the_step_that_preempted_it(seed, loads) -> None:
    """vLLM's connector dies of it. Without the prefix cache there is always something to load."""
    load = draw_load(
        LoadConfig(
            requests=60,
            rate=60.0,
            seed=seed,
            mix=(1, 1, 1, 1, 1),
            prompts=Lengths(5.0, 0.5, 20, 400),
            answers=Lengths(3.5, 0.5, 2, 100),
            prefixes=2,
            prefix_tokens=64,
        )
    )
    looking = remote(found=0.5, lookups=3)
    with running(multi(looking, OFFLOADING), asynchronous=False, prefix_cache=False) as engine:
        engine.send(load)
        after(engine)
        assert engine.scheduler.counters.total("preemptions") > 3
    assert loads["offloading"] > 0


MULTIPLE = {
    "ours first": multi(OURS, LMCACHE),
    "ours second": multi(LMCACHE, OURS),
    "ours and offloading": multi(OURS, OFFLOADING),
    "two others": multi(LMCACHE, OFFLOADING),
}


@pytest.mark.parametrize("name", MULTIPLE)
def test_multi_connector(name, loads) -> None:
    shown = check_connector(MULTIPLE[name] | RECOMPUTE)
    if "ours" in name:
        loaded = [one.engine.scheduler.counters.total("loaded_tokens") for one in shown]
        assert min(loaded) > 0
        assert loads["ours"] > 0
    if name != "ours and offloading":
        assert loads["remote"] > 20


# Sliding window


SLIDING = {"ours": OURS, "lmcache": LMCACHE, "offloading": OFFLOADING, "simple": SIMPLE}


@pytest.mark.parametrize("name", SLIDING)
def test_sliding_window_with_connector(name, loads) -> None:
    check_connector(
        SLIDING[name],
        shape="sliding-8b",
        blocks=200,
        options={"hf_overrides": {"sliding_window": 64}},
    )
    assert sum(loads.values()) > 0


# Events, resets, refusals


KINDS = {
    "ours": OURS,
    "lmcache": LMCACHE,
    "offloading": OFFLOADING,
    "simple": SIMPLE,
    "prefill side": PREFILL_SIDE,
    "decode side": DECODE_SIDE,
    "multi": multi(OURS, OFFLOADING),
}


@pytest.mark.parametrize("name", KINDS)
def test_level_0_takes_a_seat_at_once(name) -> None:
    """Also where a step in flight may write to the blocks of its victim, or the victim loads."""
    low, other, urgent, *_ = FEATURE_LOAD
    load = [replace(low, level=4, answer=100), replace(other, level=4, answer=100)]
    load += [replace(urgent, level=0, arrival=0.5)]
    with running(KINDS[name], seats=2) as engine:
        engine.send(load)
        after(engine)
        record = engine.records[urgent.name]
        steps = [one for one in engine.steps if 0.5 <= one.begin < record.first_token]
        assert len(steps) <= AT_ONCE
        assert engine.scheduler.counters.total("admission_preemptions") == 1


@pytest.mark.parametrize("name", ["none", "ours", "offloading"])
def test_kv_events_tell_what_is_cached(name) -> None:
    """Whoever adds up the events knows the prefix cache. What requests find in it is reported where
    they are admitted, and not where the policy compares them."""
    load = [replace(one, extra={"kv_cache_report_mode": "full"}) for one in FEATURE_LOAD]
    events = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
    with running(KINDS.get(name), options=events) as engine:
        scheduler = engine.scheduler
        published: list[Any] = []
        scheduler.kv_event_publisher.publish = lambda batch: published.extend(batch.events)
        coordinator = scheduler.kv_cache_manager.coordinator
        admit, decide = coordinator.emit_cached_block_events, scheduler.before_step
        reported: Counter[bool] = Counter()  # by whether the policy was deciding
        deciding = False

        def report(*args: Any) -> None:
            reported[deciding] += 1
            admit(*args)

        def decide_and_note() -> None:
            nonlocal deciding
            deciding = True
            decide()
            deciding = False

        coordinator.emit_cached_block_events = report
        scheduler.before_step = decide_and_note
        engine.send(load)
        after(engine)
        assert scheduler.counters.total("preemptions") > 0
        assert reported[False] > 0 and not reported[True]
        pool = scheduler.kv_cache_manager.block_pool
        known: set[Any] = set()
        for event in published:
            if event.medium == MEDIUM_GPU:
                hashes = set(event.block_hashes)
                known = known - hashes if isinstance(event, BlockRemoved) else known | hashes
        cached = {block.block_hash for block in pool.blocks if block.block_hash is not None}
        assert known == {maybe_convert_block_hash(get_block_hash(key)) for key in cached}
        assert known


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_prefix_cache_is_reset(name, asynchronous) -> None:
    """Running requests are computed again, and no copy is used any more. While requests load, or
    their blocks wait for a step in flight, vLLM refuses it."""
    with running(KINDS[name], asynchronous) as engine:
        engine.send(FEATURE_LOAD)
        connector = engine.scheduler.preemptions.connector
        copies: list[tuple[int, int]] = []  # before and after

        def count() -> int:
            return 0 if connector is None else len(connector.ledger)

        def reset(and_connector: bool) -> None:
            before = count()
            try:
                assert engine.core.reset_prefix_cache(True, and_connector)
            except RuntimeError as error:
                assert "waiting for remote KV transfer" in str(error)
            else:
                copies.append((before, count()))

        for number in range(10):
            engine.at(0.05 + 0.1 * number, partial(reset, number % 2 == 0))
        after(engine)
        assert copies or asynchronous
        assert not any(left for _, left in copies)
        if name == "ours":
            assert len(copies) == 10
            assert any(before for before, _ in copies)


@pytest.mark.parametrize("name", KINDS)
def test_requests_are_refused(name) -> None:
    policy = SWAP | {"admission": {"queue": {"requests": 4}}}
    with running(KINDS[name], policy=policy) as engine:
        engine.send(FEATURE_LOAD)
        after(engine)
        ended = {one.level: Counter[str | None]() for one in engine.records.values()}
        for one in engine.records.values():
            ended[one.level][one.reason] += 1
        refused = sum(reasons["error"] for reasons in ended.values())
        assert engine.scheduler.counters.total("refused_requests") == refused > 4
        assert ended[0]["error"] == ended[1]["error"] == 0 < ended[4]["error"]
