"""Faults put into the real engine, or into what it sends to the device: each is found, and said to
be where it is."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.outputs import ModelRunnerOutput

from vllm_semantic_sched.lab.bench.prompts import Lengths
from vllm_semantic_sched.lab.device import virtual
from vllm_semantic_sched.lab.device.load import LoadConfig, draw_load
from vllm_semantic_sched.lab.device.remote import REMOTE_CONNECTOR, RemoteKV
from vllm_semantic_sched.lab.device.sanitizer import Chain, DeviceError, Group, Sanitizer
from vllm_semantic_sched.lab.device.virtual import EngineConfig, VirtualEngine
from vllm_semantic_sched.policy.profile import cost

pytestmark = pytest.mark.engine

LENGTHS = {"prompts": Lengths(5.3, 0.5, 20, 600), "answers": Lengths(4, 0.6, 20, 150)}
LOAD = draw_load(LoadConfig(requests=30, rate=30.0, **LENGTHS))
ENGINE = {"seats": 8, "blocks": 110, "max_model_len": 1024, "asynchronous": False}
SWAP = {"swap_gib": 1.0, "policy": {"retention": {"mode": "swap"}}}
BESIDE = {
    "swap_gib": 1.0,
    "policy": {"retention": {"mode": "swap"}},
    "budget": 128,  # few blocks in a step: saves beside steps want as many others
}


def load_beside_steps(monkeypatch, always: bool) -> None:
    monkeypatch.setattr(cost, "MAX_STALL", 0.0 if always else 1.0)


def found(
    break_it: Callable[[VirtualEngine], None], after: float = 0.3, **config: Any
) -> DeviceError:
    """What the device says of a fault that begins at that second."""
    with VirtualEngine(EngineConfig(**ENGINE | config)) as engine:
        engine.send(LOAD)
        engine.run(until=after)
        break_it(engine)
        with pytest.raises(DeviceError) as error:
            engine.run()
            lost = [one.name for one in engine.records.values() if one.ended is None]
            assert not lost
    return error.value


# What is sent to the device


def corrupting(change: Callable[[Any], bool | None]) -> Callable[[VirtualEngine], None]:
    """Change one step on its way to the device: the first for which `change` returns no False."""

    def break_it(engine: VirtualEngine) -> None:
        worker = engine.core.model_executor.driver_worker.worker
        execute, done = worker.execute_model, []

        def corrupt(output: Any) -> Any:
            if not done and output.scheduled_cached_reqs.req_ids and change(output) is not False:
                done.append(output)
            return execute(output)

        worker.execute_model = corrupt

    return break_it


def too_far(output: Any) -> bool | None:
    output.scheduled_cached_reqs.num_computed_tokens[0] += 1
    return None


def hit_without_kv(output: Any) -> bool | None:
    """A prefix hit on blocks that nobody has written."""
    new = next(iter(output.scheduled_new_reqs), None)
    if new is None or output.num_scheduled_tokens[new.req_id] < 32:
        return False
    new.num_computed_tokens += 16
    output.num_scheduled_tokens[new.req_id] -= 16
    output.total_num_scheduled_tokens -= 16
    return None


def without_new_block(output: Any) -> bool | None:
    cached = output.scheduled_cached_reqs
    at = next((at for at, blocks in enumerate(cached.new_block_ids) if blocks), None)
    if at is None:
        return False
    cached.new_block_ids[at] = None
    return None


def block_of_another(output: Any) -> bool | None:
    """Two requests begin in the same blocks."""
    new = output.scheduled_new_reqs
    if len(new) < 2 or len(new[0].block_ids[0]) < len(new[1].block_ids[0]):
        return False
    new[1].block_ids[0][:] = new[0].block_ids[0][: len(new[1].block_ids[0])]
    return None


def block_swapped(output: Any) -> bool | None:
    """A resumed request gets its blocks in another order after a prefix hit."""
    new = next((one for one in output.scheduled_new_reqs if one.num_computed_tokens >= 32), None)
    if new is None:
        return False
    blocks = new.block_ids[0]
    blocks[0], blocks[1] = blocks[1], blocks[0]
    return None


def no_such_block(output: Any) -> bool | None:
    if not output.scheduled_new_reqs:
        return False
    output.scheduled_new_reqs[0].block_ids[0][0] = 110
    return None


def null_block(output: Any) -> bool | None:
    """vLLM's "no block" in the middle of a table."""
    new = next((one for one in output.scheduled_new_reqs if len(one.block_ids[0]) > 1), None)
    if new is None:
        return False
    new.block_ids[0][0] = 0
    return None


