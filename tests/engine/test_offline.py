"""SemanticScheduler in an offline `LLM`."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

SCRIPT = Path(__file__).with_name("offline_engine.py")


@pytest.fixture(scope="module")
def reports(slim_model, tmp_path_factory, run_offline) -> dict[str, dict]:
    """By mode."""
    policy = tmp_path_factory.mktemp("offline") / "mine.yaml"
    policy.write_text("dedup: waiting\n")
    printed = run_offline(SCRIPT, slim_model, policy, "in turn", "asynchronous")
    lines = [line for line in printed.splitlines() if line.startswith('{"mode": ')]
    return {report["mode"]: report for report in map(json.loads, lines)}


@pytest.mark.parametrize("mode", ["in turn", "asynchronous"])
def test_hints_grammars_predictions_and_refusals_work_offline(reports, mode) -> None:
    report = reports[mode]
    assert report["asynchronous"] == (mode == "asynchronous")
    assert len(report["chosen"]) == 2 and set(report["chosen"]) <= {"yes" * 20, "no" * 20}
    assert report["preempted"] > 0
    assert [len(tokens) for tokens in report["tokens"]] == [20] * 8
    assert all(tokens == report["tokens"][0] for tokens in report["tokens"])
    assert report["invalid"] == 6
    assert report["predicted"] > 0
    assert report["errors"] == 0
    assert report["left"] == 0
    assert report["refused"] == ["superseded", "error", True]
    assert report["served"] == [None, 5]
