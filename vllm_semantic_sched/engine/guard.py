"""Keeps an exception in this package from stopping the server."""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

TASKS: Mapping[str, str] = {
    # In the HTTP server
    "hints": "passing hints on",
    "tenant": "naming the tenant",
    "reading": "passing a reading on",
    "engine_choice": "choosing an engine",
    "engine_counts": "counting requests at engines",
    # Requests
    "arrival": "reading a new request",
    "unread_arrival": "serving a request that could not be read",
    "admission": "admitting a request",
    "predictions": "applying predictions",
    "prediction": "applying a prediction",
    "start": "starting a request",
    "first_tokens": "noting first tokens",
    "finish": "finishing a request",
    "endings": "ending requests",
    "refusals": "telling clients of refused requests",
    "removal": "forgetting a request",
    "session": "restoring a session",
    "session_input": "reading a session's input",
    # Waiting queue
    "queue_add": "queueing a request",
    "queue_return": "queueing a request again",
    "queue_move": "moving a request",
    "queue_skip": "skipping a request",
    "cache_order": "keeping urgent conversations in the prefix cache",
    "queue_aside": "setting aside requests that cannot start",
    "queue_remove": "taking a request out of the queue",
    "queue_next": "choosing the next request",
    "queue_list": "listing waiting requests",
    "queue_order": "putting the queue into order again",
    "kept_seats": "keeping seats",
    # A scheduling step
    "step": "deciding a step",
    "virtual_time": "advancing virtual time",
    "estimates": "revising estimates",
    "overdue": "ending what waited too long",
    "reservations": "keeping reservations",
    "idle_check": "looking for decisions",
    "cached_work": "ranking by uncached work",
    "room": "making room for urgent requests",
    "holds": "holding less urgent requests",
    "prefill_limits": "limiting prefills",
    "limit_reset": "restoring limits",
    "running_order": "ordering running requests",
    "preemption": "preempting a request",
    "admitted": "taking in admitted requests",
    # KV cache
    "kv_size": "measuring the KV cache",
    "kv_load": "loading KV",
    "resumptions": "timing resumptions",
    "host_copies": "dropping host copies",
    # Records
    "transition_record": "recording a transition",
    "first_token_record": "recording a first token",
    "hold_record": "recording a hold",
    "decision_record": "recording a decision",
    "waits": "recording why requests wait",
    "step_times": "timing steps",
    "observed_step": "observing a step",
    "statistics": "reporting statistics",
    # Operation
    "canary": "driving a canary",
    "policy_reload": "adopting a policy",
    "pause": "stopping the clock",
    "shutdown": "shutting down",
}
"""What fails under each value of the label `doing` of `semsched:policy_errors_total`. The policy
core and the scheduler name their tasks by these codes, which must not change: alerts use them."""

# Under vLLM's own logger, so that its handlers and levels apply.
logger = logging.getLogger("vllm.semantic_sched")


class _GuardedBlock:
    """Stateless, and so shared by all blocks of a task: a step enters ten of them."""

    __slots__ = ("_failed", "_task")

    def __init__(self, task: str, failed: Callable[[str], None]) -> None:
        self._task = task
        self._failed = failed

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._failed(self._task)
        return True


class Guard:
    """Runs parts of the scheduler and logs and counts their exceptions instead of raising them: one
    that leaves a scheduler kills the server. `count` adds 1 to a counter, by name and label. Tasks
    are named by the codes of `TASKS`."""

    def __init__(self, count: Callable[[str, str], None]) -> None:
        self._count = count
        self._reported: set[str] = set()
        self._blocks: dict[str, _GuardedBlock] = {}

    def __call__(self, task: str) -> _GuardedBlock:
        """Guard a block; use as a context manager."""
        block = self._blocks.get(task)
        if block is None:
            block = _GuardedBlock(task, self.failed)
            self._blocks[task] = block
        return block

    def failed(self, task: str) -> None:
        """Count the exception being handled; log its traceback the first time."""
        self._count("policy_errors", task)
        if task not in self._reported:
            self._reported.add(task)
            logger.exception(
                "Semantic scheduling failed while %s; vLLM's order applies there. Further "
                'failures are counted in semsched:policy_errors_total{doing="%s"} only.',
                TASKS.get(task, task),
                task,
            )


@contextmanager
def logged(result: str) -> Iterator[None]:
    """Log an exception, with what results from it, instead of raising it."""
    try:
        yield
    except Exception:
        logger.exception("Semantic scheduling: %s", result)


def guarded(default: Callable[..., _T]) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Decorate a method whose exception would end the server: it is logged once, counted by name in
    the object's `failures`, if any, and answered by `default`, whose parameters are named alike."""

    def decorate(method: Callable[_P, _T]) -> Callable[_P, _T]:
        failed = False

        @functools.wraps(method)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            nonlocal failed
            try:
                return method(*args, **kwargs)
            except Exception:
                if not failed:
                    failed = True
                    logger.exception("Semantic scheduling: %s failed", method.__qualname__)
                failures = getattr(args[0], "failures", None) if args else None
                if failures is not None:
                    failures[method.__name__] += 1
                return default(*args, **kwargs)

        call.default = default  # type: ignore[attr-defined]
        return call

    return decorate
