"""The scripts print help, reject bad input with a message and pass settings on."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import latest
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
        "UV_INSECURE_HOST": "a.example",
    }


def test_pip_variables_override_pip_files(uv_install: ModuleType):
    listing = (
        ":env:.no-index='1'\n:env:.find-links=''\nglobal.find-links='/a'\nglobal.no-index='no'"
    )
    options = uv_install.pip_options(listing)
    assert options == {"find-links": "/a", "no-index": "1"}
    assert uv_install.uv_environment(options)["UV_NO_INDEX"] == "1"


def run_pytest(*arguments: object) -> subprocess.CompletedProcess:
    """With xdist, and none of the other installed plugins, which take a second to import."""
    command = (sys.executable, "-m", "pytest", "-p", "xdist", *arguments)
    return run(*command, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")


@pytest.mark.parametrize("workers", [0, 1])
def test_forbid_skips_fails_a_run_with_a_skipped_test(tmp_path: Path, workers: int):
    shutil.copy(TESTS / "conftest.py", tmp_path)
    (tmp_path / "test_skip.py").write_text(
        "import pytest\ndef test_absent(): pytest.importorskip('absent')\n"
    )
    result = run_pytest("-n", workers, "--forbid-skips", tmp_path)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED
    assert "test_skip.py::test_absent" in result.stdout.partition("counts as failed")[2]


def test_skipped_test_passes_otherwise(tmp_path: Path):
    shutil.copy(TESTS / "conftest.py", tmp_path)
    (tmp_path / "test_skip.py").write_text("import pytest\ndef test_absent(): pytest.skip()\n")
    assert run_pytest("-n", 0, tmp_path).returncode == 0


def test_all_studies_of_this_machine_are_measured():
    listed = run(SCRIPTS / "measure_all.sh", "--list").stdout
    # Of the rest, these need other hardware, programs or a server, and those are parts of others.
    elsewhere = {"alerts", "ray_serve", "roofline", "step_time", "long_prompts", "torch_check"}
    elsewhere |= {"reading_on", "second_network"}
    parts = {"common", "latest", "pretended_cuda"}
    studies = {path.stem for path in (SCRIPTS / "studies").glob("*.py")} - elsewhere - parts
    assert {name for name in studies if f"studies/{name}.py" not in listed} == set()


def test_measurements_write_an_output_file_each(tmp_path):
    page, outputs, results = tmp_path / "latest.md", tmp_path / "output", tmp_path / "results"
    outputs.mkdir()
    earlier = "command: semsched x\ncommit: 0071d52\nday: 2026-11-25\nprocessor: P\n\n1 s\n"
    (outputs / "tiers.txt").write_text(earlier)
    command = ["--only", "on-device", "--output", results, "--page", page]

    first = run(SCRIPTS / "measure_all.sh", *command, PYTHON=sys.executable)
    assert first.returncode == 0, first.stderr
    assert "+command: semsched simulate --scenario on-device" in first.stdout
    written = (outputs / "on-device.txt").read_text()
    head, _, printed = written.partition("\n\n")
    names = [line.partition(": ")[0] for line in head.splitlines()]
    assert names == ["command", "commit", "day", "processor"]
    assert printed.startswith("On-device") and "vLLM priority" in printed
    assert (outputs / "tiers.txt").read_text() == earlier
    text = page.read_text()
    assert "| [tiers](output/tiers.txt) | 2026-11-25 | 0071d52 | `semsched x` |" in text
    assert "[on-device](output/on-device.txt)" in text

    again = run(SCRIPTS / "measure_all.sh", *command, PYTHON=sys.executable)
    assert "no figure has changed" in again.stdout and page.read_text() == text

    # The day of a run is no figure.
    other_day = written.replace("\nday: 20", "\nday: 19")
    (outputs / "on-device.txt").write_text(other_day)
    again = run(SCRIPTS / "measure_all.sh", *command, PYTHON=sys.executable)
    assert "no figure has changed" in again.stdout
    (outputs / "on-device.txt").write_text(written.replace("FCFS", "first come"))
    again = run(SCRIPTS / "measure_all.sh", *command, PYTHON=sys.executable)
    assert "no figure has changed" not in again.stdout and "+  FCFS" in again.stdout


def test_page_lists_every_output_file():
    folder = SCRIPTS.parent / "docs" / "measurements"
    page = folder / "latest.md"
    assert page.read_text("utf-8") == latest.page_of(folder / "output")


def test_lock_has_hashes_and_each_direct_dependency():
    lock = (SCRIPTS / "requirements.lock").read_text()
    entries = re.findall(r"^(\S+?)==(\S+)(.*?)(?=^\S|\Z)", lock, re.MULTILINE | re.DOTALL)
    assert len(entries) > 150
    assert all("--hash=sha256:" in hashes for _, _, hashes in entries)
    assert "://" not in lock and " @ " not in lock  # no index, no file
    versions = {name: version for name, version, _ in entries}
    project = tomllib.loads((SCRIPTS.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], "torch==2.13.0+cpu", "uv", "editables"]
    for extra in ("cpu", "test", "lab", "conformance"):
        wanted += extras[extra]
    for line in wanted:
        one = Requirement(line)
        version = versions[canonicalize_name(one.name)]
        assert one.specifier.contains(version, prereleases=True), line