def never_begun(output: Any) -> bool | None:
    if not output.scheduled_new_reqs:
        return False
    output.scheduled_new_reqs.pop()
    return None


def begun_and_forgotten(output: Any) -> bool | None:
    output.finished_req_ids = {output.scheduled_cached_reqs.req_ids[0]}
    return None


def another_total(output: Any) -> bool | None:
    output.total_num_scheduled_tokens += 1
    return None


def other_tokens(output: Any) -> bool | None:
    cached = output.scheduled_cached_reqs
    cached.all_token_ids[cached.req_ids[0]] = [7] * (cached.num_computed_tokens[0] + 1)
    return None


def adapters(output: Any) -> bool | None:
    """An adapter, and the engine has room for none."""
    if not output.scheduled_new_reqs:
        return False
    output.scheduled_new_reqs[0].lora_request = LoRARequest("a", 3, "/nowhere")
    return None


def image(output: Any) -> bool | None:
    """An image that was never encoded."""
    if not output.scheduled_new_reqs:
        return False
    place = PlaceholderRange(offset=2, length=4)
    feature = MultiModalFeatureSpec(
        data=None, modality="image", identifier="cat", mm_position=place
    )
    output.scheduled_new_reqs[0].mm_features = [feature]
    return None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (too_far, "only .* are known"),
        (hit_without_kv, "reads tokens 0 to 16 where"),
        (without_new_block, "computes .* tokens with .* blocks of 16"),
        (block_of_another, "writes a block that .* writes in the same step"),
        (no_such_block, "there is no such block, only 110"),
        (null_block, "has no block for token 0"),
        (never_begun, "was not sent to the device|was never begun"),
        (begun_and_forgotten, "was never begun"),
        (another_total, "tokens, not as stated"),
        (other_tokens, "has other tokens at the scheduler"),
        (adapters, "1 adapters, over 0"),
        (image, "uses image cat, not encoded"),
    ],
)
def test_corrupted_step_is_found(change, problem) -> None:
    error = found(corrupting(change))
    assert error.args[0].startswith("step ") and error.request in {one.name for one in LOAD}
    assert error.step
    with pytest.raises(DeviceError, match=problem):
        raise error


def test_error_names_owners() -> None:
    error = found(corrupting(hit_without_kv))
    assert error.block is not None and len(error.owners) <= 3
    for owner in error.owners:
        assert " in step " in owner and owner in str(error)


def test_order_of_blocks_after_a_prefix_hit() -> None:
    """vLLM's hit is right; the device gets the blocks in another order."""
    load = draw_load(LoadConfig(requests=12, rate=10.0, prefixes=1, prefix_tokens=64, **LENGTHS))
    with VirtualEngine(EngineConfig(**ENGINE | {"prefix_cache": True})) as engine:
        engine.send(load)
        corrupting(block_swapped)(engine)
        with pytest.raises(DeviceError, match="where the KV of other tokens was written"):
            engine.run()


# What the scheduler does


def free_too_early(engine: VirtualEngine) -> None:
    """The blocks of a running request are given to others."""
    manager = engine.scheduler.kv_cache_manager
    victim = max(engine.scheduler.running, key=lambda one: one.num_computed_tokens)
    blocks = manager.get_blocks(victim.request_id).blocks[0]
    manager.block_pool.free_blocks(reversed(blocks))


