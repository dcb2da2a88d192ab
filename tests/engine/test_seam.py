"""engine/vllm_api is the only package that touches vLLM."""

import ast
from pathlib import Path

import pytest

import vllm_semantic_sched

PACKAGE = Path(vllm_semantic_sched.__file__).parent
SEAM = PACKAGE / "engine" / "vllm_api"
MODULES = sorted({*PACKAGE.joinpath("engine").rglob("*.py")} - {*SEAM.glob("*.py")})
# prometheus_client can add values to a histogram one by one only.
ALLOWED = {("stat_logger.py", "_buckets"), ("stat_logger.py", "_sum")}


def imported_modules(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def own_names(tree: ast.AST) -> set[str]:
    """Names that a module defines itself: functions, methods, class variables and attributes
    assigned to `self` or to an object that the module has made."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


def foreign_private_names(path: Path) -> list[str]:
    """Private attributes that a module uses but does not own."""
    tree = ast.parse(path.read_text("utf-8"))
    own = own_names(tree)
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
            continue
        if node.attr.startswith("__") or node.attr in ("_asdict", "_replace"):  # NamedTuple
            continue
        of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if (of_self and node.attr in own) or (path.name, node.attr) in ALLOWED:
            continue
        found.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_only_vllm_api_imports_vllm_or_uses_its_private_names(path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    assert not [name for name in imported_modules(tree) if name.partition(".")[0] == "vllm"]
    assert foreign_private_names(path) == []


def test_private_names_of_other_modules_are_found(tmp_path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "class A(Scheduler):\n"
        "    def go(self, other):\n"
        "        self._mine = 1\n"
        "        self._inherited()\n"
        "        other._mine\n"
        "        super()._free_request(other)\n"
    )
    found = {line.partition(": ")[2] for line in foreign_private_names(module)}
    assert found == {"self._inherited", "other._mine", "super()._free_request"}


@pytest.mark.engine
def test_no_other_class_overrides_a_private_method_of_vllm() -> None:
    from vllm_semantic_sched.engine import vllm_api
    from vllm_semantic_sched.engine.kv.connector import SemanticSwapConnector
    from vllm_semantic_sched.engine.scheduler import AsyncSemanticScheduler, SemanticScheduler

    for ours, base in (
        (SemanticScheduler, vllm_api.Scheduler),
        (AsyncSemanticScheduler, vllm_api.AsyncScheduler),
        (SemanticSwapConnector, vllm_api.KVConnector),
    ):
        shared = set(vars(ours)) & set(dir(base))
        private = [name for name in shared if name.startswith("_") and not name.endswith("_")]
        assert not [name for name in private if callable(getattr(base, name))]


@pytest.mark.engine
def test_every_engine_entry_is_watched_or_generates_nothing() -> None:
    """Tenant, reading and engine are set at `generate`, for every route that vLLM has or gets."""
    import inspect

    from vllm.engine.protocol import EngineClient

    takes_prompts = {
        name
        for name, method in inspect.getmembers(EngineClient, inspect.isfunction)
        if "prompt" in inspect.signature(method).parameters
    }
    assert takes_prompts == {"generate", "encode"}  # encode answers with vectors
