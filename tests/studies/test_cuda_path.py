"""vLLM's CUDA path on the CPU: the edits fit the installed vLLM, and what counts as a problem."""

import argparse
import importlib.metadata
import importlib.util
from pathlib import Path

import cuda_path
import pretended_cuda
import pytest

ENGINE = pytest.mark.engine


@ENGINE
@pytest.mark.parametrize("name", [*pretended_cuda.EDITS, *pretended_cuda.ADDED])
def test_edits_fit_the_installed_vllm(name: str):
    if importlib.metadata.version("vllm").startswith("0.31"):
        pytest.skip("the edits are for later releases")
    root = Path(importlib.util.find_spec("vllm").origin).parent
    path = root.joinpath(*name.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    source = path.read_text()
    edited = pretended_cuda.edit(name, source)
    assert edited != source
    compile(edited, path, "exec")


def test_edit_of_another_source_raises():
    with pytest.raises(pretended_cuda.StaleEdit, match=r"vllm\.platforms of this vLLM"):
        pretended_cuda.edit("vllm.platforms", "def other(): ...")


def test_pretending_comes_before_vllm(monkeypatch):
    monkeypatch.setitem(pretended_cuda.sys.modules, "vllm", pretended_cuda)
    with pytest.raises(RuntimeError, match="imported already"):
        pretended_cuda.pretend()


def run(tokens: list[int], **fields) -> dict:
    found = {"tokens": {"a": tokens}, "counters": {"preemptions swap urgent": 5.0}}
    return found | {"wrong_lengths": [], "runner": 2, "asynchronous": True} | fields


@pytest.mark.parametrize(
    ("swap", "wrong"),
    [
        (run([1, 2]), []),
        (run([1, 3]), ["answers differ"]),
        (run([1, 2], counters={}), ["no preemptions swap"]),
        (run([1, 2], runner=1), ["runner 1"]),
        (run([1, 2], asynchronous=False), ["asynchronous: False"]),
        (None, ["swap: no answers"]),
    ],
)
def test_problems_of_a_run(swap, wrong):
    runs = {"fcfs": run([1, 2])} | ({} if swap is None else {"swap": swap})
    found = cuda_path.problems({"float32": runs}, ["fcfs", "swap"])
    assert len(found) == len(wrong) and all(map(str.__contains__, found, wrong))


@pytest.mark.study
@ENGINE
def test_answers_are_equal_on_the_path_of_a_gpu(tmp_path: Path):
    """Two minutes of CPU time."""
    parser = argparse.ArgumentParser()
    cuda_path.add_arguments(parser)
    assert cuda_path.run(parser.parse_args(["--output", str(tmp_path)])) == 0