def token_twice(engine: VirtualEngine) -> None:
    request = next(one for one in engine.scheduler.running if one.num_output_tokens > 2)
    request._output_token_ids.pop()
    request._all_token_ids.pop()
    request.num_computed_tokens -= 1


def token_left_out(engine: VirtualEngine) -> None:
    request = next(one for one in engine.scheduler.running if one.num_output_tokens > 2)
    request._output_token_ids.append(7)
    request._all_token_ids.append(7)
    request.num_computed_tokens += 1


def more_seats(engine: VirtualEngine) -> None:
    engine.scheduler.max_num_running_reqs = engine.scheduler.max_num_active_reqs = 20


def more_tokens(engine: VirtualEngine) -> None:
    engine.scheduler.max_num_scheduled_tokens = 4000
    engine.scheduler.scheduler_config.max_num_batched_tokens = 4000
    engine.runner.limits = replace(engine.runner.limits, tokens=64)


def longer(engine: VirtualEngine) -> None:
    engine.runner.limits = replace(engine.runner.limits, length=200)


def answer_altered(engine: VirtualEngine) -> None:
    """On the way back from the device."""
    worker = engine.core.model_executor.driver_worker.worker
    sample = worker.runner.sample

    def altered(grammar: Any) -> Any:
        names, tokens, time = sample(grammar)
        return names, [[one + 1 for one in few] for few in tokens], time

    worker.runner.sample = altered


@pytest.mark.parametrize(
    ("break_it", "problem"),
    [
        (free_too_early, "where the KV of other tokens was written|writes in the same step"),
        (token_twice, "samples token .* again"),
        (token_left_out, "and the scheduler counts"),
        (more_seats, "sequences, over 8"),
        (more_tokens, "tokens, over 64"),
        (longer, "has more than 200 tokens"),
        (answer_altered, "has other tokens at the scheduler|got another answer"),
    ],
)
def test_broken_scheduler_is_found(break_it, problem) -> None:
    room = 400 if break_it is more_seats else 110
    error = found(break_it, scheduler="fcfs", blocks=room)
    assert error.step and error.request in {one.name for one in LOAD}
    with pytest.raises(DeviceError, match=problem):
        raise error


def test_stalled_engine_is_found(monkeypatch) -> None:
    monkeypatch.setattr(virtual, "_STALLED", 5.0)

    def stop(engine: VirtualEngine) -> None:
        engine.scheduler.running.clear()
        engine.scheduler.max_num_running_reqs = 0

    assert "no step in" in str(found(stop, scheduler="fcfs"))


# Drafts


def drafting(output: Any) -> str | None:
    """A request whose drafts are verified."""
    cached = output.scheduled_cached_reqs.req_ids
    return next((name for name in output.scheduled_spec_decode_tokens if name in cached), None)


def draft_elsewhere(output: Any) -> bool | None:
    """A draft is verified against another position."""
    if (name := drafting(output)) is None:
        return False
    output.scheduled_cached_reqs.num_computed_tokens[
        output.scheduled_cached_reqs.req_ids.index(name)
    ] -= 1
    return None


def other_draft(output: Any) -> bool | None:
    if (name := drafting(output)) is None:
        return False
    output.scheduled_spec_decode_tokens[name] = [5, 6, 7]
    return None


def draft_without_drafter(output: Any) -> bool | None:
    output.scheduled_spec_decode_tokens = {output.scheduled_cached_reqs.req_ids[0]: [5]}
    return None


@pytest.mark.parametrize(
    ("change", "options", "problem"),
    [
        (draft_elsewhere, {"drafts": 3}, "verifies drafts of token .* are known"),
        (other_draft, {"drafts": 3}, "verifies other drafts than were made"),
        (draft_without_drafter, {}, "verifies 1 drafts, over 0"),
    ],
)
def test_corrupted_draft_is_found(change, options, problem) -> None:
    error = found(corrupting(change), **options)
    assert error.step and error.request in {one.name for one in LOAD}
    with pytest.raises(DeviceError, match=problem):
        raise error


def lose_accepted_token(engine: VirtualEngine) -> None:
    """On its way to the scheduler."""
    alter_accepted(engine, lambda tokens: tokens.pop())


