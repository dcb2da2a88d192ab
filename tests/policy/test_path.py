"""Which files run when the next request is picked, and when its rank is computed."""

import re

from executed_files import PACKAGE, ExecutedFiles

from vllm_semantic_sched.policy.config import load_policy
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.profile.formula import load_profile

ARCHITECTURE = PACKAGE.parent / "docs" / "architecture.md"


def documented_path() -> set[str]:
    """The files that the page names for the next request and why."""
    section = ARCHITECTURE.read_text().partition("## The next request, and why")[2]
    return set(re.findall(r"`(policy/[a-z_/]+\.py)`", section.partition("\n## ")[0]))


def test_next_request_and_why_take_the_files_that_the_page_names() -> None:
    core = SchedulingCore(load_policy("ems"), load_profile("default"))
    for level in range(5):
        hint = core.read_hints({"urgency": level}, 0)
        job = core.arrive(core.draft(str(level), 50, 100, hint, awaits_prediction=False), 0.0)
        core.enqueue(job, core.waiting)
    files = ExecutedFiles()
    core.waiting.changed()  # nothing is remembered of the last choice
    with files.recording():
        first = core.waiting.peek()
        assert first is not None
        core.rank(first)
    assert first.request_id == "0"
    assert files.names == documented_path()
    assert len(files.names) <= 8
