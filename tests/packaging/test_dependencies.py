"""pyproject.toml declares each package that the modules import, and no other."""

import ast
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "vllm_semantic_sched"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

DISTRIBUTIONS = {  # of modules with another name
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
# The engine, what comes with it by the extra `cpu` or `cuda`, and the gateway that loads a hook.
HOSTS = {"fastapi", "litellm", "starlette", "torch", "vllm"}


def declared(*extras: str) -> set[str]:
    lists = [PROJECT["optional-dependencies"][extra] for extra in extras]
    return {canonicalize_name(Requirement(entry).name) for entries in lists for entry in entries}


ALWAYS = {canonicalize_name(Requirement(entry).name) for entry in PROJECT["dependencies"]}
OF_LAB = declared("lab")


def imported_packages(source: str) -> set[str]:
    """Distributions that the source of a module imports, also within functions."""
    modules: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.append(node.module)
    tops = {module.partition(".")[0] for module in modules}
    others = tops - sys.stdlib_module_names - {PACKAGE.name}
    return {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in others}


def imports_of(*folders: Path) -> set[str]:
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    return set().union(*(imported_packages(path.read_text("utf-8")) for path in paths))


def test_imports_are_found_wherever_they_stand():
    source = "import os, numpy.linalg\nfrom . import yaml\ndef read():\n    from yaml import load\n"
    assert imported_packages(source) == {"numpy", "pyyaml"}


def test_dependencies_are_what_is_imported_outside_lab():
    folders = [path for path in PACKAGE.iterdir() if path.is_dir() and path.name != "lab"]
    imported = imports_of(*folders) - HOSTS
    assert imported - declared("annotate", "ray") == ALWAYS


@pytest.mark.parametrize(
    ("folder", "extra", "package"), [("annotate", "annotate", "aiohttp"), ("ray", "ray", "ray")]
)
def test_extra_of_a_fleet_declares_what_it_imports(folder: str, extra: str, package: str):
    imported = imports_of(PACKAGE / "fleet" / folder)
    assert package in imported
    assert imported - HOSTS <= ALWAYS | declared(extra)


def test_lab_imports_only_what_it_declares():
    imported = imports_of(PACKAGE / "lab")
    assert "matplotlib" in imported
    assert imported - HOSTS <= ALWAYS | OF_LAB
