"""One holder of the policy in force."""

from jobs import policy_of, policy_ref

from vllm_semantic_sched.policy.config.reference import Derived


def test_table_is_computed_once_for_each_policy_in_force() -> None:
    computed = []
    ref = policy_ref()

    def level(policy) -> int:
        computed.append(policy)
        return policy.default_level

    derived = Derived(ref, level)
    assert (derived.table, derived.table) == (2, 2)
    ref.switch(policy_of(default_level=4))
    assert (derived.table, derived.table) == (4, 4)
    assert len(computed) == 2
    derived.refresh()
    assert len(computed) == 3
