"""`semsched simulate`: files, invalid options, the same bytes on any number of workers."""

from pathlib import Path

import pytest
import yaml
from small_scenario import SMALL

from vllm_semantic_sched.cli import main


def _write(folder: Path, **changes) -> Path:
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump(SMALL | changes))
    return path


def test_one_worker_and_two_write_the_same_bytes(tmp_path, capsys) -> None:
    path = _write(
        tmp_path,
        repeats=2,
        sweep=[{"workload.rate": [2.0, 20.0]}],
        schedulers={"FCFS": {"policy": "fcfs"}, "semantic": {"policy": "ems"}},
    )
    folders = [tmp_path / name for name in ("one", "two")]
    for folder, workers in zip(folders, ("1", "2"), strict=True):
        options = ["--output", str(folder), "--workers", workers, "--quiet"]
        assert main(["simulate", "--scenario", str(path), *options]) == 0
    assert "normalized_waiting" in capsys.readouterr().out
    for name in ("results.csv", "results.json"):
        contents = [(folder / name).read_bytes() for folder in folders]
        assert contents[0] == contents[1]
    assert (folders[0] / "normalized_waiting.png").stat().st_size > 1000
    header, *rows = (folders[0] / "results.csv").read_text().splitlines()
    assert header.startswith("workload.rate,scheduler,level,count,refused,")
    assert len(rows) == 2 * 2 * 6


def test_small_run_gets_a_gantt_chart(tmp_path) -> None:
    path = _write(tmp_path)
    command = ["simulate", "--scenario", str(path), "--output", str(tmp_path), "--quiet"]
    assert main([*command, "--set", "workload.requests=8"]) == 0
    assert (tmp_path / "gantt-0-semantic.png").is_file()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--scenario", "paper-table7"], "Did you mean 'paper-table"),
        (["--set", "workload.request=8"], "did you mean 'requests'"),
        (["--set", "nonsense"], "FIELD=VALUE"),
        (["--set", "engine.kv_blocks=1"], "needs"),
        (["--metric", "speed"], "normalized_waiting"),
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


def test_every_key_is_explained(capsys) -> None:
    assert main(["simulate", "--keys"]) == 0
    out = capsys.readouterr().out
    for key in ("workload.arrivals", "engine.seats", "predictor.hold", "workload.prompt.kind"):
        assert key in out
