"""Reference tables of policy keys."""

import pytest

from vllm_semantic_sched.admin.reference import describe_keys, effect_of
from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.facts.section import keys_of
from vllm_semantic_sched.policy.overload.refusal import Code
from vllm_semantic_sched.sim.sections import Settings


def test_effect_is_that_of_the_smallest_listed_group() -> None:
    assert effect_of("tiers[].slo.ttft") == effect_of("tiers[].slo")
    assert effect_of("tiers[].queue.timeout").codes == (Code.QUEUE_TIMEOUT,)
    assert effect_of("predictor.mode") == effect_of("predictor")
    with pytest.raises(KeyError):
        effect_of("no_such_key.inner")


def test_every_key_is_described_with_its_meaning() -> None:
    for model in (Policy, Settings):
        lines = describe_keys(model).splitlines()
        for key in keys_of(model):
            place = next(n for n, line in enumerate(lines) if line.startswith(f"{key.name}:"))
            if key.meaning:
                assert lines[place + 1].strip().split()[0] == key.meaning.split()[0]
