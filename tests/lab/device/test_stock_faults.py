"""Faults of vLLM itself that the emulated device has found, each as an expected failure. They
befall all schedulers; the fuzz keeps away from them."""

import pytest
import vllm

from vllm_semantic_sched.lab.device.load import LoadRequest
from vllm_semantic_sched.lab.device.remote import REMOTE_CONNECTOR
from vllm_semantic_sched.lab.device.virtual import run_virtual

pytestmark = pytest.mark.engine

FOUND_IN = "0.32"
strict = vllm.__version__.startswith(FOUND_IN)


@pytest.mark.xfail(
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
