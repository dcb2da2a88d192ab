"""Reads the policy file again while the server runs.

The file is read, parsed and validated on a thread of its own; the scheduler only swaps the result
in, between two steps. Whatever is wrong with the file, the old policy stays in force.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import parent_process
from typing import Any

from vllm_semantic_sched.engine.metrics.counters import Counters
from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.errors import PolicyError
from vllm_semantic_sched.policy.estimates.profile import EngineProfile
from vllm_semantic_sched.policy.live import (
    PolicyVersion,
    changed_keys,
    check_live_change,
    fingerprint,
)

Load = Callable[[], tuple[Policy, EngineProfile]]


class LivePolicy:
    """The policy in force, and the one that may replace it.

    `request_load` may be called from any thread and from a signal handler; everything else
    belongs to the scheduling thread.

    Args:
        load: reads policy and profile from where the server was told to find them. Raises
            PolicyError.
    """

    def __init__(
        self, core: SchedulingCore, load: Load, counters: Counters, logger: logging.Logger
    ) -> None:
        self._core = core
        self._load = load
        self._counters = counters
        self._logger = logger
        self.version = PolicyVersion(1, fingerprint(core.policy, core.profile_scale.given))
        self._report: dict[str, Any] = {"result": "started"}
        self._loaded: tuple[Policy, EngineProfile] | PolicyError | None = None
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
        """Read the file. The future is done once `adopt` has something to decide about; nothing
        but that is done in this call."""
        done: Future[None] = Future()
        self._requests.put(done)
        return done

    def adopt(self) -> dict[str, Any]:
        """Take over what was read since the last call, if it is valid.

        Returns:
            What became of the latest reload: `result` (started, adopted, unchanged, refused),
            `version`, `fingerprint`, `changed` keys if adopted, `reason` if refused.
        """
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            # Stands if the next line raises.
            self._report = {"result": "refused", "reason": "an exception; see the server's log"}
            self._report = self._decide(loaded)
            self._counters.add("policy_reloads", self._report["result"])
        return self._report | {
            "version": self.version.number,
            "fingerprint": self.version.fingerprint,
        }

    @property
    def has_news(self) -> bool:
        """Whether `adopt` has something to decide about."""
        return self._loaded is not None

    def close(self) -> None:
        """End the thread."""
        self._requests.put(None)

    def _decide(self, loaded: tuple[Policy, EngineProfile] | PolicyError) -> dict[str, Any]:
        try:
            if isinstance(loaded, PolicyError):
                raise loaded
            policy, profile = loaded
            check_live_change(self._core.policy, policy)
            self._core.check(policy)
        except PolicyError as problem:
            self._logger.error(
                "Semantic scheduling: the policy was not reloaded, version %d stays in force: %s",
                self.version.number,
                problem,
            )
            return {"result": "refused", "reason": str(problem)}
        print_of_new = fingerprint(policy, profile)
        if print_of_new == self.version.fingerprint:
            return {"result": "unchanged"}
        changed = changed_keys(self._core.policy, policy)
        if profile != self._core.profile_scale.given:
            changed.append("the engine profile's coefficients")
        self._core.adopt(policy, profile)
        self.version = PolicyVersion(self.version.number + 1, print_of_new)
        self._logger.info(
            "Semantic scheduling: policy version %d (%s) is in force; changed: %s.",
            self.version.number,
            self.version.fingerprint,
            ", ".join(changed),
        )
        return {"result": "adopted", "changed": changed}

    def _serve(self) -> None:
        while (done := self._requests.get()) is not None:
            try:
                self._loaded = self._load()
            except PolicyError as problem:
                self._loaded = problem
            except Exception as error:  # the thread must outlive whatever the file does to it
                self._loaded = PolicyError(f"{type(error).__name__}: {error}")
            done.set_result(None)


def reload_on_hangup(reload: Callable[[], Any]) -> bool:
    """Let SIGHUP reload instead of ending this process, if it is one that vLLM started and
    `hangup_may_reload`.

    Returns:
        Whether SIGHUP reloads from now on.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or parent_process() is None or not hangup_may_reload():
        return False
    signal.signal(signal.SIGHUP, lambda number, frame: reload())
    return True


def hangup_may_reload() -> bool:
    """Whether SIGHUP is free to mean something else than the end: no terminal controls this
    process, or it was started with nohup. Where a terminal is, the signal says that it was
    closed, and an engine that outlived its server would keep the accelerator's memory."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return True
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return True
    return False
