"""Adapters, images and grammars on the emulated device, in virtual time."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from virtual_runs import SCHEMA, WITHOUT_BLANKS

from vllm_semantic_sched.lab.device.load import Image, Lengths, LoadConfig, LoadRequest, draw_load
from vllm_semantic_sched.lab.device.model import SHAPES
from vllm_semantic_sched.lab.device.sanitizer import DeviceError
from vllm_semantic_sched.lab.device.virtual import EngineConfig, VirtualEngine, run_virtual

pytestmark = pytest.mark.engine

# Prompts that share their beginnings, which are other KV with another adapter or image.
LOAD = draw_load(
    LoadConfig(
        requests=24,
        rate=60.0,
        prompts=Lengths(5.2, 0.5, 20, 400),
        answers=Lengths(4, 0.5, 2, 150),
        prefixes=2,
        prefix_tokens=64,
    )
)
CHANCE = random.Random(5)
ADAPTERS = [replace(one, adapter=CHANCE.randint(0, 4)) for one in LOAD]
GRAMMARS = [replace(one, schema=SCHEMA) if one.level % 2 else one for one in LOAD]
IMAGE_TOKEN = SHAPES["idefics3-8b"]["image_token_id"]


def with_image(one: LoadRequest, name: str, tokens: int, offset: int = 20) -> LoadRequest:
    prompt = (*one.prompt[:offset], *[IMAGE_TOKEN] * tokens, *one.prompt[offset:])
    return replace(one, prompt=prompt, images=(Image(name, offset, tokens),))


@pytest.fixture
def options(models) -> Callable[[str], dict[str, Any]]:
    """Of the engine, by kind of load."""

    def build(kind: str) -> dict[str, Any]:
        if kind == "images":
            return {"shape": "idefics3-8b", "model": models("idefics3-8b")}
        return {"model": models("llama-3.1-8b"), "options": WITHOUT_BLANKS}

    return build


FEW = {"seats": 8, "blocks": 64, "budget": 128, "max_model_len": 1000}


# Adapters


def extra_seconds(load: Sequence[LoadRequest], **options: Any) -> list[float]:
    """Of each step, beside those of the profile: those that are not zero."""
    ran = run_virtual(load, scheduler="fcfs", **options)
    profile = ran.engine.runner.profile
    more = [step.end - step.begin - profile.step(step.batch) for step in ran.steps]
    return [round(one, 6) for one in more if one > 1e-9]


def test_adapter_is_loaded_once_while_there_is_room() -> None:
    def load(*adapters: int) -> list[LoadRequest]:
        return [
            replace(LOAD[0], name=f"r{at}", arrival=at * 60.0, adapter=adapter)
            for at, adapter in enumerate(adapters)
        ]

    assert extra_seconds(load(1, 1, 2, 1), adapters=2) == [0.008] * 2
    assert extra_seconds(load(1, 2, 3, 2, 1), adapters=2) == [0.008] * 4
    assert extra_seconds(load(0, 0), adapters=2) == []


def test_adapter_over_the_limit_is_found() -> None:
    with VirtualEngine(EngineConfig(scheduler="fcfs", adapters=1)) as engine:
        engine.send(ADAPTERS)
        engine.scheduler.lora_config.max_loras = 4
        with pytest.raises(DeviceError, match="adapters, over 1") as error:
            engine.run()
        assert error.value.step and error.value.request


# Images


def test_image_is_encoded_once(options) -> None:
    def load(*names: str) -> list[LoadRequest]:
        return [
            replace(with_image(LOAD[0], name, 200), name=f"r{at}", arrival=at * 60.0)
            for at, name in enumerate(names)
        ]

    assert extra_seconds(load("cat", "cat", "dog"), **options("images")) == [0.004] * 2


def test_image_used_after_it_was_freed_is_found(options) -> None:
    """Its tokens take several steps."""
    load = [with_image(LOAD[0], "cat", 400)]
    few = {"scheduler": "fcfs", "budget": 128, "asynchronous": False}
    with VirtualEngine(EngineConfig(**few, **options("images"))) as engine:
        engine.send(load)
        worker = engine.core.model_executor.driver_worker.worker
        execute = worker.execute_model

        def free(output: Any) -> Any:
            if output.scheduled_cached_reqs.req_ids:
                output.free_encoder_mm_hashes = ["cat"]
            return execute(output)

        worker.execute_model = free
        with pytest.raises(DeviceError, match="step 2, request r0: uses image cat, not encoded"):
            engine.run()


def test_image_is_encoded_again_after_a_reset(options) -> None:
    load = [
        replace(with_image(LOAD[0], "cat", 200), name=name, arrival=moment)
        for name, moment in (("a", 0.0), ("b", 60.0))
    ]
    with VirtualEngine(EngineConfig(**options("images"))) as engine:
        engine.send(load)
        engine.run(until=30.0)
        assert engine.runner.encoded == {"cat"}
        engine.core.reset_encoder_cache()
        assert not engine.runner.encoded
        engine.run()
        assert engine.runner.encoded == {"cat"}


# Grammars


def test_answers_parse(options) -> None:
    ran = run_virtual(GRAMMARS, **FEW, **options("grammars"))
    tokenizer = ran.engine.core.structured_output_manager.tokenizer
    parsed = [
        json.loads(tokenizer.decode(record.tokens, skip_special_tokens=True))
        for record, one in zip(ran.records, GRAMMARS, strict=True)
        if one.schema is not None
    ]
    assert len(parsed) > 5
    assert all(one["level"] in range(5) and len(one["why"]) <= 40 for one in parsed)
    assert len({one["why"] for one in parsed}) > 5


def of_another_request(grammar: Any, last: Any) -> Any:
    grammar.grammar_bitmask[:2] = grammar.grammar_bitmask[1::-1].copy()
    return grammar


def of_another_step(grammar: Any, last: Any) -> Any:
    if grammar.structured_output_request_ids == last.structured_output_request_ids:
        grammar.grammar_bitmask[:] = last.grammar_bitmask
    return grammar


@pytest.mark.parametrize("change", [of_another_request, of_another_step])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_wrong_mask_is_found(change, asynchronous, options) -> None:
    """The device obeys it, and the answer is another."""
    config = EngineConfig(scheduler="fcfs", asynchronous=asynchronous, **options("grammars"))
    with VirtualEngine(config) as engine:
        engine.send(GRAMMARS)
        mask, masks = engine.scheduler.get_grammar_bitmask, []

        def changed(output: Any) -> Any:
            grammar = mask(output)
            if grammar is None:
                return None
            masks.append(replace(grammar, grammar_bitmask=grammar.grammar_bitmask.copy()))
            if len(masks) > 20 and len(grammar.structured_output_request_ids) > 1:
                return change(grammar, masks[-2])
            return grammar

        engine.scheduler.get_grammar_bitmask = changed
        with pytest.raises(DeviceError, match=r"got another answer|ended at another length"):
            engine.run()