def repeat_accepted_token(engine: VirtualEngine) -> None:
    alter_accepted(engine, lambda tokens: tokens.insert(1, tokens[0]))


def alter_accepted(engine: VirtualEngine, alter: Callable[[list[int]], Any]) -> None:
    """Change once what was sampled of a request with an accepted draft and a rejected one."""
    worker = engine.core.model_executor.driver_worker.worker
    sample, done = worker.runner.sample, []

    def altered(grammar: Any) -> Any:
        names, tokens, time = sample(grammar)
        few = next((few for few in tokens if 1 < len(few) < 4), None)
        if few is not None and not done:
            done.append(alter(few))
        return names, tokens, time

    worker.runner.sample = altered


def keep_rejected(engine: VirtualEngine) -> None:
    """The scheduler takes the KV of rejected drafts for that of the tokens in their place."""
    scheduler = engine.scheduler
    update = scheduler.update_from_output

    def update_and_keep(step: Any, output: Any) -> Any:
        before = {name: one.num_computed_tokens for name, one in scheduler.requests.items()}
        outputs = update(step, output)
        for name in step.scheduled_spec_decode_tokens:
            if (request := scheduler.requests.get(name)) in scheduler.running:
                request.num_computed_tokens = before[name]
        return outputs

    scheduler.update_from_output = update_and_keep


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(
    ("break_it", "problem"),
    [
        (lose_accepted_token, "samples token .* again|and the scheduler counts"),
        (repeat_accepted_token, "and the scheduler counts|other tokens|another answer"),
        (keep_rejected, "reads tokens .* where the KV of other tokens|verifies drafts of token"),
    ],
)
def test_broken_drafting_is_found(break_it, problem, asynchronous) -> None:
    options = {"drafts": 3, "acceptance": 0.5, "blocks": 400, "asynchronous": asynchronous}
    error = found(break_it, scheduler="fcfs", **options)
    assert error.step and error.request in {one.name for one in LOAD}
    with pytest.raises(DeviceError, match=problem):
        raise error


# Copies


def load_elsewhere(engine: VirtualEngine) -> None:
    """Loads go into the right blocks in the wrong order."""
    backend = backend_of(engine)
    load = backend.load
    backend.load = lambda device, host, key=None: load(device[::-1], host, key)


def no_load(engine: VirtualEngine) -> None:
    backend_of(engine).load = lambda device, host, key=None: None


def saves_too_late(engine: VirtualEngine) -> None:
    """After the forward pass that reuses the blocks."""
    worker = engine.core.model_executor.driver_worker.worker
    connector, late = worker.connector, []

    def hold_back(metadata: Any) -> None:
        late.extend(metadata.orders.saves)
        metadata.orders.saves.clear()

    def save_now() -> None:
        while late:
            save = late.pop()
            connector.backend.save(save.device, save.host)

    connector.handle_preemptions, connector.wait_for_save = hold_back, save_now


def ready_too_early(engine: VirtualEngine) -> None:
    """A load beside steps is reported before it has ended."""
    backend = backend_of(engine)

    def finished() -> set[str]:
        keys = set(backend._loads)
        backend._loads.clear()
        return keys

    backend.finished = finished


def freed_while_saved(engine: VirtualEngine) -> None:
    """Blocks are freed, and used again, while they are saved beside steps."""
    kept = engine.scheduler.preemptions.connector.ledger.kept
    add = kept.add

    def add_and_free(blocks: Any) -> int:
        number = add(blocks)
        kept.free(number)
        return number

    kept.add = add_and_free


def backend_of(engine: VirtualEngine) -> Any:
    return engine.core.model_executor.driver_worker.worker.connector.backend


@pytest.fixture(scope="module")
def slow_copies(tmp_path_factory) -> str:
    """A profile whose copies take as long as several steps."""
    from vllm_semantic_sched.policy.profile.formula import load_profile, write_profile

    path = tmp_path_factory.mktemp("profile") / "slow.yaml"
    profile = load_profile("default")
    write_profile(profile.model_copy(update={"beta_load": 1e-3, "beta_save": 1e-3}), path)
    return str(path)


