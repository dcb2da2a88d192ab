"""`semsched simulate`: files, invalid options, the same bytes on any number of workers."""

import sys
from pathlib import Path

import pytest
import yaml
from html_pages import read_page
from small_scenario import SMALL

from vllm_semantic_sched.cli import main, simulate
from vllm_semantic_sched.lab.report import runs
from vllm_semantic_sched.sim.metrics import METRICS

WAITING = "Normalized waiting (s/token) by level"


def _write(folder: Path, **changes) -> Path:
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump(SMALL | changes))
    return path


def test_one_worker_and_two_write_the_same_bytes(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(simulate, "save_page", lambda page, folder: [])  # other tests read pages
    path = _write(
        tmp_path,
        workload=SMALL["workload"] | {"requests": 10},
        repeats=2,
        sweep=[{"workload.rate": [2.0, 20.0]}],
        schedulers={"FCFS": {"policy": "fcfs"}, "semantic": {"policy": "ems"}},
    )
    folders = [tmp_path / name for name in ("one", "two")]
    for folder, workers in zip(folders, ("1", "2"), strict=True):
        options = ["--output", str(folder), "--workers", workers, "--quiet"]
        assert main(["simulate", "--scenario", str(path), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    tables = [line for line in lines if not line.startswith("written: ")]
    assert any("normalized_waiting" in line for line in tables)
    assert max(map(len, tables)) <= 100
    for name in ("results.csv", "results.json"):
        contents = [(folder / name).read_bytes() for folder in folders]
        assert contents[0] == contents[1]
    header, *rows = (folders[0] / "results.csv").read_text().splitlines()
    assert header.startswith("workload.rate,scheduler,level,count,refused,")
    assert len(rows) == 2 * 2 * 6


def test_page_has_every_metric_and_the_seats_of_large_runs_too(tmp_path) -> None:
    path = _write(tmp_path, schedulers={"FCFS": {"policy": "fcfs"}, "mine": {"policy": "ems"}})
    command = ["simulate", "--scenario", str(path), "--output", str(tmp_path), "--quiet"]
    assert main([*command, "--set", "workload.requests=300"]) == 0
    page = read_page(tmp_path / "report.html")
    for table in ("By level", "All metrics"):
        header, *rows = page.tables[table]
        assert [row[:2] for row in rows if row[1] == "all"] == [["FCFS", "all"], ["mine", "all"]]
        assert rows[0][header.index("requests")].isdigit()
        assert rows[0][header.index("level")] == "0"
    assert len(page.tables["By level"][0]) <= 10 < len(page.tables["All metrics"][0])
    assert [*page.charts][:3] == ["Seats: FCFS", "Seats: mine", WAITING]
    seats = page.labels("Seats: mine")
    assert sum(": arrives at" in label for label in seats) == 200
    assert any(": running from" in label for label in seats)
    assert "200 of 300 requests are shown" in page.text
    assert any("waiting at" in label for label in page.labels("Queue depth: FCFS"))
    assert "requests: 300" in page.text  # the configuration


def test_levels_that_do_not_occur_are_not_shown(tmp_path) -> None:
    workload = SMALL["workload"] | {"requests": 30, "rate": 40.0, "mix": [1, 0, 0, 0, 1]}
    schedulers = {"mine": {"policy": "ems"}, "stock": {"policy": "fcfs"}}
    path = _write(tmp_path, workload=workload, schedulers=schedulers)
    command = ["simulate", "--scenario", str(path), "--output", str(tmp_path), "--quiet"]
    assert main(command) == 0
    page = read_page(tmp_path / "report.html")
    assert {row[1] for row in page.tables["By level"][1:]} == {"0", "4", "all"}
    assert "Half of level 0" in page.text and "level 1" not in page.text
    data = (tmp_path / "report.html").read_text().partition('id="charts"')[2]
    legends = data.partition("</script>")[0]
    assert "level 4" in legends and "level 2" not in legends
    assert [*page.charts][:2] == ["Seats: stock", "Seats: mine"], "the reference comes first"
    assert "(stock: " in page.text and "semsched simulate: mine and stock" in page.text


def test_metrics_have_names() -> None:
    assert runs.METRIC_NAMES.keys() == METRICS.keys()


def test_sweep_has_a_line_per_level(tmp_path) -> None:
    path = _write(tmp_path, sweep=[{"workload.rate": [2.0, 20.0]}])
    command = ["simulate", "--scenario", str(path), "--output", str(tmp_path), "--quiet"]
    assert main(command) == 0
    lines = read_page(tmp_path / "report.html").charts["Normalized waiting (s/token): semantic"]
    assert [line["x"] for line in lines] == [[0, 1]] * 6


def test_without_bokeh_the_page_is_left_out(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm_semantic_sched.lab.report.charts", raising=False)
    monkeypatch.setitem(sys.modules, "bokeh.embed", None)
    command = ["simulate", "--scenario", str(_write(tmp_path)), "--output", str(tmp_path)]
    assert main([*command, "--quiet", "--set", "workload.requests=8"]) == 0
    written = capsys.readouterr()
    assert "report.html: not written" in written.err
    assert "pip install '.[lab]' in a checkout" in written.err
    assert "report.html" not in written.out and not (tmp_path / "report.html").exists()
    assert (tmp_path / "results.json").is_file()


@pytest.mark.parametrize("command", [["whatif", "--policy", "ems"], ["corrections"]])
def test_commands_on_a_server_name_the_extra_that_they_need(
    command, tmp_path, capsys, monkeypatch
) -> None:
    for name in ("whatif", "training.corrections"):
        monkeypatch.setitem(sys.modules, f"vllm_semantic_sched.lab.{name}", None)
    (tmp_path / "file").write_text("")
    assert main([*command, str(tmp_path / "file")]) == 1
    assert "pip install '.[lab]' in a checkout" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--scenario", "paper-table7"], "Did you mean 'paper-table"),
        (["--set", "workload.request=8"], "did you mean 'requests'"),
        (["--set", "nonsense"], "FIELD=VALUE"),
        (["--set", "engine.kv_blocks=1"], "needs"),
        (["--metric", "speed"], "normalized_waiting"),
        (["--set", "sweep=[{seed: [1, 2]}]", "--set", "seed=3"], "sweep sets this field"),
        (
            ["--metric", "slo_met", "--set", "schedulers.semantic.policy=sjf"],
            "neither the scenario nor a policy",
        ),
    ],
)
def test_invalid_options_are_named(tmp_path, capsys, options, words) -> None:
    scenario = [] if "--scenario" in options else ["--scenario", str(_write(tmp_path))]
    command = ["simulate", *scenario, "--output", str(tmp_path / "out"), "--quiet", *options]
    assert main(command) == 2
    assert words in capsys.readouterr().err


def test_usage_shows_what_is_needed(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    usage, _, _ = capsys.readouterr().out.partition("\n\n")
    assert "--scenario FILE|NAME --output DIR" in usage and "[--scenario" not in usage
    assert main(["simulate"]) == 2
    assert "needs --scenario and --output, or --keys" in capsys.readouterr().err


def test_every_key_is_explained(capsys) -> None:
    assert main(["simulate", "--keys"]) == 0
    out = capsys.readouterr().out
    for key in ("workload.arrivals", "engine.seats", "predictor.hold", "workload.prompt.kind"):
        assert key in out
