"""Runs a canary on this engine: switches between two policies, and back for good when it ends.

The scheduler drives it between steps and before arrivals, so that it needs nobody outside. On an
idle engine it waits for the next request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_semantic_sched.engine.guard import logger
from vllm_semantic_sched.policy.canary import Canary, Plan, plain
from vllm_semantic_sched.policy.config import Policy, parse_policy
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.section import PolicyError
from vllm_semantic_sched.policy.live import check_live_change

_LOOK = 0.5  # seconds between two looks at the promises


class CanaryDriver:
    """The canary of an engine, and how the last one ended. Only on the scheduling thread.

    Args:
        switch: puts a policy in force.
        clock: that of `Job.arrival`.

    Attributes:
        running: None without one.
        arm: the policy in force: `current`, or `new`.
    """

    def __init__(
        self, core: SchedulingCore, switch: Callable[[Policy], None], clock: Callable[[], float]
    ) -> None:
        self._core = core
        self._switch = switch
        self._clock = clock
        self._policies: dict[str, Policy] = {}
        self._next_look = 0.0
        self._last: Canary | None = None
        self._end = ""
        self.running: Canary | None = None
        self.arm = "current"

    def start(self, content: Any, plan: Plan) -> None:
        """Start a canary of the policy whose file has this content.

        Raises:
            PolicyError: one is running, or the policy is invalid or needs a restart.
        """
        if self.running is not None:
            raise PolicyError("a canary is running; stop it first")
        current = self._core.policy
        new = parse_policy(content, "the new policy")
        new = new.model_copy(update={"events": current.events, "profile": current.profile})
        check_live_change(current, new)
        self._core.check(new)
        self._policies = {"current": current, "new": new}
        # The promises in force now: a policy cannot keep its own by promising less.
        self.running = self._last = Canary(plan, current.all_tiers, self._clock())
        self._core.lifecycle.listeners.append(self.running)
        self._end = ""
        logger.info("Semantic scheduling: a canary began (%s).", plan)
        self.drive()

    def drive(self) -> None:
        """Switch policies if it is time, and end the canary if it is over or breaks a promise."""
        canary, now = self.running, self._clock()
        if canary is None:
            return
        if now >= self._next_look:
            self._next_look = now + _LOOK
            broken = canary.broken(now)
            if broken or canary.is_over(now):
                self.stop(f"rolled back: {broken}" if broken else "over")
                return
        self._put_in_force(canary.arm(now))

    def stop(self, reason: str, keep: bool = False) -> None:
        """End the canary, if one is running. With `keep` the new policy stays in force, until the
        next reload or restart."""
        if self.running is None:
            return
        self._core.lifecycle.listeners.remove(self.running)
        self.running, self._end = None, reason
        logger.warning("Semantic scheduling: the canary ended: %s.", reason)
        self._put_in_force("new" if keep else "current")
        self.arm = "current"

    def report(self) -> dict[str, Any]:
        """Plain values: `running`, `role` of the engine, `arm`, `end` (why the last one ended),
        `tiers`, `tallies` (see `policy.canary.of_plain`); empty if there was none."""
        if self._last is None:
            return {}
        return {
            "running": self.running is not None,
            "role": self._last.plan.role,
            "arm": self.arm,
            "end": self._end,
            "tiers": list(self._policies["current"].tier_names),
            "tallies": plain(self._last.tallies),
        }

    def _put_in_force(self, arm: str) -> None:
        if arm != self.arm:
            self._switch(self._policies[arm])
            self.arm = arm