@pytest.mark.parametrize(
    ("break_it", "options", "problem"),
    [
        (load_elsewhere, SWAP, "reads tokens .* written"),
        (no_load, SWAP, "reads tokens .* written"),
        (saves_too_late, SWAP, "which is empty|reads tokens .* written"),
        (ready_too_early, BESIDE, "before a load of step .* ended"),
        (freed_while_saved, BESIDE, "while a save of step .* is under way"),
    ],
)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_broken_copies_are_found(
    break_it, options, problem, asynchronous, slow_copies, monkeypatch
) -> None:
    load_beside_steps(monkeypatch, options is BESIDE)
    given = {"given_profile": "default", "profile": slow_copies, "asynchronous": asynchronous}
    error = found(break_it, after=0.0, **options, **given)
    assert error.step and error.block is not None
    with pytest.raises(DeviceError, match=problem):
        raise error


@pytest.mark.parametrize("options", [SWAP, BESIDE])
def test_whole_copies_are_not_complained_of(options, slow_copies, monkeypatch) -> None:
    load_beside_steps(monkeypatch, options is BESIDE)
    with VirtualEngine(
        EngineConfig(**ENGINE | options, given_profile="default", profile=slow_copies)
    ) as engine:
        engine.send(LOAD)
        engine.run()
        assert engine.scheduler.counters.total("preempted_tokens") > 0
        assert backend_of(engine)._runner.timeline.copies_end > 0
        free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == ENGINE["blocks"] - 1


# Loads from elsewhere, and sendings


def remote(**extra: float) -> dict[str, Any]:
    """Options of an engine whose connector loads KV from elsewhere."""
    connector = REMOTE_CONNECTOR | {"kv_connector_extra_config": {"found": 0.5} | extra}
    return {"connector": connector | {"kv_load_failure_policy": "recompute"}, "blocks": 200}


def remote_of(engine: VirtualEngine) -> RemoteKV:
    """The connector on the worker's side."""
    return engine.core.model_executor.driver_worker.worker.connector


def load_remote_elsewhere(engine: VirtualEngine) -> None:
    change_orders(engine, "_load", lambda blocks: blocks[::-1])


def send_from_elsewhere(engine: VirtualEngine) -> None:
    change_orders(engine, "_send", lambda blocks: blocks[::-1])


def change_orders(engine: VirtualEngine, what: str, change: Callable[[list[int]], Any]) -> None:
    connector = remote_of(engine)
    execute = getattr(connector, what)
    setattr(
        connector,
        what,
        lambda order: execute(replace(order, blocks=tuple(map(change, order.blocks)))),
    )


def loaded_too_early(engine: VirtualEngine) -> None:
    connector = remote_of(engine)
    load = connector._load
    connector._load = lambda order: min(load(order), 0.0)


def failure_untold(engine: VirtualEngine) -> None:
    remote_of(engine).get_block_ids_with_load_errors = set


def freed_while_sent(engine: VirtualEngine) -> None:
    """The scheduler frees the blocks of a request whose KV is being sent."""
    connector = engine.scheduler.connector
    finished = connector.request_finished_all_groups

    def finished_and_free(*args: Any) -> Any:
        finished(*args)
        return False, None

    connector.request_finished_all_groups = finished_and_free


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(
    ("break_it", "extra", "problem"),
    [
        (load_remote_elsewhere, {}, "reads tokens .* written"),
        (loaded_too_early, {"seconds": 0.1}, "before a load for .* ended"),
        (
            failure_untold,
            {"failing": 0.5},
            "reads tokens .* written",
        ),
        (send_from_elsewhere, {"sent": 0.5}, "a sending of .* reads the KV of other tokens"),
        (
            freed_while_sent,
            {"sent": 0.9, "seconds": 0.3},
            "a sending of .* (reads the KV|is under)",
        ),
    ],
)
def test_broken_remote_copies_are_found(break_it, extra, problem, asynchronous) -> None:
    options = remote(**extra) | {"asynchronous": asynchronous, "scheduler": "fcfs"}
    error = found(break_it, **options)
    assert error.step and error.block is not None
    with pytest.raises(DeviceError, match=problem):
        raise error


