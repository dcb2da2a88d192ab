"""Faults of vLLM itself that the emulated device has found, each as an expected failure. They
befall all schedulers; the fuzz keeps away from them."""

import pytest
import vllm

from vllm_semantic_sched.lab.bench.prompts import Lengths
from vllm_semantic_sched.lab.device import virtual
from vllm_semantic_sched.lab.device.load import LoadConfig, LoadRequest, draw_load
from vllm_semantic_sched.lab.device.remote import REMOTE_CONNECTOR
from vllm_semantic_sched.lab.device.sanitizer import DeviceError
from vllm_semantic_sched.lab.device.virtual import run_virtual

pytestmark = pytest.mark.engine

FOUND_IN = "0.32"
strict = vllm.__version__.startswith(FOUND_IN)


@pytest.mark.xfail(
    raises=DeviceError,
    strict=strict,
    reason="vLLM 0.32: a prompt whose KV a connector loads as a whole gets the blocks of a window "
    "that ends after its last token. That token is computed again, and its window begins one token "
    "earlier: at some lengths, in a block that it does not have.",
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_whole_prompt_is_loaded_with_a_sliding_window(asynchronous) -> None:
    load = [
        LoadRequest(f"r{place}", 0.1 * place, 2, tuple(range(20 + place, 131 + place)), 5)
        for place in range(10)
    ]
    extra = {"found": 1.0, "whole": True}
    run_virtual(
        load,
        scheduler="fcfs",
        asynchronous=asynchronous,
        shape="sliding-8b",
        options={"hf_overrides": {"sliding_window": 64}},
        connector=REMOTE_CONNECTOR | {"kv_connector_extra_config": extra},
    )


@pytest.mark.xfail(
    raises=DeviceError,
    strict=strict,
    reason="vLLM 0.32: a request whose load beside steps failed has to load again, and vLLM admits "
    "it only if all prefills under way would fit beside it. It stays at the head of the requests "
    "that hold KV; those behind it, whose loads have ended, are the prefills under way.",
)
@pytest.mark.parametrize(("scheduler", "seed"), [("fcfs", 17), ("semantic", 4)])
def test_failed_loads_do_not_stop_the_engine(scheduler, seed, monkeypatch) -> None:
    monkeypatch.setattr(virtual, "_STALLED", 3.0)
    prompts, answers = Lengths(4.0, 0.9, 3, 280), Lengths(2.2, 0.8, 1, 60)
    load = draw_load(LoadConfig(100, 100.0, seed, (1, 1, 1, 1, 1), prompts, answers))
    extra = {"found": 0.8, "failing": 0.2, "lookups": 0 if scheduler == "fcfs" else 3}
    connector = REMOTE_CONNECTOR | {"kv_connector_extra_config": extra}
    run_virtual(
        load,
        scheduler=scheduler,
        policy={"correct_profile": False},
        profile="h100-8b",
        asynchronous=False,
        seats=2,
        blocks=150,
        max_model_len=384,
        shape="sliding-8b",
        options={"hf_overrides": {"sliding_window": 64}},
        connector=connector | {"kv_load_failure_policy": "recompute"},
        drafts=3,
        drafter="ngram_gpu",
        acceptance=1.0,
    )
