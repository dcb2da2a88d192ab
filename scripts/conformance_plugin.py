"""A pytest plugin that puts SemanticScheduler in the place of vLLM's scheduler.

The tests import the class by name, so it is enough to exchange the name before they do.
"""

from __future__ import annotations

import sys

import pytest
from packaging.specifiers import SpecifierSet
from vllm.v1.core.sched import async_scheduler, scheduler

from vllm_semantic_sched.engine import version
from vllm_semantic_sched.engine.scheduler import AsyncSemanticScheduler, SemanticScheduler

# Any release: this comparison is how one comes into the supported range.
version.SUPPORTED = SpecifierSet()
scheduler.Scheduler = SemanticScheduler
async_scheduler.AsyncScheduler = AsyncSemanticScheduler


def pytest_collection_finish(session: pytest.Session) -> None:
    """Stops a comparison of vLLM with itself, should their helpers be laid out anew."""
    helpers = sys.modules.get("tests.v1.core.utils")
    if helpers is not None and helpers.Scheduler is not SemanticScheduler:
        raise pytest.UsageError("vLLM's test helpers do not use SemanticScheduler")
