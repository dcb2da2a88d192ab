"""`semsched plan`: table, files, the same bytes on any number of workers, invalid options."""

from pathlib import Path

import pytest
import yaml
from html_pages import read_page
from small_scenario import SMALL

from vllm_semantic_sched.cli import main


def _plan(folder: Path, *options: str) -> int:
    content = SMALL | {
        "schedulers": {"FCFS": {"policy": "fcfs"}, "mine": {"policy": "priority"}},
        "slos": [{"ttft": 0.3, "percentile": 90.0}, {}, {}, {}, {}],
    }
    content["workload"] = content["workload"] | {"hints": True}
    (folder / "plan.yaml").write_text(yaml.safe_dump(content))
    where = ["--scenario", str(folder / "plan.yaml"), "--output", str(folder)]
    return main(["plan", *where, "--quiet", *options])


def test_plan_compares_loads_and_engines_of_policies(tmp_path, capsys) -> None:
    assert _plan(tmp_path, "--rate", "40") == 0
    out = capsys.readouterr().out
    assert "largest load" in out and "engines for the given load, urgency_aware" in out
    first = [(tmp_path / name).read_bytes() for name in ("plan.csv", "plan.json")]
    assert (tmp_path / "plan.png").stat().st_size > 5000
    header, load, engines, *_ = first[0].decode().splitlines()
    assert header == ",FCFS,mine"
    _, fcfs, mine = load.split(",")[-3:]
    page = read_page(tmp_path / "report.html")
    assert page.tables["Plan"][1][1:] == load.split(",")[-2:]
    assert len(page.tables["Trials"]) > 10
    assert len(page.charts["Lowest share of kept promises, any level"]) == 2
    assert any(": running from" in label for label in page.labels("Seats at the given load: mine"))
    # Only the most urgent level has a promise: serving it first allows more load.
    assert float(mine) > 2 * float(fcfs)
    assert int(engines.split(",")[-1]) < int(engines.split(",")[-2])

    assert _plan(tmp_path, "--rate", "40", "--workers", "2") == 0
    assert [(tmp_path / name).read_bytes() for name in ("plan.csv", "plan.json")] == first


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--set", "slos=[]"], "promises nothing"),
        (["--policy", "emms"], "'ems'"),
        (["--trace", "no.jsonl"], "no.jsonl"),
        (["--set", "sweep=[{seed: [1, 2]}]"], "sweep"),
    ],
)
def test_invalid_plans_are_refused(tmp_path, capsys, options, words) -> None:
    assert _plan(tmp_path, *options) == 2
    assert words in capsys.readouterr().err
