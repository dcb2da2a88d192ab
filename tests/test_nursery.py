"""The nursery starts servers and other programs as the command would."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from metrics_page import wait_until
from nursery import SPAWNED_FRONTS, Nursery

SERVER = """
import atexit, os, sys, time

def main():
    given, kept = os.environ.get("GIVEN"), os.environ.get("KEPT")
    print(sys.argv[1:], given, kept, os.getsid(0) == os.getpid())
    if "fail" in sys.argv:
        sys.exit("no such argument")
    atexit.register(print, "ends in order")
    while "serve" in sys.argv:
        time.sleep(1)
"""
PROGRAM = """
import os, sys
import other

if __name__ == "__main__":
    print(sys.argv[1:], other.WORD, os.getcwd(), "made_up_server" in sys.modules)
    sys.exit("it failed" if "fail" in sys.argv else None)
"""
# Stands for vLLM, which spawns its processes.
STARTERS = {
    "engine/utils": """
import multiprocessing

def get_mp_context():
    return multiprocessing.get_context("spawn")
""",
    "utils": "import multiprocessing",
}
STARTING_SERVER = """
import vllm.v1.utils as fronts
from vllm.v1.engine import utils as engine

def main():
    contexts = engine.get_mp_context(), fronts.multiprocessing.get_context("spawn")
    print(*(context.get_start_method() for context in contexts))
"""


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """A nursery with made-up imports."""
    (tmp_path / "made_up_server.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("KEPT", "as it was")
    nursery = Nursery(("made_up_server",))
    yield nursery
    nursery.close()


@pytest.fixture
def start(made_up, tmp_path):
    def start(word, **environment):
        command = [sys.executable, "-m", "made_up_server", word]
        with (tmp_path / "log").open("wb") as log:
            return made_up.Popen(command, log, dict(os.environ) | environment)

    return start


def test_child_gets_arguments_environment_and_log(start, tmp_path) -> None:
    assert start("ok", GIVEN="1").wait(240) == 0
    log = (tmp_path / "log").read_text()
    assert log == "['ok'] 1 as it was True\nends in order\n"
    assert start("ok", KEPT="not").wait(240) == 0
    assert "['ok'] None not True" in (tmp_path / "log").read_text()


def test_child_that_fails_says_why(start, tmp_path) -> None:
    assert start("fail").wait(240) == 1
    assert "no such argument" in (tmp_path / "log").read_text()


def test_child_serves_until_it_gets_a_signal(start) -> None:
    child = start("serve")
    assert child.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.1)
    assert os.getpgid(child.pid) == child.pid
    child.send_signal(signal.SIGTERM)
    wait_until(lambda: child.poll() == -signal.SIGTERM)
    child.send_signal(signal.SIGTERM)  # no-op


def test_other_programs_find_their_modules_and_the_imports(made_up, start, tmp_path) -> None:
    start("ok").wait(240)  # the imports are made where the other module is not found
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    (here / "program.py").write_text(PROGRAM)
    (there / "other.py").write_text("WORD = 'found'\n")
    environment = dict(os.environ) | {"PYTHONPATH": str(there)}

    def run(*arguments: object, **options) -> tuple[int | None, str]:
        with (tmp_path / "log").open("wb") as log:
            done = made_up.run(
                [sys.executable, *arguments], 240, stdout=log, env=environment, **options
            )
        return done.returncode, (tmp_path / "log").read_text()

    by_file, by_name = (here / "program.py",), ("-m", "program")
    assert run(*by_file, "a") == (0, f"['a'] found {os.getcwd()} True\n")
    assert run(*by_name, "b", cwd=here) == (0, f"['b'] found {here} True\n")
    for command in (by_file, by_name):
        code, log = run(*command, "fail", cwd=here)
        assert code == 1 and log.endswith("it failed\n")


def test_program_that_takes_too_long_is_killed(made_up, tmp_path, monkeypatch) -> None:
    children, started = [], made_up.Popen

    def Popen(*arguments, **options):
        children.append(started(*arguments, **options))
        return children[-1]

    monkeypatch.setattr(made_up, "Popen", Popen)
    command = [sys.executable, "-m", "made_up_server", "serve"]
    with (tmp_path / "log").open("wb") as log, pytest.raises(subprocess.TimeoutExpired):
        made_up.run(command, 0.1, stdout=log, env=dict(os.environ))
    wait_until(lambda: children[0].poll() == -signal.SIGKILL)


def test_nurseries_of_a_name_share_a_process_that_ends_with_the_last(made_up, tmp_path) -> None:
    command = [sys.executable, "-m", "made_up_server", "serve"]
    nurseries = [Nursery(("made_up_server",), name=str(tmp_path)) for _ in range(2)]
    processes = []
    with (tmp_path / "log").open("wb") as log:
        for nursery in nurseries:
            child = nursery.Popen(command, log, dict(os.environ))
            keeper = psutil.Process(child.pid).parent()
            processes.append(keeper.parent())
            child.terminate()
            child.wait(240)
    assert processes[0] == processes[1]
    nurseries[0].close()
    with (tmp_path / "log").open("wb") as log:
        nurseries[1].run([*command[:3], "ok"], 240, stdout=log, env=dict(os.environ))
    assert processes[0].is_running()
    nurseries[1].close()
    wait_until(lambda: not processes[0].is_running() or processes[0].status() == "zombie")


@pytest.mark.parametrize(
    ("variables", "methods"),
    [
        ({}, "spawn spawn"),
        ({"VLLM_WORKER_MULTIPROC_METHOD": "fork"}, "fork fork"),
        ({"VLLM_WORKER_MULTIPROC_METHOD": "fork", SPAWNED_FRONTS: "1"}, "fork spawn"),
    ],
)
def test_processes_of_a_server_are_forked_if_it_is_told_so(
    tmp_path, monkeypatch, variables, methods
) -> None:
    for name, text in STARTERS.items():
        file = tmp_path / "vllm" / "v1" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "made_up_server.py").write_text(STARTING_SERVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for folder in ("vllm", "vllm/v1", "vllm/v1/engine"):
        (tmp_path / folder / "__init__.py").touch()
    nursery, path = Nursery(("made_up_server",)), tmp_path / "log"
    with path.open("wb") as log:
        command = [sys.executable, "-m", "made_up_server"]
        nursery.run(command, 60, stdout=log, env=dict(os.environ) | variables)
    nursery.close()
    assert path.read_text() == methods + "\n"
