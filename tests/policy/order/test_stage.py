"""The stage gate (paper, Alg. 2)."""

import pytest

from vllm_semantic_sched.policy.config.order import Stage
from vllm_semantic_sched.policy.facts.profile import load_profile
from vllm_semantic_sched.policy.order.stage import prefill_token_limit

PROFILE = load_profile("a100-qwen1.5-4b")


@pytest.mark.parametrize(
    ("decoding", "prefill", "mode", "limited"),
    [
        (0, 3, "cap", True),
        (0, 3, "gate", True),
        (0, 3, "off", False),
        (0, 0, "gate", False),  # an equally urgent prefill is p* itself
        (1, 0, "gate", False),
        (1, 3, "gate", False),  # level 1 is not protected
        (None, 3, "gate", False),
        (0, None, "gate", False),
    ],
)
def test_steps_are_limited_beside_a_protected_decode_only(decoding, prefill, mode, limited) -> None:
    limit = prefill_token_limit(decoding, prefill, Stage(mode=mode), PROFILE)
    assert (limit is not None) == limited
    if mode == "gate" and limited:
        assert limit == 0


def test_cap_keeps_the_step_within_max_slowdown() -> None:
    stage = Stage(max_slowdown=2.0, min_prefill_tokens=1)
    limit = prefill_token_limit(0, 4, stage, PROFILE)
    assert limit is not None
    assert PROFILE.prefill(0, limit) <= 2.01 * PROFILE.gamma2 < PROFILE.prefill(0, limit + 2) * 1.01
    floor = prefill_token_limit(0, 4, Stage(max_slowdown=0.01, min_prefill_tokens=32), PROFILE)
    assert floor == 32
