"""A pytest plugin that replaces vLLM's scheduler by SemanticScheduler.

The tests import the class by name, so the plugin rebinds that name before they do.
"""

from __future__ import annotations

import sys

import pytest
from packaging.specifiers import SpecifierSet
from vllm.v1.core.sched import async_scheduler, scheduler

from vllm_semantic_sched.engine import version
from vllm_semantic_sched.engine.scheduler import AsyncSemanticScheduler, SemanticScheduler

# Accept any release: this comparison decides which ones are supported.
version.SUPPORTED = SpecifierSet()
scheduler.Scheduler = SemanticScheduler
async_scheduler.AsyncScheduler = AsyncSemanticScheduler


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fails if the test helpers use another class, as vLLM would be compared with itself."""
    helpers = sys.modules.get("tests.v1.core.utils")
    if helpers is not None and helpers.Scheduler is not SemanticScheduler:
        raise pytest.UsageError("vLLM's test helpers do not use SemanticScheduler")
