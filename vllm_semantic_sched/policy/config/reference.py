"""The policy in force, held once. Parts read it when they decide: a reload copies nothing."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from vllm_semantic_sched.policy.config import Policy

T = TypeVar("T")


class PolicyRef:
    """Holds the policy in force, and has the tables that are derived from it."""

    __slots__ = ("policy", "tables")

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.tables: list[Derived[Any]] = []

    def switch(self, policy: Policy) -> None:
        """Put another policy in force."""
        self.policy = policy
        for derived in self.tables:
            derived.refresh()


class Derived(Generic[T]):
    """A `table` computed from the policy in force, once for each policy."""

    __slots__ = ("_compute", "_ref", "table")

    def __init__(self, ref: PolicyRef, compute: Callable[[Policy], T]) -> None:
        self._ref = ref
        self._compute = compute
        self.refresh()
        ref.tables.append(self)

    def refresh(self) -> None:
        """Compute the table anew, also where something else that it depends on has changed."""
        self.table: T = self._compute(self._ref.policy)
