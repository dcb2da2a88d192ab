"""`semsched doctor`: broken set-ups are named, a good one passes."""

import importlib.metadata
import json
import platform
import shutil
import socket
from types import SimpleNamespace

import pytest
from fake_server import FakeServer, busy_page, serving
from packaging.requirements import Requirement

from vllm_semantic_sched.cli import main
from vllm_semantic_sched.lab.bench.schedulers import swap_arguments
from vllm_semantic_sched.operate import doctor
from vllm_semantic_sched.policy.config import load_policy
from vllm_semantic_sched.policy.live import fingerprint
from vllm_semantic_sched.policy.profile.formula import load_profile

GIB = 2**30
VERSION = importlib.metadata.version
PROVIDERS = importlib.metadata.packages_distributions()
# Of the torch that vLLM names: scripts/matrix.sh tests a release beside another torch.
TORCH = next(
    str(requirement.specifier).removeprefix("==")
    for requirement in map(Requirement, importlib.metadata.requires(PROVIDERS["vllm"][0]) or ())
    if requirement.name == "torch"
)


@pytest.fixture
def examine(monkeypatch, capsys):
    """Run the command without starting processes, and return its exit status and its lines."""
    pretend(monkeypatch)
    monkeypatch.delenv("SEMSCHED_POLICY", raising=False)
    monkeypatch.setattr(doctor, "_import_problem", lambda: None)
    monkeypatch.setattr(doctor, "available_memory", lambda: 16 * GIB)
    monkeypatch.setattr(doctor, "_VLLM_PORT", 0)  # any that is free
    monkeypatch.setattr(doctor.importlib.metadata, "packages_distributions", lambda: PROVIDERS)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=8 * GIB))

    def run(*words: str, policy: str = "fcfs") -> tuple[int, list[str]]:
        status = main(["doctor", *(("--policy", policy) if policy else ()), *words])
        return status, capsys.readouterr().out.splitlines()

    return run


@pytest.fixture
def server():
    with serving(FakeServer(busy_page())) as fake:
        yield fake


def only(lines: list[str], status: str) -> str:
    """The single line of that status."""
    (line,) = [line for line in lines if line.startswith(f"{status}: ")]
    return line


