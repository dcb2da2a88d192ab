"""The gate for prefills (paper, Alg. 2), and who makes way for a newcomer."""

import pytest
from jobs import make_job

from vllm_semantic_sched.policy.config.order import Stage
from vllm_semantic_sched.policy.holds import gates_prefills, prefills_that_yield


@pytest.mark.parametrize(
    ("decoding", "prefill", "mode", "gated"),
    [
        (0, 3, "gate", True),
        (0, 3, "off", False),
        (0, 0, "gate", False),  # an equally urgent prefill is p* itself
        (1, 0, "gate", False),
        (1, 3, "gate", False),  # level 1 is not protected
        (None, 3, "gate", False),
    ],
)
def test_prefills_wait_beside_a_protected_decode_only(decoding, prefill, mode, gated) -> None:
    assert gates_prefills(decoding, prefill, Stage(mode=mode)) == gated


def test_less_urgent_prefills_yield_if_the_newcomer_does_not_fit() -> None:
    newcomer = make_job(0, request_id="urgent", prompt_tokens=100)
    equal = make_job(0, request_id="equal", prompt_tokens=50)
    other = make_job(3, request_id="other", prompt_tokens=50)
    assert prefills_that_yield(newcomer, [equal, other], 199) == [other]
    assert prefills_that_yield(newcomer, [equal, other], 200) == []
