"""`semsched serve`: the command of vLLM that it runs."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_semantic_sched.cli import main
from vllm_semantic_sched.cli.arguments import Failure
from vllm_semantic_sched.cli.serve import (
    MIDDLEWARE,
    SCHEDULER,
    Machine,
    launch_of,
)
from vllm_semantic_sched.operate.vllm_options import short_steps

GPU = Machine(True, cores=8, free_gib=40.0, total_gib=64.0)


def launch(
    *options: str, machine: Machine = GPU, host_gib: float | None = None, **settings
) -> tuple[list[str], list[str], dict[str, str]]:
    return launch_of("my/model", options, settings, host_gib, machine, lambda *asked: None)


@pytest.fixture(autouse=True)
def vllm_takes_the_connector(monkeypatch) -> None:
    monkeypatch.setattr("vllm_semantic_sched.cli.serve.why_no_connector", lambda *asked: None)


@pytest.fixture
def no_gpu(monkeypatch):
    """Whether the installed vLLM is a build for CPUs, set by a test."""

    def install(build: bool) -> None:
        monkeypatch.setattr("vllm_semantic_sched.cli.serve.serves_on_cpu", lambda: build)

    for name in ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)
    return install


def value(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_defaults_scheduler_middleware_quarter_of_free_memory() -> None:
    command, notes, environment = launch("--port", "8001", "-tp", "2")
    assert command[:7] == ["vllm", "serve", "my/model", "--port", "8001", "-tp", "2"]
    assert value(command, "--scheduler-cls") == SCHEDULER
    assert value(command, "--middleware") == MIDDLEWARE
    assert value(command, "--sse-keep-alive-interval") == "15"
    connector = json.loads(value(command, "--kv-transfer-config"))
    assert connector["kv_connector_extra_config"] == {"host_gib": 5.0}
    assert json.loads(value(command, "--additional-config")) == {"semantic_sched": {}}
    note = "10 GiB of host memory keep preempted requests' KV, 5 in each worker"
    assert notes == [note]
    assert not environment


@pytest.mark.parametrize(
    ("free", "options", "size"),
    [
        (400.0, (), 32.0),
        (40.0, ("--data-parallel-size=4",), 2.5),
        (400.0, ("--tensor-parallel-size", "4", "-dp", "2"), 4.0),
        (0.5, (), None),
    ],
)
def test_size_of_the_pool(free, options, size) -> None:
    command, notes, _ = launch(*options, machine=GPU._replace(free_gib=free))
    if size is None:
        assert "--kv-transfer-config" not in command and "KV swap disabled" in notes[0]
    else:
        connector = json.loads(value(command, "--kv-transfer-config"))
        assert connector["kv_connector_extra_config"] == {"host_gib": size}


def test_no_pool_on_demand() -> None:
    command, *_ = launch(host_gib=0.0)
    assert "--kv-transfer-config" not in command


def test_observing_server_logs_and_keeps_no_kv_on_the_host(no_gpu, capsys, tmp_path) -> None:
    no_gpu(False)
    assert main(["serve", "--dry-run", "--observe", "my/model", "--port", "8001"]) == 0
    out, err = capsys.readouterr()
    command = shlex.split(out)
    log = str(Path("semsched-events.jsonl").absolute())
    config = {"semantic_sched": {"observe": True, "events": log}}
    assert json.loads(value(command, "--additional-config")) == config
    assert "--kv-transfer-config" not in command and "observing" in err and log in err
    policy = tmp_path / "mine.yaml"
    policy.write_text("observe: true\nevents: {path: mine.jsonl}\n")
    assert main(["serve", "my/model", "--dry-run", "--policy", str(policy)]) == 0
    out, err = capsys.readouterr()
    assert "--kv-transfer-config" not in out and "mine.jsonl" in err


def test_observing_needs_a_policy_that_reads(capsys) -> None:
    assert main(["serve", "my/model", "--dry-run", "--observe", "--policy", "fcfs"]) == 1
    assert "not base: fcfs" in capsys.readouterr().err


def test_policy_and_profile_join_other_settings() -> None:
    command, *_ = launch(
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
        (("--kv-transfer-config.kv_connector", "X"), {"host_gib": 4.0}, "another connector"),
        (("--kv-offloading-size", "4"), {"host_gib": 4.0}, "another connector"),
        ((), {"host_gib": 50.0}, "40.0 GiB that are free"),
        (("-tp", "8"), {"host_gib": 6.0}, "6 for each of 8 workers is more than the 40.0 GiB"),
        (("--additional-config", "{"), {}, "not JSON"),
        (("--additional-config", '{"semantic_sched": 1}'), {}, "JSON object"),
    ],
)
def test_what_cannot_work_together_is_refused(options, given, message) -> None:
    with pytest.raises(Failure, match=message):
        launch(*options, **given)


@pytest.mark.parametrize(
    "given",
    [("--sse-keep-alive-interval", "0"), ("--sse_keep_alive_interval=40",)],
)
def test_interval_of_the_signs_of_life_may_be_given(given) -> None:
    command, _, _ = launch(*given)
    assert sum("keep" in word and "alive" in word for word in command) == 1


def test_rust_front_end_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "0")
    assert launch()
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(Failure, match="runs no middleware: unset it"):
        launch()


def test_pipeline_parallelism_disables_the_pool_with_a_note() -> None:
    command, notes, _ = launch("-pp", "2")
    assert "--kv-transfer-config" not in command
    assert notes == ["KV of preempted requests is recomputed: pipeline parallelism is on"]


def test_pool_is_left_out_where_vllm_does_not_take_it() -> None:
    asked = []

    def refuse(options, environment) -> str:
        asked.append((list(options), dict(environment)))
        return "vLLM says: no"

    command, notes, _ = launch_of("my/model", ["-tp", "2"], {}, None, GPU, refuse)
    assert "--kv-transfer-config" not in command
    assert notes == ["KV of preempted requests is recomputed: vLLM says: no"]
    assert asked == [(command[2:], {})]
    with pytest.raises(Failure, match="--host-gib 4 cannot be used: vLLM says: no"):
        launch_of("my/model", [], {}, 4.0, GPU, refuse)
    launch_of("my/model", [], {}, 0.0, GPU, refuse)
    launch_of("my/model", [], {"observe": True}, None, GPU, refuse)
    assert len(asked) == 2


@pytest.fixture
def config_file(tmp_path):
    def write(**options) -> list[str]:
        path = tmp_path / "options.yaml"
        path.write_text(json.dumps(options))
        return ["--config", str(path)]

    return write


def test_options_in_a_file_count(config_file) -> None:
    given = config_file(tensor_parallel_size=4)
    command, *_ = launch(*given)
    connector = json.loads(value(command, "--kv-transfer-config"))
    assert connector["kv_connector_extra_config"] == {"host_gib": 2.5}
    assert value(command, "--config") == given[1]
    command, *_ = launch(*given, "-tp=2")  # the command line counts first
    connector = json.loads(value(command, "--kv-transfer-config"))
    assert connector["kv_connector_extra_config"] == {"host_gib": 5.0}
    _, notes, _ = launch(*config_file(**{"kv-transfer-config": {"kv_connector": "X"}}))
    assert notes == [
        "KV of preempted requests is recomputed: --kv-transfer-config names another connector"
    ]
    with pytest.raises(Failure, match=r"other\.Scheduler"):
        launch(*config_file(scheduler_cls="other.Scheduler"))
    given = config_file(additional_config={"a": 1, "semantic_sched": {"policy": "tiers"}})
    command, *_ = launch(*given, watch=True)
    config = {"a": 1, "semantic_sched": {"policy": "tiers", "watch": True}}
    assert json.loads(value(command, "--additional-config")) == config
    command, *_ = launch(*config_file(middleware=[MIDDLEWARE]))
    assert "--middleware" not in command


def test_file_that_vllm_cannot_read_is_left_to_it(tmp_path) -> None:
    missing = ["--config", str(tmp_path / "no.yaml")]
    assert launch(*missing)[0][3:5] == missing
    (tmp_path / "no.yaml").write_text("[1, 2")
    assert launch(*missing)[0][3:5] == missing
    assert launch("--config")[0][3] == "--config"


def test_options_with_dots_join_the_others() -> None:
    command, *_ = launch("--additional_config.semantic_sched.policy", "tiers", watch=True)
    assert not any("semantic_sched.policy" in word for word in command)
    config = {"semantic_sched": {"policy": "tiers", "watch": True}}
    assert json.loads(value(command, "--additional-config")) == config
    command, *_ = launch("--additional-config.a=1", "--additional-config.b+", "x,y")
    config = {"a": 1, "b": ["x", "y"], "semantic_sched": {}}
    assert json.loads(value(command, "--additional-config")) == config


def test_the_last_of_several_counts() -> None:
    command, *_ = launch("-tp", "4", "--tensor-parallel-size=2")
    connector = json.loads(value(command, "--kv-transfer-config"))
    assert connector["kv_connector_extra_config"] == {"host_gib": 5.0}
    given = ("--scheduler-cls", SCHEDULER, "--scheduler_cls", SCHEDULER)
    assert launch(*given)[0].count("--scheduler-cls") == 1


@pytest.mark.parametrize("in_file", [True, False])
def test_model_may_be_an_option(no_gpu, capsys, config_file, in_file) -> None:
    no_gpu(False)
    given = config_file(model="my/model", port=8001) if in_file else ["--model", "my/model"]
    assert main(["serve", *given, "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("vllm serve my/model ") and "--model " not in printed.out
    assert ("127.0.0.1:8001" in printed.err) == in_file


def test_stopped_server_finishes_its_requests_unless_told_otherwise(no_gpu, capsys) -> None:
    no_gpu(False)
    assert main(["serve", "my/model", "--dry-run"]) == 0
    assert value(shlex.split(capsys.readouterr().out), "--shutdown-timeout") == "30"
    assert main(["serve", "my/model", "--dry-run", "--shutdown_timeout=5"]) == 0
    command = shlex.split(capsys.readouterr().out)
    assert "--shutdown_timeout=5" in command and "--shutdown-timeout" not in command
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "--shutdown-timeout" in capsys.readouterr().out


def test_without_a_gpu_what_is_missing_is_added_and_said(no_gpu) -> None:
    machine = Machine(False, cores=4, free_gib=15.0, total_gib=20.0)
    command, notes, environment = launch(machine=machine)
    assert "--enforce-eager" in command
    assert value(command, "--gpu-memory-utilization") == "0.6"
    assert value(command, "--kv-cache-memory-bytes") == str(1920 * 2**20)
    assert value(command, "--block-size") == "32"
    assert value(command, "--max-num-batched-tokens") == "256"
    assert environment == {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "3"}
    assert notes[0].startswith("no GPU: added VLLM_CPU_OMP_THREADS_BIND=nobind")


def test_without_a_gpu_what_the_user_gave_stays(no_gpu, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    given = ("--no-enforce-eager", "--gpu_memory_utilization=0.3", "--block-size", "64")
    given += ("--max_num_batched_tokens=4096",)
    command, notes, environment = launch(*given, machine=Machine(False, 2, 8.0, 16.0))
    assert command[3:8] == list(given)
    assert command[8] == "--scheduler-cls"
    assert not environment and len(notes) == 1


@pytest.mark.parametrize(
    ("options", "cores", "added"),
    [
        ((), 2, ["--max-num-batched-tokens", "128"]),
        ((), 96, ["--max-num-batched-tokens", "2048"]),
        (("--max-num-seqs=256",), 2, ["--max-num-batched-tokens", "256"]),
        (("--max-num-batched-tokens", "512"), 2, []),
        (("--no-enable-chunked-prefill",), 2, []),
    ],
)
def test_step_tokens_without_gpu_are_few_but_cover_seats(options, cores, added) -> None:
    assert short_steps(options, cores) == added


def test_no_model_serves_a_small_one_on_localhost(no_gpu, monkeypatch, capsys) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/somebody")
    no_gpu(True)
    assert main(["serve", "--policy", "tiers", "--port", "8001", "--dry-run"]) == 0
    printed = capsys.readouterr()
    folder = "/var/cache/somebody/semsched/SmolLM2-135M-Instruct"
    assert f"vllm serve {folder} --served-model-name SmolLM2-135M-Instruct" in printed.out
    assert "--host 127.0.0.1 --port 8001" in printed.out
    [request] = [line for line in printed.err.splitlines() if "curl" in line]
    words = shlex.split(request.removeprefix("# "))
    assert words[:3] == ["curl", "-i", "http://127.0.0.1:8001/v1/chat/completions"]
    body = json.loads(words[-1])
    assert (body["max_tokens"], body["temperature"]) == (40, 0)
    assert '"model": "SmolLM2-135M-Instruct"' in printed.err


def test_no_model_is_made_where_vllm_is_missing(no_gpu, monkeypatch, capsys, tmp_path) -> None:
    no_gpu(True)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(
        "vllm_semantic_sched.cli.serve.make_real_model", lambda *given: pytest.fail("made")
    )
    assert main(["serve"]) == 1
    assert "vLLM is not installed here" in capsys.readouterr().err


def test_with_a_gpu_a_model_must_be_named(no_gpu, capsys) -> None:
    no_gpu(False)
    assert main(["serve", "--port", "8001", "--dry-run"]) == 1
    assert "name a model" in capsys.readouterr().err


def test_our_options_may_precede_the_model(no_gpu, capsys) -> None:
    no_gpu(False)
    assert main(["serve", "--policy", "tiers", "my/model", "--port", "8001", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("vllm serve my/model --port 8001 --scheduler-cls")


def test_dry_run_prints_the_command(no_gpu, capsys) -> None:
    no_gpu(False)
    assert main(["serve", "my/model", "--host", "127.0.0.1", "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("vllm serve my/model --host 127.0.0.1 --scheduler-cls")


@pytest.mark.parametrize("option", ["--policy", "--profile"])
def test_unknown_names_are_refused_before_vllm_starts(option, capsys) -> None:
    assert main(["serve", "my/model", option, "no-such-name", "--dry-run"]) == 1
    assert "no-such-name" in capsys.readouterr().err


def test_event_log_and_model_are_checked_before_vllm_starts(tmp_path, no_gpu, capsys) -> None:
    no_gpu(False)
    policy = tmp_path / "policy.yaml"
    policy.write_text("events: {path: /proc/no/events.jsonl}\n")
    command = ["serve", "my/model", "--dry-run", "--policy", str(policy)]
    assert main(command) == 1
    assert "events.path: cannot write /proc/no/events.jsonl" in capsys.readouterr().err
    assert main([*command, "--events", str(tmp_path)]) == 1
    assert "Is a directory" in capsys.readouterr().err
    log = tmp_path / "new" / "events.jsonl"
    assert main([*command, "--events", str(log)]) == 0
    assert not log.parent.exists()  # the server makes it
    policy.write_text("predictor: {model: /no/such}\n")
    assert main(command) == 1
    assert "predictor.model: there is no folder /no/such" in capsys.readouterr().err
    policy.write_text("predictor: {model: somebody/model-1.0}\n")
    assert main(command) == 0  # a hub id may be fetched
    policy.write_text("predictor: {model: /no/such, enabled: false}\n")
    assert main(command) == 0


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
        timeout=300,
        check=True,
    )
    assert done.stdout.splitlines()[-1].startswith("serve my/model --seed 1 --")