def pretend(monkeypatch, **versions: str) -> None:
    """Let packages have other versions; `_` stands for `-`."""
    others = {"torch": TORCH}
    others |= {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(
        doctor.importlib.metadata, "version", lambda name: others.get(name) or VERSION(name)
    )


def test_good_set_up_has_no_fault(examine, server) -> None:
    _, connector = swap_arguments(8)
    words = ("--profile", "cpu-2core-small", "--kv-transfer-config", connector)
    status, lines = examine(*words)
    assert status == 0 and not [line for line in lines if line.startswith("fault")]
    subjects = [line.split(": ")[1] for line in lines]
    assert subjects == [
        *("Python", "packages", "vLLM", "policy", "profile", "predictor", "KV connector"),
        *("host memory", "shared memory", "port"),
    ]


def test_running_server_is_asked_what_it_runs_with(examine, server) -> None:
    status, lines = examine("--server", server.url, policy="")
    assert status == 0
    assert [line.split(": ")[1] for line in lines[:4]] == [
        "Python",
        "packages",
        "vLLM",
        "shared memory",
    ]
    connector = "SemanticSwapConnector; 640 KV blocks on the host keep that of preempted requests"
    assert lines[4:] == [
        f"ok: server: {server.url} answers, vLLM 0.32.0",
        "ok: middleware: the operator's endpoints answer; engines: 1",
        "ok: scheduler: vllm_semantic_sched.engine.scheduler.SemanticScheduler",
        "ok: predictor: up in every engine, or not needed",
        "ok: policy: mine.yaml: base semantic, 3 levels, version 3 since the start",
        f"ok: KV connector: {connector}",
    ]


def test_beside_a_server_nothing_is_loaded(examine, server, monkeypatch) -> None:
    def load(*args):
        raise AssertionError("the server has loaded it")

    monkeypatch.setattr(doctor, "_import_problem", load)
    monkeypatch.setattr(doctor, "check_predictor", load)
    words = ("--profile", "cpu-2core-small", "--server", server.url)
    assert examine(*words, policy="ems")[0] == 0
    with pytest.raises(AssertionError):
        examine(*words[:2], policy="ems")


def test_predictor_that_is_not_up_is_a_warning(examine, server) -> None:
    server.ready = False
    _, lines = examine("--server", server.url, "--profile", "cpu-2core-small")
    assert "predictor: not up" in only(lines, "warning")


# Versions


def test_unsupported_vllm(examine, monkeypatch) -> None:
    pretend(monkeypatch, **{name.replace("-", "_"): "0.30.2" for name in PROVIDERS["vllm"]})
    status, lines = examine()
    assert status == 1
    assert ">=0.31.0" in only(lines, "fault") and "vLLM 0.30.2" in only(lines, "fault")


def test_torch_that_vllm_was_not_built_for(examine, monkeypatch) -> None:
    pretend(monkeypatch, torch="2.1.0")
    status, lines = examine()
    assert status == 1 and "fault: torch: 2.1.0 is installed, vLLM" in only(lines, "fault")


def test_package_that_is_too_old(examine, monkeypatch) -> None:
    pretend(monkeypatch, prometheus_client="0.1")
    status, lines = examine()
    assert status == 1
    assert "prometheus-client: 0.1 is installed" in only(lines, "fault")
    assert "pip install 'prometheus-client>=" in only(lines, "fault")


def test_unsupported_python(examine, monkeypatch) -> None:
    monkeypatch.setattr(platform, "python_version", lambda: "3.9.1")
    status, lines = examine()
    assert status == 1 and "Python: 3.9.1 is not supported" in only(lines, "fault")


def test_vllm_is_missing(examine, monkeypatch) -> None:
    monkeypatch.setattr(doctor.importlib.metadata, "packages_distributions", dict)
    status, lines = examine()
    assert status == 1 and "vLLM: not installed" in only(lines, "fault")


@pytest.mark.parametrize(
    ("imports", "problem"),
    [
        ("import no_such_library", "No module named 'no_such_library'"),
        ("import os; os.kill(os.getpid(), 4)", "exit status -4"),
        ("pass", None),
    ],
)
def test_vllm_that_cannot_be_imported(monkeypatch, imports, problem) -> None:
    monkeypatch.setattr(doctor, "_IMPORTS", imports)
    findings = [one for one in doctor.check_vllm() if one.subject == "vLLM"]
    assert findings[0].status == ("ok" if problem is None else "fault")
    assert problem is None or problem in findings[0].text


# Policy, profile and predictor


def test_policy_with_an_unknown_key(examine, tmp_path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("levles: 5\n")
    status, lines = examine(policy=str(path))
    assert status == 1 and "did you mean 'levels'" in only(lines, "fault")


def test_policy_from_the_environment(examine, monkeypatch) -> None:
    monkeypatch.setenv("SEMSCHED_POLICY", "no-such-policy")
    status, lines = examine()
    assert status == 1 and "no-such-policy" in only(lines, "fault")
    assert any("SEMSCHED_POLICY=no-such-policy overrides fcfs" in line for line in lines)


def test_profile_that_does_not_exist(examine) -> None:
    status, lines = examine("--profile", "cpu-2core-smal")
    assert status == 1 and "Did you mean 'cpu-2core-small'" in only(lines, "fault")


def test_profile_of_another_engine_is_a_warning(examine) -> None:
    status, lines = examine("--profile", "default")
    assert status == 0 and "was not measured on this engine -> Measure" in only(lines, "warning")


def test_profile_is_derived_unless_one_is_named(examine) -> None:
    status, lines = examine()
    assert status == 0 and not any(line.startswith("warning") for line in lines)
    assert "ok: profile: derived from the model and the device at the start" in lines


def test_predictor_model_that_is_none(examine, tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    status, lines = examine("--predictor", str(tmp_path), policy="ems")
    assert status == 1 and only(lines, "fault").startswith("fault: predictor: predictor.model: ")


def test_event_log_that_cannot_be_written(examine, tmp_path) -> None:
    path = tmp_path / "policy.yaml"
    log = tmp_path / "events.jsonl"
    path.write_text(f"base: fcfs\nevents: {{path: {log}/events.jsonl}}\n")
    status, lines = examine(policy=str(path))
    assert status == 0 and any("event log: " in line for line in lines)
    log.write_text("a file, not a folder")
    status, lines = examine(policy=str(path))
    assert status == 1 and "Not a directory" in only(lines, "fault")


def test_damaged_instant_reader_is_a_warning(monkeypatch, tmp_path) -> None:
    from vllm_semantic_sched.predict import service

    (tmp_path / "instant.npz").write_text("no table")
    ready = SimpleNamespace(start=lambda: None, close=lambda: None)
    monkeypatch.setattr(service, "PredictionService", lambda settings, logger: ready)
    finding = doctor.check_predictor(load_policy("ems"), str(tmp_path))
    assert finding.status == "warning" and "instant.npz" in finding.text


# Memory


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"kv_connector": "OffloadingConnector"}, "kv_connector is 'OffloadingConnector'"),
        ({"kv_connector_module_path": None}, "kv_connector_module_path is None"),
        ({"kv_role": "kv_both"}, "kv_role is 'kv_both'"),
        ({"kv_connector_extra_config": {"host_gb": 4}}, "did you mean 'host_gib'"),
        ({"kv_connector_extra_config": {"host_gib": 0}}, "host_gib"),
        ({"kv_connector": "MultiConnector"}, "no list of connectors"),
    ],
)
def test_wrong_connector_options(examine, change, problem) -> None:
    config = json.loads(swap_arguments(8)[1]) | change
    status, lines = examine("--kv-transfer-config", json.dumps(config))
    assert status == 1 and problem in only(lines, "fault")


