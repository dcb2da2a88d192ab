"""Changes the policy while the server runs: reloads it, or switches between two (a canary)."""

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import parent_process
from typing import Any

from vllm_semantic_sched.engine.guard import logger
from vllm_semantic_sched.engine.metrics.counters import Counters
from vllm_semantic_sched.policy import live
from vllm_semantic_sched.policy.canary import Canary, Plan, plain
from vllm_semantic_sched.policy.config import Policy, parse_policy
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.profile.formula import EngineProfile

_LOOK = 0.5  # seconds between two looks at the SLOs of a canary


class LivePolicy:
    """The version of the policy in force, and reloads: a thread reads the file (`load`), and the
    scheduler switches to the result between two steps (`switch`), unless it is invalid.

    `request_load` may be called from any thread and from a signal handler; all other methods only
    from the scheduling thread.
    """

    def __init__(
        self,
        core: SchedulingCore,
        load: Callable[[], tuple[Policy, EngineProfile]],
        switch: Callable[[Policy, EngineProfile], None],
        counters: Counters,
    ) -> None:
        self._core = core
        self.load = load
        self._switch = switch
        self._counters = counters
        given = core.estimates.scale.given
        self.version = live.PolicyVersion(1, live.fingerprint(core.policy, given))
        self._report: dict[str, Any] = {"result": "started"}
        self.loaded: tuple[Policy, EngineProfile] | PolicyError | None = None  # for `apply_loaded`
        self._requests: queue.SimpleQueue[Future[None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._serve, name="semsched-policy-loader", daemon=True
        )

    def start(self) -> None:
        """Start the thread that reads the file; later calls are no-ops."""
        if self._thread.ident is None:
            self._thread.start()

    def request_load(self) -> Future[None]:
        """Have the background thread read the file, for `apply_loaded` once the future is done."""
        done: Future[None] = Future()
        self._requests.put(done)
        return done

    def apply_loaded(self) -> dict[str, Any]:
        """Switch to the policy that was read since the last call, if it is valid. Returns the
        outcome of the latest reload: `result` (started, adopted, unchanged, refused), `version`,
        `fingerprint`, `changed` keys if adopted, `reason` if refused."""
        loaded = self.loaded
        self.loaded = None
        if loaded is not None:
            # Reported if the next line raises.
            self._report = {"result": "refused", "reason": "an exception; see the server's log"}
            self._report = self._decide(loaded)
            self._counters.add("policy_reloads", self._report["result"])
        version = {"version": self.version.number, "fingerprint": self.version.fingerprint}
        return self._report | version

    def close(self) -> None:
        """End the thread that reads the file, after the reloads requested so far."""
        self._requests.put(None)

    def _decide(self, loaded: tuple[Policy, EngineProfile] | PolicyError) -> dict[str, Any]:
        try:
            if isinstance(loaded, PolicyError):
                raise loaded
            policy, profile = loaded
            live.check_live_change(self._core.policy, policy)
            self._core.check(policy)
        except PolicyError as problem:
            logger.error(
                "Semantic scheduling: the policy was not reloaded, version %d stays in force: %s",
                self.version.number,
                problem,
            )
            return {"result": "refused", "reason": str(problem)}
        version = live.PolicyVersion(self.version.number + 1, live.fingerprint(policy, profile))
        if version.fingerprint == self.version.fingerprint:
            return {"result": "unchanged"}
        changed = live.changed_keys(self._core.policy, policy)
        if profile != self._core.estimates.scale.given:
            changed.append("the engine profile's coefficients")
        self._switch(policy, profile)
        self.version = version
        logger.info(
            "Semantic scheduling: policy version %d (%s) is in force; changed: %s.",
            version.number,
            version.fingerprint,
            ", ".join(changed),
        )
        return {"result": "adopted", "changed": changed}

    def _serve(self) -> None:
        while True:
            done = self._requests.get()
            if done is None:
                return
            try:
                self.loaded = self.load()
            except PolicyError as problem:
                self.loaded = problem
            except Exception as error:  # a bad file must not end the thread
                self.loaded = PolicyError(f"{type(error).__name__}: {error}")
            done.set_result(None)


@dataclass(eq=False)
class CanaryDriver:
    """The canary of an engine, and how the last one ended. Only on the scheduling thread, between
    steps and before arrivals: on an idle engine it waits for the next request."""

    core: SchedulingCore
    switch: Callable[[Policy], None]  # puts a policy in force
    running: Canary | None = None
    arm: str = "current"  # the policy in force; the other one is "new"
    _policies: dict[str, Policy] = field(default_factory=dict)
    _next_look: float = 0.0
    _last: Canary | None = None
    _end: str = ""

    def start(self, content: Any, plan: Plan) -> None:
        """Start a canary of the policy whose file has this content. Raises PolicyError if one is
        running, or the policy is invalid or needs a restart."""
        if self.running is not None:
            raise PolicyError("a canary is running; stop it first")
        current = self.core.policy
        new = parse_policy(content, "the new policy")
        new = new.model_copy(update={"events": current.events, "profile": current.profile})
        live.check_live_change(current, new)
        self.core.check(new)
        self._policies = {"current": current, "new": new}
        # The SLOs in force now: a policy cannot meet its own by asking for less.
        self.running = Canary(plan, current.all_tiers, self.core.lifecycle.clock())
        self._last = self.running
        self.core.lifecycle.listeners.append(self.running)
        self._end = ""
        logger.info("Semantic scheduling: a canary began (%s).", plan)
        self.drive()

    def drive(self) -> None:
        """Switch policies if it is time, and end the canary if it is over or misses an SLO."""
        canary = self.running
        if canary is None:
            return
        now = self.core.lifecycle.clock()
        if now >= self._next_look:
            self._next_look = now + _LOOK
            broken = canary.broken(now)
            if broken:
                self.stop(f"rolled back: {broken}")
                return
            if canary.is_over(now):
                self.stop("over")
                return
        self._put_in_force(canary.arm(now))

    def stop(self, reason: str, keep: bool = False) -> None:
        """End the canary, if one runs. With `keep` the new policy stays until a reload."""
        if self.running is None:
            return
        self.core.lifecycle.listeners.remove(self.running)
        self.running = None
        self._end = reason
        logger.warning("Semantic scheduling: the canary ended: %s.", reason)
        kept = "new" if keep else "current"
        self._put_in_force(kept)
        self.arm = "current"

    def report(self) -> dict[str, Any]:
        """Plain values: `running`, `role` of the engine, `arm`, `end` (why the last one ended),
        `tiers`, `tallies` (see `policy.canary.plain`); empty if there was none."""
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
            self.switch(self._policies[arm])
            self.arm = arm


def reload_on_hangup(reload: Callable[[], Any]) -> bool:
    """Make SIGHUP reload instead of ending this process, if vLLM started the process and
    `hangup_may_reload` permits it; whether it now does."""
    if parent_process() is None or not hangup_may_reload():
        return False
    signal.signal(signal.SIGHUP, lambda number, frame: reload())
    return True


def hangup_may_reload() -> bool:
    """Whether SIGHUP may reload instead of ending the process: in its main thread, without a
    controlling terminal or under nohup. Else it means that the terminal was closed, and an engine
    that outlives its server would keep the accelerator's memory."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return True
    with contextlib.suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
        return False
    return True
