"""The part of scripts/matrix.sh that runs in the environment of the pinned release."""

import argparse
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import yaml
from conformance import RECORDS
from vllm_sources import Environment, environment

from patches import patch_installed

SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parent
RESULTS = RECORDS.with_name("matrix.yaml")
REFERENCE = ROOT / "docs" / "reference.md"
COLUMNS = ("unit", "engine", "conformance")
PATCHED = "0.32.0+patches"


class Outcome(NamedTuple):
    """Counts of tests."""

    passed: int
    failed: int

    def __str__(self) -> str:
        if self.failed:
            return f"{self.passed} passed, {self.failed} failed"
        return f"{self.passed} passed"


def run(installed: Environment, log: Path, *arguments: str | Path) -> int:
    """Runs Python in an environment, with its output in a file; the exit status."""
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    quiet |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    variables = os.environ | quiet | installed.variables | {"PYTHONPATH": str(ROOT)}
    with log.open("w") as out:
        done = subprocess.run(
            [installed.python, *arguments],
            cwd=ROOT,
            env=variables,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    return done.returncode


def run_tests(installed: Environment, report: Path, selected: str) -> Outcome:
    """Runs the tests of this project that an expression of markers selects."""
    report.unlink(missing_ok=True)
    command = ["-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    command += ["-m", f"({selected}) and not study", "-p", "no:cacheprovider"]
    status = run(installed, report.with_suffix(".log"), *command, f"--junit-xml={report}")
    if not report.exists():
        raise SystemExit(f"the tests did not run; see {report.with_suffix('.log')}")
    [suite] = ElementTree.parse(report).iter("testsuite")
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    passed = int(suite.get("tests", 0)) - failed - int(suite.get("skipped", 0))
    return Outcome(passed, failed or int(status != 0))


def conformance(installed: Environment, version: str, folder: Path, record: bool) -> Outcome:
    """Runs vLLM's own scheduler tests under each base policy."""
    release, _, patched = version.partition("+")
    record = record and not patched
    words = ["--record"] if record or not (RECORDS / f"{release}.txt").exists() else []
    log = folder / f"{version}-conformance.log"
    run(installed, log, SCRIPTS / "conformance.py", "--output", folder / version, *words)
    file = folder / version / f"{release}.json"
    if not file.exists():
        raise SystemExit(f"the tests did not run; see {log}")
    bases = yaml.safe_load(file.read_text()).values()
    lost = sum(len(result["lost"]) for result in bases)
    return Outcome(sum(result["passed"] for result in bases), lost)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/matrix.sh")
    known = sorted(file.stem for file in RECORDS.glob("*.txt"))
    parser.add_argument("versions", nargs="*", default=[*known, PATCHED])
    parser.add_argument("--only", choices=COLUMNS, action="append")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--output", type=Path, default=ROOT / "conformance-output" / "matrix")
    args = parser.parse_args()
    folder = args.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    table: dict[str, dict[str, str]] = {}
    good = True
    for version in args.versions:
        installed = environment(version)
        if version == PATCHED:
            patch_installed(installed.folder, back=False)
        row = table[version] = {"model": "yes" if installed.model else "no"}
        for column in args.only or COLUMNS:
            begin = time.monotonic()
            report = folder / f"{version}-{column}.xml"
            if column == "unit":
                outcome = run_tests(installed, report, "not engine")
            elif column == "engine":
                selected = "engine" if installed.model else "engine and not model"
                outcome = run_tests(installed, report, selected)
            else:
                outcome = conformance(installed, version, folder, args.record)
            good = good and not outcome.failed
            row[column] = str(outcome)
            seconds = time.monotonic() - begin
            print(f"matrix: {version} {column}: {outcome} in {seconds:.0f} s", flush=True)
            if args.record and not outcome.failed:
                stored = yaml.safe_load(RESULTS.read_text()) if RESULTS.exists() else {}
                stored.setdefault(version, {}).update(row)
                RESULTS.write_text(yaml.safe_dump(stored))
                subprocess.run([sys.executable, SCRIPTS / "reference.py"], check=True)
    show(table)
    return 0 if good else 1


def show(table: Mapping[str, Mapping[str, str]]) -> None:
    names = ("model", *COLUMNS)
    print(f"\n{'vLLM':16}" + "".join(f"{name:>22}" for name in names))
    for version, row in table.items():
        print(f"{version:16}" + "".join(f"{row.get(name, '-'):>22}" for name in names))


if __name__ == "__main__":
    raise SystemExit(main())
