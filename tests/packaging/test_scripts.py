"""The scripts print help, reject bad input with a message and pass settings on."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).resolve().parents[1]
SCRIPTS = TESTS.parent / "scripts"
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


def test_setup_prints_help():
    shown = run(SCRIPTS / "setup.sh", "--help")
    assert shown.returncode == 0
    assert "SEMSCHED_TORCH_INDEX" in shown.stdout


def test_setup_rejects_unknown_option():
    assert run(SCRIPTS / "setup.sh", "--bogus").returncode == 2


def test_setup_rejects_unusable_python():
    rejected = run(SCRIPTS / "setup.sh", "--force", PYTHON="/nonexistent/python")
    assert rejected.returncode == 1
    assert "PYTHON=/nonexistent/python is not a Python" in rejected.stderr


def test_setup_rejects_unknown_installer():
    rejected = run(SCRIPTS / "setup.sh", SEMSCHED_INSTALLER="conda")
    assert rejected.returncode == 2
    assert "SEMSCHED_INSTALLER=conda is neither uv nor pip" in rejected.stderr


@pytest.fixture
def uv_install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("uv_install", SCRIPTS / "uv_install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_uv_gets_the_sources_of_pip(uv_install: ModuleType, tmp_path: Path):
    listing = r"""
global.cert='CERT'
global.extra-index-url='https://a.example/simple\n file:///b/simple'
global.index-url='https://user:pass=word@index.example/simple'
global.timeout='15'
install.find-links='/wheels https://c.example/wheels'
download.find-links='/other'
install.trusted-host='a.example'
""".replace("CERT", str(tmp_path / "ca.crt"))
    assert uv_install.uv_environment(uv_install.pip_options(listing)) == {
        "SSL_CERT_FILE": str(tmp_path / "ca.crt"),
        "UV_DEFAULT_INDEX": "https://user:pass=word@index.example/simple",
        "UV_FIND_LINKS": "/wheels,https://c.example/wheels",
        "UV_HTTP_TIMEOUT": "15",
        "UV_INDEX": "https://a.example/simple file:///b/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_INSECURE_HOST": "a.example",
    }


def test_pip_variables_override_pip_files(uv_install: ModuleType):
    listing = (
        ":env:.no-index='1'\n:env:.find-links=''\nglobal.find-links='/a'\nglobal.no-index='no'"
    )
    options = uv_install.pip_options(listing)
    assert options == {"find-links": "/a", "no-index": "1"}
    assert uv_install.uv_environment(options)["UV_NO_INDEX"] == "1"


@pytest.mark.parametrize("workers", [0, 1])
def test_forbid_skips_fails_a_run_with_a_skipped_test(tmp_path: Path, workers: int):
    shutil.copy(TESTS / "conftest.py", tmp_path)
    (tmp_path / "test_skip.py").write_text(
        "import pytest\ndef test_absent(): pytest.importorskip('absent')\n"
    )
    result = run(sys.executable, "-m", "pytest", "-n", workers, "--forbid-skips", tmp_path)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED
    assert "test_skip.py::test_absent" in result.stdout.partition("counts as failed")[2]


def test_skipped_test_passes_otherwise(tmp_path: Path):
    shutil.copy(TESTS / "conftest.py", tmp_path)
    (tmp_path / "test_skip.py").write_text("import pytest\ndef test_absent(): pytest.skip()\n")
    assert run(sys.executable, "-m", "pytest", "-n", 0, tmp_path).returncode == 0
