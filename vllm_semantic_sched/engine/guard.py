"""Keeps an exception in this package from stopping the server."""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Under vLLM's own logger, so that its handlers and levels apply.
logger = logging.getLogger("vllm.semantic_sched")


class _GuardedBlock:
    """Stateless, and so shared by all blocks of a name: a step enters ten of them."""

    __slots__ = ("_doing", "_failed")

    def __init__(self, doing: str, failed: Callable[[str], None]) -> None:
        self._doing = doing
        self._failed = failed

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._failed(self._doing)
        return True


class Guard:
    """Runs parts of the scheduler and logs and counts their exceptions instead of raising them: one
    that leaves a scheduler kills the server. `count` adds 1 to a counter, by name and label."""

    def __init__(self, count: Callable[[str, str], None]) -> None:
        self._count = count
        self._reported: set[str] = set()
        self._blocks: dict[str, _GuardedBlock] = {}

    def __call__(self, doing: str) -> _GuardedBlock:
        """Guard a block that is `doing` something: the counter's label and part of the log."""
        block = self._blocks.get(doing)
        if block is None:
            block = self._blocks[doing] = _GuardedBlock(doing, self.failed)
        return block

    def failed(self, doing: str) -> None:
        """Count the exception being handled; log its traceback the first time."""
        self._count("policy_errors", doing)
        if doing not in self._reported:
            self._reported.add(doing)
            logger.exception(
                "Semantic scheduling failed while %s; vLLM's order applies there. Further "
                "failures are counted in semsched:policy_errors_total only.",
                doing,
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
