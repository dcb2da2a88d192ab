"""The scripts explain themselves and refuse what they cannot do with a sentence."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SHELL_SCRIPTS = sorted(SCRIPTS.glob("*.sh"))


def run(*command: object, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(part) for part in command],
        cwd="/",
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_script_is_executable_and_parses(script: Path):
    assert os.access(script, os.X_OK)
    assert run("bash", "-n", script).returncode == 0


def test_setup_explains_itself():
    shown = run(SCRIPTS / "setup.sh", "--help")
    assert shown.returncode == 0
    assert "SEMSCHED_TORCH_INDEX" in shown.stdout


def test_setup_refuses_an_unknown_option():
    assert run(SCRIPTS / "setup.sh", "--bogus").returncode == 2


def test_setup_refuses_a_python_that_it_cannot_use():
    refused = run(SCRIPTS / "setup.sh", "--force", PYTHON="/nonexistent/python")
    assert refused.returncode == 1
    assert "PYTHON=/nonexistent/python is not a Python" in refused.stderr
