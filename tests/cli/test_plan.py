"""`semsched plan`: table, files, the same bytes on any number of workers, invalid options."""

import csv
import json
import random
from pathlib import Path

import pytest
import yaml
from html_pages import read_page
from small_scenario import SMALL

from vllm_semantic_sched.cli import main, plan


def _plan(folder: Path, *options: str) -> int:
    content = SMALL | {
        "schedulers": {"FCFS": {"policy": "fcfs"}, "mine": {"policy": "priority"}},
        "slos": [{"ttft": 0.3, "percentile": 90.0}, {}, {}, {}, {}],
    }
    content["workload"] = content["workload"] | {"hints": True, "requests": 25}
    (folder / "plan.yaml").write_text(yaml.safe_dump(content))
    where = ["--scenario", str(folder / "plan.yaml"), "--output", str(folder)]
    return main(["plan", *where, "--quiet", *options])


def test_plan_compares_loads_and_engines_of_policies(tmp_path, capsys, monkeypatch) -> None:
    assert _plan(tmp_path, "--rate", "40") == 0
    out = capsys.readouterr().out
    assert "largest load" in out and "engines for the given load, urgency_aware" in out
    first = [(tmp_path / name).read_bytes() for name in ("plan.csv", "plan.json")]
    header, load, engines, *_ = first[0].decode().splitlines()
    assert header == ",FCFS,mine"
    _, fcfs, mine = load.split(",")[-3:]
    page = read_page(tmp_path / "report.html")
    assert page.tables["Plan"][1][1:] == load.split(",")[-2:]
    assert len(page.tables["Trials"]) > 10
    assert len(page.charts["Lowest share of requests that met their SLO, any level"]) == 2
    assert any(": running from" in label for label in page.labels("Seats at the given load: mine"))
    # Only the most urgent level has an SLO: serving it first allows more load.
    assert float(mine) > 2 * float(fcfs)
    assert int(engines.split(",")[-1]) < int(engines.split(",")[-2])

    monkeypatch.setattr(plan, "save_page", lambda page, folder: [])  # the page has been read
    assert _plan(tmp_path, "--rate", "40", "--workers", "2") == 0
    assert [(tmp_path / name).read_bytes() for name in ("plan.csv", "plan.json")] == first


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--set", "slos=[]"], "has no SLO for any level"),
        (["--policy", "emms"], "'ems'"),
        (["--trace", "no.jsonl"], "no.jsonl"),
        (["--set", "sweep=[{seed: [1, 2]}]"], "sweep"),
    ],
)
def test_invalid_plans_are_refused(tmp_path, capsys, options, words) -> None:
    assert _plan(tmp_path, *options) == 2
    assert words in capsys.readouterr().err


def test_long_prompts_an_a100_serves_do_not_pile_up(tmp_path) -> None:
    """The paper's profile of a 7B model puts 35 s on a prompt of 8,000 tokens; in reality an A100
    prefills more than 10,000 tokens of an 8B model per second."""
    draw = random.Random(0)
    rows = [
        {
            "arrival": number / 0.8,
            "prompt_tokens": round(1000 * 16 ** draw.random()),
            "output_tokens": draw.randint(50, 300),
        }
        for number in range(80)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    slos = "slos=[{ttft: 5, tpot: 0.1, percentile: 95}, {}, {}]"
    engine = "engine={kind: vllm, profile: default, seats: 256, kv_blocks: 24000}"
    options = ["--trace", str(trace), "--policy", "tiers", "--quiet"]
    options += ["--set", slos, "--set", engine]
    assert main(["plan", "--output", str(tmp_path), *options]) == 0
    with (tmp_path / "plan.csv").open() as file:
        found = {row[0]: row[-1] for row in csv.reader(file)}
    assert found["engines for the given load, least_loaded"] == "1"
    for level in range(3):
        assert float(found[f"level {level}: ttft_p99"]) < 30
