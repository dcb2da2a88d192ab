"""Reloads the policy file while the server runs: a background thread reads it, and the scheduler
switches to the result between two steps. If it is invalid, the old policy stays in force."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import parent_process
from typing import Any

from vllm_semantic_sched.engine.guard import logger
from vllm_semantic_sched.engine.metrics.counters import Counters
from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.section import PolicyError
from vllm_semantic_sched.policy.live import (
    PolicyVersion,
    changed_keys,
    check_live_change,
    fingerprint,
)
from vllm_semantic_sched.policy.profile.formula import EngineProfile

Load = Callable[[], tuple[Policy, EngineProfile]]


class LivePolicy:
    """Holds the version of the policy in force, and loads the policy that may replace it.

    `request_load` may be called from any thread and from a signal handler; all other methods only
    from the scheduling thread.

    Args:
        load: reads the server's policy and profile; raises PolicyError.
        switch: puts them in force.

    Attributes:
        loaded: what was read and waits for `adopt`.
    """

    def __init__(
        self,
        core: SchedulingCore,
        load: Load,
        switch: Callable[[Policy, EngineProfile], None],
        counters: Counters,
    ) -> None:
        self._core = core
        self._load = load
        self._switch = switch
        self._counters = counters
        self.version = PolicyVersion(1, fingerprint(core.policy, core.estimates.scale.given))
        self._report: dict[str, Any] = {"result": "started"}
        self.loaded: tuple[Policy, EngineProfile] | PolicyError | None = None
        self._requests: queue.SimpleQueue[Future[None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread that reads the file."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name="semsched-policy-loader", daemon=True
            )
            self._thread.start()

    def request_load(self) -> Future[None]:
        """Have the background thread read the file; the future is done when `adopt` can decide."""
        done: Future[None] = Future()
        self._requests.put(done)
        return done

    def adopt(self) -> dict[str, Any]:
        """Switch to the policy that was read since the last call, if it is valid.

        Returns:
            The outcome of the latest reload: `result` (started, adopted, unchanged, refused),
            `version`, `fingerprint`, `changed` keys if adopted, `reason` if refused.
        """
        loaded, self.loaded = self.loaded, None
        if loaded is not None:
            # Reported if the next line raises.
            self._report = {"result": "refused", "reason": "an exception; see the server's log"}
            self._report = self._decide(loaded)
            self._counters.add("policy_reloads", self._report["result"])
        version = {"version": self.version.number, "fingerprint": self.version.fingerprint}
        return self._report | version

    def close(self) -> None:
        self._requests.put(None)

    def _decide(self, loaded: tuple[Policy, EngineProfile] | PolicyError) -> dict[str, Any]:
        try:
            if isinstance(loaded, PolicyError):
                raise loaded
            policy, profile = loaded
            check_live_change(self._core.policy, policy)
            self._core.check(policy)
        except PolicyError as problem:
            logger.error(
                "Semantic scheduling: the policy was not reloaded, version %d stays in force: %s",
                *(self.version.number, problem),
            )
            return {"result": "refused", "reason": str(problem)}
        new_fingerprint = fingerprint(policy, profile)
        if new_fingerprint == self.version.fingerprint:
            return {"result": "unchanged"}
        changed = changed_keys(self._core.policy, policy)
        if profile != self._core.estimates.scale.given:
            changed.append("the engine profile's coefficients")
        self._switch(policy, profile)
        self.version = PolicyVersion(self.version.number + 1, new_fingerprint)
        logger.info(
            "Semantic scheduling: policy version %d (%s) is in force; changed: %s.",
            *(self.version.number, self.version.fingerprint, ", ".join(changed)),
        )
        return {"result": "adopted", "changed": changed}

    def _serve(self) -> None:
        while (done := self._requests.get()) is not None:
            try:
                self.loaded = self._load()
            except PolicyError as problem:
                self.loaded = problem
            except Exception as error:  # a bad file must not end the thread
                self.loaded = PolicyError(f"{type(error).__name__}: {error}")
            done.set_result(None)


def reload_on_hangup(reload: Callable[[], Any]) -> bool:
    """Make SIGHUP reload instead of ending this process, if vLLM started the process and
    `hangup_may_reload` permits it; whether it now does."""
    if parent_process() is None or not hangup_may_reload():
        return False
    signal.signal(signal.SIGHUP, lambda number, frame: reload())
    return True


def hangup_may_reload() -> bool:
    """Whether SIGHUP may reload instead of ending the process: this is its main thread, and it has
    no controlling terminal, or was started with nohup. With a terminal the signal means that the
    terminal was closed, and an engine that outlives its server would keep the accelerator's
    memory."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return True
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return True
    return False
