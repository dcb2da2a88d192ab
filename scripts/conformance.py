"""Runs vLLM's own scheduler tests with vLLM's scheduler and with SemanticScheduler.

Every test that passes with vLLM's class must pass with ours under the base policy `fcfs`.
The tests are taken from vLLM's source distribution, which pip's indexes provide. Some of them need
an image model from a hub and fail with both classes.

`--vllm` tests a release other than the installed one. If it has no CPU wheel, the Python part of
its CUDA wheel is put in front of the installed CPU build, which is all that the scheduler needs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from vllm_sources import extract_tests, fetch_source

SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parent
TESTS = [
    "tests/v1/core/test_scheduler.py",
    "tests/v1/core/test_priority_scheduler_random.py",
    "tests/v1/core/test_async_scheduler.py",
]
# The models that the tests name. All get the shape of the first, because most tests read only the
# shape; tests of images fail with both classes.
MODELS = ["facebook/opt-125m", "llava-hf/llava-1.5-7b-hf", "Qwen/Qwen2.5-VL-3B-Instruct"]
COLUMNS = ("tests", "vllm", "ours", "lost")


@dataclass(frozen=True)
class Outcome:
    """Result of one test in one run: its file, its status, and the first line of the reason."""

    file: str
    result: str
    reason: str = ""


def prepare(version: str, folder: Path) -> None:
    """Fills `folder` with the test files and the models that they name."""
    if (folder / "ready").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    source = fetch_source(version, folder)
    extract_tests(source, folder)
    source.unlink()
    shape = transformers.OPTConfig(architectures=["OPTForCausalLM"], dtype="float16")
    for model in MODELS:
        shape.save_pretrained(folder / model)
    (folder / "ready").touch()


def install_beside(version: str, folder: Path) -> Path:
    """Installs a vLLM release without its dependencies into a subfolder and returns that folder."""
    target = folder / "engine"
    if not (target / "vllm").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        subprocess.run([*command, str(target), f"vllm=={version}"], check=True)
    return target


def run_tests(
    folder: Path, tests: list[str], report: Path, ours: bool, engine: Path | None
) -> dict[str, Outcome]:
    """Runs the tests with one of the classes and returns their outcomes by test id."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(path) for path in (engine, SCRIPTS) if path),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "SEMSCHED_POLICY": "fcfs",
    }
    if engine:
        environment["VLLM_TARGET_DEVICE"] = "cpu"
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={folder}", "-q"]
    command += ["-p", "no:cacheprovider", "--timeout=300", "--tb=line", f"--junit-xml={report}"]
    if ours:
        command += ["-p", "conformance_plugin"]
    log = report.with_suffix(".log")
    report.unlink(missing_ok=True)
    with log.open("w") as out:
        subprocess.run(
            command + tests, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT
        )
    if not report.exists():
        raise SystemExit(f"the tests did not run; see {log}")
    return read_report(report)


def read_report(report: Path) -> dict[str, Outcome]:
    """Outcomes by test id from a JUnit file."""
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        ended = next(
            (child for child in case if child.tag in ("failure", "error", "skipped")), None
        )
        result = "passed" if ended is None else ended.tag
        reason = "" if ended is None else (ended.get("message") or "").partition("\n")[0]
        # "tests.v1.core.test_scheduler", possibly followed by the name of a class
        parts = case.get("classname", "").split(".")
        file = next((part for part in reversed(parts) if part.startswith("test_")), parts[-1])
        outcomes[f"{file}::{case.get('name')}"] = Outcome(file, result, reason)
    return outcomes


def compare(stock: dict[str, Outcome], ours: dict[str, Outcome]) -> dict[str, Any]:
    """Counts tests per file and lists those that only vLLM's class passes."""
    files: dict[str, dict[str, int]] = {}
    lost = {}
    for name, outcome in stock.items():
        other = ours.get(name, Outcome(outcome.file, "missing"))
        counts = files.setdefault(outcome.file, dict.fromkeys(COLUMNS, 0))
        counts["tests"] += 1
        counts["vllm"] += outcome.result == "passed"
        counts["ours"] += other.result == "passed"
        if outcome.result == "passed" != other.result:
            counts["lost"] += 1
            lost[name] = f"{other.result}: {other.reason}"
    total = {key: sum(counts[key] for counts in files.values()) for key in COLUMNS}
    return {"files": files, "total": total, "lost": lost}


def show(result: dict[str, Any]) -> None:
    print(f"\n{'':40}{'tests':>8}{'vLLM passes':>13}{'ours passes':>13}{'lost':>6}")
    for name, counts in [*result["files"].items(), ("total", result["total"])]:
        print("{:40}{:>8}{:>13}{:>13}{:>6}".format(name, *(counts[c] for c in COLUMNS)))
    for name, reason in result["lost"].items():
        print(f"\nlost: {name}\n      {reason[:300]}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/conformance.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tests", nargs="*", help=f"test files (default: {', '.join(TESTS)})")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "conformance-output", help="folder for the results"
    )
    installed = importlib.metadata.version("vllm").partition("+")[0]
    parser.add_argument("--vllm", default=installed, help=f"release (default: {installed})")
    args = parser.parse_args()
    output = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    print(f"vLLM {args.vllm}: fetching its tests", flush=True)
    folder = ROOT / ".venv" / "conformance" / args.vllm
    prepare(args.vllm, folder)
    engine = install_beside(args.vllm, folder) if args.vllm != installed else None
    outcomes = {}
    for name in ("vllm", "ours"):
        begin = time.monotonic()
        print(f"running them with {name} ...", end="", flush=True)
        report = output / f"{args.vllm}-{name}.xml"
        outcomes[name] = run_tests(folder, args.tests or TESTS, report, name == "ours", engine)
        print(f" {len(outcomes[name])} tests in {time.monotonic() - begin:.0f} s")
    result = compare(outcomes["vllm"], outcomes["ours"])
    show(result)
    file = output / f"{args.vllm}.json"
    file.write_text(json.dumps({"vllm": args.vllm, "policy": "fcfs", **result}, indent=2) + "\n")
    print(f"\nWritten: {file}")
    if not result["total"]["vllm"]:
        print("Nothing to compare: no test passes with vLLM's own class.")
        return 1
    return 1 if result["lost"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
