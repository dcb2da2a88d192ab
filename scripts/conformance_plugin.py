"""A pytest plugin that puts SemanticScheduler in the place of vLLM's scheduler.

The tests import the class by name, so it is enough to exchange the name before they do. Environment
variables: SEMSCHED_POLICY (unset: vLLM's class stays), CONFORMANCE_DOOR (set: our middleware is
around each HTTP application), CONFORMANCE_CHOSEN (a file with the names of the tests to run,
without their folders).
"""

import asyncio
import inspect
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.middleware import Middleware as Layer
from vllm.v1.core.sched import async_scheduler, scheduler

from vllm_semantic_sched import Middleware
from vllm_semantic_sched.engine import vllm_api
from vllm_semantic_sched.engine.scheduler import AsyncSemanticScheduler, SemanticScheduler

# This comparison is how a release gets into the supported range.
os.environ.setdefault("SEMSCHED_ALLOW_UNTESTED_VLLM", "1")

OURS = "SEMSCHED_POLICY" in os.environ


class Substitute(vllm_api.Scheduler):
    """Builds a SemanticScheduler. Subclasses, and instances that a test makes without `__init__`,
    are vLLM's, as is every scheduler under the base policy `fcfs`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return SemanticScheduler(*args, **kwargs) if cls is Substitute else object.__new__(cls)


class AsyncSubstitute(vllm_api.AsyncScheduler):
    """The same for vLLM's asynchronous scheduler."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        own = cls is AsyncSubstitute
        return AsyncSemanticScheduler(*args, **kwargs) if own else object.__new__(cls)


if OURS:
    scheduler.Scheduler = Substitute
    async_scheduler.AsyncScheduler = AsyncSubstitute


_STOCK_STACK = FastAPI.build_middleware_stack


def _with_ours(app: FastAPI) -> Any:
    """The layers of an application, with ours outermost, as vLLM adds it."""
    app.user_middleware.insert(0, Layer(Middleware))
    return _STOCK_STACK(app)


if "CONFORMANCE_DOOR" in os.environ:
    FastAPI.build_middleware_stack = _with_ours


def pytest_configure(config: pytest.Config) -> None:
    """Declares vLLM's mark, which its own configuration file does elsewhere."""
    config.addinivalue_line("markers", "skip_global_cleanup: no clean-up after the test")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps the chosen tests, and skips vLLM's clean-up after each (a third of a second), which is
    for tests that load models."""
    for item in items:
        item.add_marker("skip_global_cleanup")
    file = os.environ.get("CONFORMANCE_CHOSEN")
    if file is None:
        return
    chosen = set(Path(file).read_text().splitlines())
    items[:] = [item for item in items if f"{item.path.stem}::{item.name}" in chosen]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs asynchronous tests, as the plugin does that vLLM uses."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_collection_finish(session: pytest.Session) -> None:
    """Stops a comparison of vLLM with itself, should their helpers be laid out anew."""
    helpers = sys.modules.get("tests.v1.core.utils")
    if OURS and helpers is not None and helpers.Scheduler is not Substitute:
        raise pytest.UsageError("vLLM's test helpers do not use SemanticScheduler")
