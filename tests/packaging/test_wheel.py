"""The wheel contains policies, model weights and entry points, and no test helpers."""

import importlib
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from configparser import ConfigParser
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from packaging.requirements import Requirement

from vllm_semantic_sched import __version__

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXTS = "vllm_semantic_sched/lab/training/texts"


def build_wheel(source: Path, folder: Path) -> Path:
    # The `test` extra has hatchling, so that a build without isolation downloads nothing.
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(source)], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def read_metadata(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [n for n in archive.namelist() if n.endswith(f".dist-info/{name}")]
        return archive.read(member).decode()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    return Parser().parsestr(read_metadata(wheel, "METADATA"))


@pytest.fixture(scope="module")
def files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_holds_every_shipped_config(files: set[str]):
    shipped = {path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.*")}
    assert {"configs/policies/ems.yaml", "configs/deploy/monitoring/grafana.json"} <= shipped
    assert {f"vllm_semantic_sched/{path}" for path in shipped} <= files


def test_wheel_holds_the_template_of_pages(files: set[str]):
    assert "vllm_semantic_sched/lab/report/template.html" in files


def test_wheel_holds_the_model_weights(files: set[str]):
    weights = ROOT / "vllm_semantic_sched" / "predict" / "weights"
    shipped = {path.relative_to(ROOT).as_posix() for path in weights.rglob("*") if path.is_file()}
    assert any(path.endswith(".safetensors") for path in shipped)
    assert shipped <= files


def test_wheel_holds_the_shared_texts_for_training_and_none_by_language(files: set[str]):
    assert {path for path in files if path.startswith(f"{TEXTS}/")} == {
        path.relative_to(ROOT).as_posix() for path in (ROOT / TEXTS).glob("*.*")
    }
    assert f"{TEXTS}/harmless.yaml" in files


def test_sdist_holds_all_texts_and_what_builds_it():
    # Without packing them, which takes seconds.
    builder = SdistBuilder(str(ROOT))
    files = {file.distribution_path for file in builder.recurse_included_files()}
    texts = {path.relative_to(ROOT).as_posix() for path in (ROOT / TEXTS).rglob("*.*")}
    folders = {Path(path).parent.name for path in texts}
    assert folders == {"texts", "written", "everyday", "compositions", "long"}
    assert texts <= files
    assert {"README.md", "LICENSE", "CHANGELOG.md", "scripts/setup.sh"} <= files


def test_wheel_holds_nothing_but_the_package(files: set[str]):
    tops = {path.partition("/")[0] for path in files}
    assert tops == {"vllm_semantic_sched", f"vllm_semantic_sched-{__version__}.dist-info"}
    assert not any("__pycache__" in path for path in files)


def test_entry_points_resolve(wheel: Path):
    points = ConfigParser()
    points.read_string(read_metadata(wheel, "entry_points.txt"))
    assert set(points["console_scripts"]) == {"semsched"}
    assert set(points["vllm.stat_logger_plugins"]) == {"semsched"}
    for group in points.sections():
        for target in points[group].values():
            module, _, name = target.partition(":")
            assert callable(getattr(importlib.import_module(module), name))


def test_engine_and_torch_need_an_extra(metadata: Message):
    always = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert always
    assert not any(r.startswith(("torch", "vllm")) for r in always)
    assert {"cpu", "cuda", "test", "lab"} <= set(metadata.get_all("Provides-Extra", []))
    assert metadata["License-Expression"] == "Apache-2.0"


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the wheel's files."""
    target = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def python(installed: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=installed,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )


def semsched(installed: Path, *arguments: str) -> subprocess.CompletedProcess:
    return python(installed, "-m", "vllm_semantic_sched.cli", *arguments)


def test_installed_package_finds_its_policies_by_name(installed: Path):
    code = (
        "import vllm_semantic_sched.policy.config.files as files;"
        "print(files.__file__, files.resolve_config('ems', 'policy'), sep='\\n')"
    )
    module, policy = python(installed, "-c", code).stdout.splitlines()
    assert module.startswith(str(installed))
    assert policy == str(installed / "vllm_semantic_sched" / "configs" / "policies" / "ems.yaml")


def test_installed_package_has_the_version_of_its_metadata(installed: Path, metadata: Message):
    assert semsched(installed, "--version").stdout == f"semsched {metadata['Version']}\n"


def test_installed_package_lists_every_policy(installed: Path):
    listed = semsched(installed, "policy", "list").stdout
    policies = [path.stem for path in (ROOT / "configs" / "policies").glob("*.yaml")]
    assert policies and all(re.search(rf"\b{name}\b", listed) for name in policies)


def test_installed_package_prints_the_command_of_a_server(installed: Path):
    printed = semsched(installed, "serve", "MODEL", "--host-gib=0", "--dry-run")
    assert printed.returncode == 0, printed.stderr
    assert "--scheduler-cls vllm_semantic_sched.SemanticScheduler" in printed.stdout


@pytest.mark.parametrize("kind", ["all", "instant"])
def test_training_the_shipped_model_from_a_wheel_names_what_is_missing(installed: Path, kind: str):
    stopped = semsched(installed, "train", kind, "--data=absent", "--output=model")
    assert stopped.returncode == 1
    (message,) = stopped.stderr.splitlines()
    assert message.startswith(f"semsched train {kind}: an installed wheel lacks the texts")
    assert "checkout" in message and "sdist" in message
    assert not (installed / "model").exists()


def test_own_labels_need_no_text_that_a_wheel_lacks(installed: Path):
    """What `semsched train urgency` draws from the package's texts."""
    code = (
        "import random\n"
        "from vllm_semantic_sched.lab.evaluation.domain import load_domain\n"
        "from vllm_semantic_sched.lab.training import messages, mixture\n"
        "for name in ('emergency', 'incident'):\n"
        "    print(len(mixture.domain_examples(load_domain(name), 200, seed=1)))\n"
        "print(bool(messages.everyday_prompt(random.Random(1))))\n"
    )
    assert python(installed, "-c", code).stdout.split() == ["200", "200", "True"]


def test_metadata_package_names_the_engine_of_the_cpu_extra(tmp_path: Path):
    wheel = build_wheel(ROOT / "scripts" / "vllm-metadata", tmp_path)
    metadata = Parser().parsestr(read_metadata(wheel, "METADATA"))
    (engine,) = metadata.get_all("Requires-Dist", [])
    name, _, version = engine.partition("==")
    (extra,) = map(Requirement, PROJECT["optional-dependencies"]["cpu"])
    assert extra.name == name and version in extra.specifier
    assert metadata["Name"] == "vllm" and metadata["Version"] == f"{version}+cpu"
    with zipfile.ZipFile(wheel) as archive:
        assert all(".dist-info/" in name for name in archive.namelist())


def test_wheel_holds_no_test_helpers(files: set[str]):
    helpers = [path for path in files if re.search(r"fake|chaos", path.rpartition("/")[2])]
    assert helpers == []
