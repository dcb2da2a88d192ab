"""`semsched policy keys`."""

from vllm_semantic_sched.cli.console import describe_keys
from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.facts.section import keys_of
from vllm_semantic_sched.sim.sections import Settings


def test_every_key_is_described_with_its_meaning() -> None:
    for model in (Policy, Settings):
        lines = describe_keys(model).splitlines()
        for key in keys_of(model):
            place = next(n for n, line in enumerate(lines) if line.startswith(f"{key.name}:"))
            if key.meaning:
                assert lines[place + 1].strip().split()[0] == key.meaning.split()[0]