# Grammars


def structured(engine: VirtualEngine) -> Any:
    """The device, a request that samples by a grammar in the step that was submitted, the step."""
    engine.send(LOAD)
    engine.run(until=0.3)
    output = engine.scheduler.schedule()
    runner = engine.runner
    runner.begin(output)
    runner.submit(output)
    request = next(one for one in runner._pending.sampling if one is not None)
    request.structured = True
    return runner, request, output


def masks(*names: str, allowed: int = 40) -> GrammarOutput:
    bits = np.zeros((len(names), 1024), dtype=np.int32)
    bits[:, allowed // 32] = 1 << (allowed % 32)
    return GrammarOutput(list(names), bits)


def test_device_obeys_the_mask() -> None:
    with VirtualEngine(EngineConfig(**ENGINE)) as engine:
        runner, request, _ = structured(engine)
        names, tokens, _ = runner.sample(masks(request.name))
        assert tokens[names.index(request.name)] == [40]


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        (lambda name: masks("another"), "has a mask, and samples by no grammar"),
        (lambda name: GrammarOutput([name], masks(name, name).grammar_bitmask), "2 masks for 1"),
    ],
)
def test_mask_of_another_request_is_found(grammar, problem) -> None:
    with VirtualEngine(EngineConfig(**ENGINE)) as engine:
        runner, request, _ = structured(engine)
        with pytest.raises(DeviceError, match=problem):
            runner.sample(grammar(request.name))


def test_token_without_a_mask_is_found() -> None:
    """In the next step: a request that has ended meanwhile gets none either."""
    with VirtualEngine(EngineConfig(**ENGINE)) as engine:
        runner, request, output = structured(engine)
        names, tokens, _ = runner.sample(None)
        engine.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=tokens,
            ),
        )
        with pytest.raises(DeviceError, match="goes on after a token without a mask") as error:
            runner.begin(engine.scheduler.schedule())
        assert error.value.request == request.name


# The content of blocks, by itself


def sanitizer(window: int | None = None) -> tuple[Sanitizer, Any]:
    device = Sanitizer([Group(4, window)], 10)
    chain = Chain(list(range(40)))
    return device, device.table("a", chain, [[1, 2, 3, 4, 5]])


def test_adapter_is_part_of_the_content() -> None:
    device, table = sanitizer()
    device.begin_step(1, 0.0)
    device.compute(table, 0, 8)
    same = device.table("b", Chain(list(range(40))), [[1, 2, 6]])
    other = device.table("c", Chain(list(range(40)), salt=3), [[1, 2, 7]])
    device.begin_step(2, 1.0)
    device.compute(same, 8, 9)
    with pytest.raises(DeviceError, match=r"reads tokens 0 to 4 .*last written by a in step 1"):
        device.compute(other, 8, 9)


def test_image_is_part_of_the_content() -> None:
    device, table = sanitizer()
    device.begin_step(1, 0.0)
    device.compute(table, 0, 8)
    other = device.table("c", Chain(list(range(40)), images={5: 99}), [[1, 2, 7]])
    with pytest.raises(DeviceError, match="reads tokens 4 to 8"):
        device.compute(other, 8, 9)


def test_blocks_before_the_window_are_not_read() -> None:
    device, table = sanitizer(window=4)
    device.begin_step(1, 0.0)
    device.compute(table, 0, 12)
    device.clear([1])
    device.compute(table, 12, 13)
    resumed = device.table("a", table.chain, [[0, 0, 3, 8]])
    device.compute(resumed, 12, 13)
    lost = device.table("a", table.chain, [[0, 0, 0, 8]])
    with pytest.raises(DeviceError, match="has no KV for tokens 9 to 12"):
        device.compute(lost, 12, 13)