@pytest.mark.parametrize("text", ["{", "[]", "4"])
def test_connector_options_that_are_no_json_object(examine, text) -> None:
    status, lines = examine("--kv-transfer-config", text)
    assert status == 1 and "--kv-transfer-config is not" in only(lines, "fault")


def test_swap_connector_among_several(examine) -> None:
    swap = json.loads(swap_arguments(2)[1])
    config = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [swap]}}
    status, lines = examine("--kv-transfer-config", json.dumps(config))
    assert status == 0 and any("KV connector: 2 GiB" in line for line in lines)


def test_host_pool_larger_than_the_memory(examine, server) -> None:
    words = ("--kv-transfer-config", swap_arguments(64)[1])
    status, lines = examine(*words)
    assert status == 1
    assert "host memory: 64 GiB for the host pool, 16.0 GiB available" in only(lines, "fault")
    # A running server has allocated its pool already.
    assert examine(*words, "--server", server.url)[0] == 0


def test_small_shared_memory_is_a_warning(examine, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64 * 2**20))
    status, lines = examine("--profile", "cpu-2core-small")
    assert status == 0 and "--shm-size" in only(lines, "warning")


def test_available_memory_is_that_of_the_container(tmp_path) -> None:
    machine = doctor.available_memory(tmp_path)
    assert 100 * 2**20 < machine < 2**50
    (tmp_path / "memory.current").write_text(f"{90 * 2**20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {60 * 2**20}\n")
    (tmp_path / "memory.max").write_text(f"{100 * 2**20}\n")
    assert doctor.available_memory(tmp_path) == 70 * 2**20
    (tmp_path / "memory.max").write_text("max\n")
    assert doctor.available_memory(tmp_path) > 100 * 2**20


# Server


def test_port_that_is_taken(examine, monkeypatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setattr(doctor, "_VLLM_PORT", taken.getsockname()[1])
        status, lines = examine("--profile", "cpu-2core-small")
    assert status == 0 and "Address already in use" in only(lines, "warning")


def test_server_that_does_not_answer(examine) -> None:
    with serving(FakeServer()) as gone:
        pass
    status, lines = examine("--server", gone.url)
    assert status == 1 and "Connection refused -> start vLLM" in only(lines, "fault")


def test_another_program_on_the_port(examine, server) -> None:
    server.answer = lambda method, path, key: (200, "<html>")
    status, lines = examine("--server", server.url)
    assert status == 1 and "is not a vLLM server" in only(lines, "fault")


def test_server_of_another_release(examine, server) -> None:
    server.version = "0.34.1"
    status, lines = examine("--server", server.url)
    assert status == 1 and "vLLM 0.34.1" in only(lines, "fault")


@pytest.mark.parametrize(
    ("answer", "status", "advice"),
    [
        ((404, "Not Found"), "warning", "--middleware vllm_semantic_sched.Middleware"),
        ((501, "status: no such method"), "fault", "start it with `semsched serve`"),
        ((403, "these endpoints answer on the server's own machine only"), "warning", "own mach"),
    ],
)
def test_server_without_middleware_or_scheduler(examine, server, answer, status, advice) -> None:
    server.locked = answer
    exit_status, lines = examine("--server", server.url, "--profile", "cpu-2core-small")
    assert advice in only(lines, status) and exit_status == (status == "fault")


def test_server_that_wants_its_key(examine, server) -> None:
    server.key = "secret"
    words = ("--server", server.url, "--profile", "cpu-2core-small")
    assert "--api-key" in only(examine(*words)[1], "warning")
    assert not any("warning" in line for line in examine(*words, "--api-key", "secret")[1])


def test_paused_server_is_a_warning(examine, server) -> None:
    server.paused = True
    _, lines = examine("--server", server.url, "--profile", "cpu-2core-small")
    assert "paused" in only(lines, "warning")


def test_server_with_another_policy_is_a_warning(examine, server, tmp_path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("predictor: {enabled: false}\n")
    words = ("--server", server.url, "--profile", "cpu-2core-small")
    _, lines = examine(*words, policy=str(path))
    assert "runs another policy" in only(lines, "warning")
    served = load_policy(path).model_copy(update={"profile": "cpu-2core-small"})
    server.fingerprint = fingerprint(served, load_profile("cpu-2core-small"))
    assert not any("warning" in line for line in examine(*words, policy=str(path))[1])
