"""Each import contract of pyproject.toml fails on a package that breaks it."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
CONTRACTS = tomllib.loads(PYPROJECT.read_text())["tool"]["importlinter"]["contracts"]
PACKAGE = "vllm_semantic_sched"


def contract_modules() -> set[str]:
    """All modules of the package that a contract names."""
    names: set[str] = set()
    for contract in CONTRACTS:
        for container in contract.get("containers", []):
            for layer in contract["layers"]:
                parts = layer.replace("|", " ").replace(":", " ").split()
                names |= {f"{container}.{part.strip('()')}" for part in parts}
        for key in ("protected_modules", "allowed_importers", "source_modules"):
            names |= set(contract.get(key, []))
    return {name for name in names if name.startswith(PACKAGE)}


@pytest.fixture
def skeleton(tmp_path: Path) -> Path:
    """An empty package with every module that the contracts name, beside their configuration."""
    (tmp_path / "pyproject.toml").write_text(PYPROJECT.read_text())
    for name in contract_modules():
        folder = tmp_path / name.replace(".", "/")
        folder.mkdir(parents=True, exist_ok=True)
        for parent in [folder, *folder.relative_to(tmp_path).parents]:
            (tmp_path / parent / "__init__.py").touch()
    (tmp_path / "__init__.py").unlink()
    # A contract on an external package needs somebody who imports it.
    (tmp_path / PACKAGE / "engine" / "__init__.py").write_text("import vllm\n")
    (tmp_path / PACKAGE / "fleet" / "ray" / "__init__.py").write_text("import ray\n")
    return tmp_path


def broken_contracts(folder: Path) -> set[str]:
    """Names of the contracts that the package in `folder` breaks."""
    program = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run(
        [program, "--no-cache", "--no-logo"], cwd=folder, capture_output=True, text=True
    )
    broken = {c["name"] for c in CONTRACTS if f"{c['name']} BROKEN" in result.stdout}
    assert (result.returncode != 0) == bool(broken), result.stdout + result.stderr
    return broken


def test_skeleton_keeps_every_contract(skeleton: Path):
    assert broken_contracts(skeleton) == set()


@pytest.mark.parametrize(
    ("importer", "line", "contract"),
    [
        ("policy.core", "import vllm_semantic_sched.engine", "layers"),
        ("policy.core", "import vllm_semantic_sched.sim.workload", "layers"),
        ("sim", "import vllm_semantic_sched.engine", "layers"),
        ("sim", "import vllm_semantic_sched.lab.bench", "layers"),
        ("predict", "if TYPE_CHECKING: import vllm_semantic_sched.engine", "layers"),
        ("lab", "def run(): import vllm_semantic_sched.cli", "cli"),
        ("engine", "import vllm_semantic_sched.lab.training", "lab"),
        ("operate", "def run(): import vllm_semantic_sched.lab.report", "lab"),
        ("operate", "import vllm.config", "vllm"),
        ("engine", "def run(): import ray.serve", "ray"),
        ("policy.order", "import torch", "pure"),
        ("policy.order", "import vllm_semantic_sched.policy.overload", "policy-layers"),
    ],
)
def test_contract_forbids(skeleton: Path, importer: str, line: str, contract: str):
    module = skeleton / PACKAGE / importer.replace(".", "/") / "__init__.py"
    with module.open("a") as file:
        file.write(f"from typing import TYPE_CHECKING\n{line}\n")
    (name,) = (c["name"] for c in CONTRACTS if c["id"] == contract)
    assert name in broken_contracts(skeleton)


def test_cycle_within_a_package_is_found(skeleton: Path):
    for importer, imported in (("reader", "writer"), ("writer", "reader")):
        module = skeleton / PACKAGE / "operate" / f"{importer}.py"
        module.write_text(f"import vllm_semantic_sched.operate.{imported}\n")
    (name,) = (c["name"] for c in CONTRACTS if c["id"] == "cycles")
    assert broken_contracts(skeleton) == {name}
