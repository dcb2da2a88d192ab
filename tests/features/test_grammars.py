"""Structured outputs: the same answers, and grammars that compile while their requests wait."""

from dataclasses import replace

import pytest
from engine_steps import EngineSteps, awaiting_grammar
from virtual_runs import FEATURE_LOAD, SCHEMA, WITHOUT_BLANKS, check_feature

pytestmark = pytest.mark.engine

SOON = 3  # steps


@pytest.mark.parametrize("drafts", [0, 2])
def test_structured_outputs_are_the_same(models, drafts) -> None:
    """Of every other request; also with drafts, which their grammars check. With drafts nobody sits
    out a step of vLLM's first model runner."""
    load = [
        replace(request, schema=SCHEMA) if number % 2 else request
        for number, request in enumerate(FEATURE_LOAD)
    ]
    check_feature(
        load,
        model=models("llama-3.1-8b"),
        options=WITHOUT_BLANKS,
        drafts=drafts,
        holds=not drafts,
    )


@pytest.mark.parametrize("seats", [2, 8])
def test_requests_run_beside_those_whose_grammars_compile(build, seats) -> None:
    """Also where all seats are taken, so that one has to be freed."""
    steps = EngineSteps(build(max_num_seqs=seats))
    steps.add("low1", "low2", urgency=4, output_tokens=60)
    steps.run()
    names = [f"grammar{number}" for number in range(100)]
    steps.add_requests(*(awaiting_grammar(name, urgency=0) for name in names))
    steps.run()
    steps.add("plain", urgency=2, output_tokens=5)
    assert steps.until_scheduled("plain", 20) in range(SOON + 1)
    assert not steps.first.keys() & set(names)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_request_starts_once_its_grammar_has_compiled(build, asynchronous) -> None:
    steps = EngineSteps(build(max_num_seqs=2, async_scheduling=asynchronous))
    steps.add("low1", "low2", urgency=4, output_tokens=60)
    steps.run()
    waiting = awaiting_grammar("urgent", urgency=0, output_tokens=5)
    steps.add_requests(waiting)
    steps.run(5)
    assert steps.scheduler.counters.total("preemptions") == 0
    waiting.structured_output_request.grammar = object()
    scheduled = steps.scheduler.schedule().num_scheduled_tokens
    assert "urgent" in scheduled
    assert steps.scheduler.counters.total("preemptions") == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_nobody_is_preempted_for_a_grammar_that_failed(build, asynchronous) -> None:
    """It ends with vLLM's error when a seat is free."""
    scheduler = build(max_num_seqs=1, async_scheduling=asynchronous)
    steps = EngineSteps(scheduler)
    steps.add("running", urgency=4, prompt_tokens=500, output_tokens=20)
    steps.run()
    failed = awaiting_grammar("failed", ValueError("no such rule"), urgency=0)
    steps.add_requests(failed)
    steps.run(5)
    assert scheduler.counters.total("preemptions") == 0
    steps.finish(60)
    assert "failed" not in steps.first
    assert steps.ended["failed"] <= steps.ended["running"] + SOON
