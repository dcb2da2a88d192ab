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
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


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


def test_wheel_holds_the_texts_for_training(files: set[str]):
    texts = ROOT / "vllm_semantic_sched" / "lab" / "training" / "texts"
    shipped = {path.relative_to(ROOT).as_posix() for path in texts.rglob("*.*")}
    assert {path.rpartition(".")[2] for path in shipped} == {"csv", "yaml"}
    assert shipped <= files


def test_wheel_holds_nothing_but_the_package(files: set[str]):
    tops = {path.partition("/")[0] for path in files}
    assert tops == {"vllm_semantic_sched", "vllm_semantic_sched-0.1.0.dist-info"}
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


def test_installed_package_finds_its_policies_by_name(wheel: Path, tmp_path: Path):
    target = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    code = (
        "import vllm_semantic_sched.policy.config.files as files;"
        "print(files.__file__, files.resolve_config('ems', 'policy'), sep='\\n')"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(target)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\n")
    assert printed[0].startswith(str(target))
    assert printed[1] == str(target / "vllm_semantic_sched" / "configs" / "policies" / "ems.yaml")


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