def states(exported: tuple[int, int] | None = None) -> tuple[Sanitizer, Any]:
    """A group of Mamba states; each step also leaves the state that is `exported`."""
    device = Sanitizer(
        [Group(4, state=True, exported=lambda start, end: (start == 0 and exported) or None)], 10
    )
    return device, device.table("a", Chain(list(range(40))), [[1, 2, 3, 4]])


def test_state_moves_to_the_block_of_the_last_token() -> None:
    device, table = states()
    device.begin_step(1, 0.0)
    device.compute(table, 0, 4)
    device.compute(device.table("hit", table.chain, [[1, 5]]), 4, 7)
    device.compute(table, 4, 5)
    device.compute(table, 5, 10)
    with pytest.raises(DeviceError, match=r"after 9 tokens where another state was written .*a in"):
        device.compute(device.table("b", table.chain, [[0, 0, 3]]), 9, 10)


@pytest.mark.parametrize(
    ("blocks", "problem"),
    [
        ([1, 6], "reads the state after 3 tokens where another state was written"),
        ([7, 6], "reads the state after 3 tokens where nothing was written"),
        ([0, 6], "has no state after 3 tokens"),
    ],
)
def test_state_of_another_place_is_found(blocks, problem) -> None:
    device, table = states()
    device.begin_step(1, 0.0)
    device.compute(table, 0, 4)
    with pytest.raises(DeviceError, match=problem):
        device.compute(device.table("b", table.chain, [blocks]), 3, 5)


def test_state_of_another_request_is_found() -> None:
    device, table = states()
    device.begin_step(1, 0.0)
    device.compute(table, 0, 4)
    device.begin_step(2, 1.0)
    device.compute(device.table("b", Chain([7] * 9), [[1, 5]]), 0, 4)
    device.begin_step(3, 2.0)
    with pytest.raises(DeviceError, match=r"another state .*by a in step 1, b in step 2"):
        device.compute(table, 4, 5)


def test_state_without_a_block_is_found() -> None:
    device, table = states()
    with pytest.raises(DeviceError, match="has no block for the state after 3 tokens"):
        device.compute(device.table("b", table.chain, [[0]]), 0, 3)


@pytest.mark.parametrize("place", [0, 1])
def test_state_is_exported_to_a_block(place) -> None:
    """And to nowhere where the table has none."""
    device, table = states(exported=(6, place))
    device.begin_step(1, 0.0)
    device.compute(device.table("a", table.chain, [[0, 2, 3]]), 0, 9)
    later = device.table("b", table.chain, [[0, 2, 7]])
    device.begin_step(2, 1.0)
    if place:
        device.compute(later, 6, 9)
    else:
        with pytest.raises(DeviceError, match="after 6 tokens where nothing was written"):
            device.compute(later, 6, 9)


def test_block_cleared_in_use() -> None:
    device, table = sanitizer()
    device.begin_step(1, 0.0)
    device.compute(table, 0, 8)
    device.clear([1])
    device.begin_step(2, 1.0)
    with pytest.raises(DeviceError, match="reads tokens 0 to 4 where nothing was written"):
        device.compute(device.table("b", table.chain, [[1, 2, 6]]), 8, 9)


def test_copy_on_write_takes_the_content_along() -> None:
    device, table = sanitizer()
    device.begin_step(1, 0.0)
    device.compute(table, 0, 6)
    device.duplicate(2, 7)
    device.compute(device.table("b", table.chain, [[1, 7]]), 6, 7)
    with pytest.raises(DeviceError, match="reads tokens 4 to 6"):
        device.compute(device.table("c", table.chain, [[1, 8]]), 6, 7)


def test_owners_are_the_last_three() -> None:
    device, _ = sanitizer()
    for number, name in enumerate("abcd"):
        device.begin_step(number, float(number))
        device.compute(device.table(name, Chain([number] * 8), [[1]]), 0, 4)
    assert device.owners(1) == ("b in step 1", "c in step 2", "d in step 3")
    assert device.owners(9) == ()
