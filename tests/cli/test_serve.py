"""`semsched serve`: the command of vLLM that it runs."""

import json
import os
import subprocess
import sys

import pytest

from vllm_semantic_sched.cli import main
from vllm_semantic_sched.cli.serve import (
    MIDDLEWARE,
    SCHEDULER,
    Launch,
    ServeError,
    free_memory,
    launch_of,
)


def launch(*options: str, free: float = 40.0, **given) -> Launch:
    wanted = {"policy": None, "profile": None, "host_gib": None, **given}
    return launch_of("my/model", options, free_gib=free, **wanted)


def value(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_scheduler_middleware_and_a_pool_of_a_quarter_of_what_is_free() -> None:
    command, notes = launch("--port", "8001", "-tp", "2")
    assert command[:7] == ["vllm", "serve", "my/model", "--port", "8001", "-tp", "2"]
    assert value(command, "--scheduler-cls") == SCHEDULER
    assert value(command, "--middleware") == MIDDLEWARE
    connector = json.loads(value(command, "--kv-transfer-config"))
    assert connector["kv_connector_extra_config"] == {"host_gib": 10.0}
    assert json.loads(value(command, "--additional-config")) == {"semantic_sched": {}}
    assert notes == ["10 GiB of host memory keep the KV of preempted requests"]


@pytest.mark.parametrize(
    ("free", "options", "size"),
    [(400.0, (), 32.0), (40.0, ("--data-parallel-size=4",), 2.5), (0.5, (), None)],
)
def test_size_of_the_pool(free, options, size) -> None:
    command, notes = launch(*options, free=free)
    if size is None:
        assert "--kv-transfer-config" not in command and "too few" in notes[0]
    else:
        connector = json.loads(value(command, "--kv-transfer-config"))
        assert connector["kv_connector_extra_config"] == {"host_gib": size}


def test_no_pool_on_demand() -> None:
    assert "--kv-transfer-config" not in launch(host_gib=0.0).command


def test_policy_and_profile_join_other_settings() -> None:
    command, _ = launch(
        "--additional-config",
        '{"other": 1, "semantic_sched": {"policy": "tiers", "profile": "mine.yaml"}}',
        policy="latency",
    )
    assert command.count("--additional-config") == 1
    assert json.loads(value(command, "--additional-config")) == {
        "other": 1,
        "semantic_sched": {"policy": "latency", "profile": "mine.yaml"},
    }


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        (("--scheduler-cls", "other.Scheduler"), {}, "other.Scheduler"),
        (("--pipeline-parallel-size", "2"), {"host_gib": 4.0}, "pipeline parallelism"),
        (("-pp=2",), {"host_gib": 4.0}, "pipeline parallelism"),
        (("--kv_transfer_config", "{}"), {"host_gib": 4.0}, "another connector"),
        ((), {"host_gib": 50.0}, "40.0 GiB that are free"),
        (("--additional-config", "{"), {}, "not JSON"),
        (("--additional-config", '{"semantic_sched": 1}'), {}, "JSON object"),
    ],
)
def test_what_cannot_work_together_is_refused(options, given, message) -> None:
    with pytest.raises(ServeError, match=message):
        launch(*options, **given)


def test_pipeline_parallelism_alone_leaves_the_pool_out_and_says_so() -> None:
    command, notes = launch("-pp", "2")
    assert "--kv-transfer-config" not in command
    assert notes == ["KV of preempted requests is recomputed: pipeline parallelism is on"]


def test_dry_run_prints_the_command(capsys) -> None:
    assert main(["serve", "my/model", "--host", "127.0.0.1", "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("vllm serve my/model --host 127.0.0.1 --scheduler-cls")
    assert free_memory() > 0


@pytest.mark.parametrize("option", ["--policy", "--profile"])
def test_unknown_names_are_refused_before_vllm_starts(option, capsys) -> None:
    assert main(["serve", "my/model", option, "no-such-name", "--dry-run"]) == 1
    assert "no-such-name" in capsys.readouterr().err


def test_other_commands_still_refuse_unknown_options(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["policy", "list", "--no-such-option"])
    assert "--no-such-option" in capsys.readouterr().err


def test_becomes_vllm(tmp_path) -> None:
    vllm = tmp_path / "vllm"
    vllm.write_text('#!/bin/sh\necho "$@"\n')
    vllm.chmod(0o755)
    code = (
        "import sys; from pathlib import Path; sys.executable = sys.argv.pop(1);"
        "from vllm_semantic_sched.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "python"), "serve", "my/model", "--seed", "1"],
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[-1].startswith("serve my/model --seed 1 --scheduler-cls")
