"""The nursery starts servers as the command would."""

import os
import signal
import subprocess
import sys

import pytest
from metrics_page import wait_until
from nursery import Nursery

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


@pytest.fixture
def start(tmp_path, monkeypatch):
    (tmp_path / "made_up_server.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("KEPT", "as it was")
    nursery = Nursery(("made_up_server",))

    def start(word, **environment):
        command = [sys.executable, "-m", "made_up_server", word]
        with (tmp_path / "log").open("wb") as log:
            return nursery.Popen(command, log, dict(os.environ) | environment)

    yield start
    nursery.close()


def test_child_gets_arguments_environment_and_log_and_ends_by_itself(start, tmp_path) -> None:
    assert start("ok", GIVEN="1").wait(60) == 0
    log = (tmp_path / "log").read_text()
    assert log == "['ok'] 1 as it was True\nends in order\n"
    assert start("ok", KEPT="not").wait(60) == 0
    assert "['ok'] None not True" in (tmp_path / "log").read_text()


def test_child_that_fails_says_why(start, tmp_path) -> None:
    assert start("fail").wait(60) == 1
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
