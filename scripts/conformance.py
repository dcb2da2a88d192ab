"""Runs vLLM's own scheduler tests with SemanticScheduler in the place of vLLM's class.

Every test that passes with vLLM's class must pass with ours, under each base policy. Under
`fcfs` that is a formality, because the instance is vLLM's; under the others, tests that depend on
the order in which vLLM serves requests are left out: tests/data/conformance/order.yaml lists them
with a reason. Which tests pass with vLLM's class is stored per release in that folder, too;
`--record` runs them with vLLM's class and stores it anew.

`door` stands for vLLM's tests of its HTTP server, authentication included, with our middleware
around each application as `--middleware` puts it there. Of those tests the ones that build an
application themselves are taken; the others start a server with a model from a hub.

The tests are taken from vLLM's source distribution, which pip's indexes provide. Some of them need
an image model from a hub, or a GPU, and fail with vLLM's class. For another release than the
installed one see scripts/matrix.sh.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import transformers
import yaml
from vllm_sources import CACHE, Environment, extract_tests, fetch_source

SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parent
RECORDS = ROOT / "tests" / "data" / "conformance"
TESTS = (
    "tests/v1/core/test_scheduler.py",
    "tests/v1/core/test_priority_scheduler_random.py",
    "tests/v1/core/test_async_scheduler.py",
)
DOOR = "door"
DOOR_TESTS = (
    "tests/entrypoints/serve/middleware/test_authentication_middleware.py",
    "tests/entrypoints/serve/middleware/test_cors_middleware.py",
    "tests/entrypoints/serve/exception_handling/test_http_status_metrics.py",
    "tests/entrypoints/serve/test_profile_api_router.py",
    "tests/entrypoints/serve/tokenize/test_serving_tokenization.py",
    "tests/entrypoints/scale_out/test_factories.py",
    "tests/entrypoints/generate/structured_decisions/test_strategies.py",
    "tests/entrypoints/rl/state_transitions/test_sleep.py",
    "tests/entrypoints/rl/return_routed_experts/test_route_request_bodies.py",
    "tests/entrypoints/anthropic/test_anthropic_messages_conversion.py",
)
# The models that the tests name. All get the shape of the first, because most tests read only the
# shape; tests of images fail with vLLM's class.
MODELS = ("facebook/opt-125m", "llava-hf/llava-1.5-7b-hf", "Qwen/Qwen2.5-VL-3B-Instruct")
BASES = ("fcfs", "semantic", "priority", "sjf")
# Without predictions all requests are alike, unless a test gives them priorities.
POLICY = "base: {base}\npredictor: {{enabled: false}}\nprofile: default\n"


@dataclass(frozen=True)
class Outcome:
    """Result of one test: its status, and the first line of the reason."""

    result: str
    reason: str = ""

    @property
    def passed(self) -> bool:
        return self.result == "passed"


def installed_release() -> str:
    """The installed release of vLLM, without local part."""
    return importlib.metadata.version("vllm").partition("+")[0]


def prepare(version: str) -> Path:
    """The folder with a release's tests and the models that they name; downloads the source
    distribution (45 MB) where it is not cached."""
    folder = CACHE / "tests" / version
    if (folder / "ready").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    source = fetch_source(version, folder)
    extract_tests(source, folder)
    source.unlink()
    shape = transformers.OPTConfig(architectures=["OPTForCausalLM"], dtype="float16")
    for model in MODELS:
        shape.save_pretrained(folder / model)
    (folder / "ready").touch()
    return folder


def run_tests(
    base: str | None,
    report: Path,
    tests: Iterable[str] = TESTS,
    chosen: Collection[str] = (),
    tree: Path | None = None,
    environment: Environment | None = None,
    workers: int = 2,
) -> dict[str, Outcome]:
    """Runs the tests of a vLLM and returns their outcomes by name.

    Args:
        base: base policy of our class, or `DOOR`; None runs them with vLLM's classes.
        report: JUnit file to write; the output goes to a file beside it.
        tests: files.
        chosen: names of the tests to run; empty: all.
        tree: folder with vLLM, its tests and models, instead of the installed vLLM.
        environment: another one than this.
        workers: processes that run tests, each of which imports vLLM anew; 0 runs them in one.
    """
    folder = tree or prepare(installed_release())
    path = (ROOT, SCRIPTS) if tree is None else (tree, ROOT, SCRIPTS)
    variables = dict(os.environ)
    python = sys.executable
    if environment is not None:
        variables |= environment.variables
        python = str(environment.python)
    variables |= {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    command = [python, "-m", "pytest", "-c", os.devnull, f"--rootdir={folder}", "-q"]
    command += ["-p", "no:cacheprovider", "--timeout=300", "--tb=line", f"--junit-xml={report}"]
    command += ["-p", "conformance_plugin", "-n", str(workers)]
    log = report.with_suffix(".log")
    report.unlink(missing_ok=True)
    with log.open("w") as out, tempfile.TemporaryDirectory() as own:
        if base == DOOR:
            variables["CONFORMANCE_DOOR"] = "1"
        elif base is not None:
            policy = Path(own) / f"{base}.yaml"
            policy.write_text(POLICY.format(base=base))
            variables["SEMSCHED_POLICY"] = str(policy)
        if chosen:
            names = Path(own) / "chosen.txt"
            names.write_text("\n".join(chosen))
            variables["CONFORMANCE_CHOSEN"] = str(names)
        subprocess.run(
            [*command, *tests], cwd=folder, env=variables, stdout=out, stderr=subprocess.STDOUT
        )
    if not report.exists():
        raise SystemExit(f"the tests did not run; see {log}")
    return read_report(report)


def read_report(report: Path) -> dict[str, Outcome]:
    """Outcomes by "file::test" from a JUnit file."""
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
        outcomes[f"{file}::{case.get('name')}"] = Outcome(result, reason)
    return outcomes


def record(version: str, outcomes: dict[str, Outcome]) -> None:
    """Stores the names of the tests that passed."""
    passed = sorted(name for name, outcome in outcomes.items() if outcome.passed)
    RECORDS.mkdir(exist_ok=True)
    (RECORDS / f"{version}.txt").write_text("\n".join(passed) + "\n")


def recorded(version: str) -> list[str]:
    """The tests that pass with vLLM's class, as stored by `record`; SystemExit if none are."""
    file = RECORDS / f"{version}.txt"
    if not file.exists():
        raise SystemExit(f"no list of tests for vLLM {version}: make one with --record")
    return file.read_text().splitlines()


def required(version: str, base: str) -> list[str]:
    """The tests that must pass under a base policy or at the `DOOR`: those recorded, except for
    tests that depend on vLLM's order, which only `fcfs` keeps."""
    list_name = f"{version}-{DOOR}" if base == DOOR else version
    names = recorded(list_name)
    if base in ("fcfs", DOOR):
        return names
    ordered = yaml.safe_load((RECORDS / "order.yaml").read_text())
    left_out = ordered["all"] | ordered.get(base, {})
    return [name for name in names if name.partition("[")[0] not in left_out]


def lost_tests(
    base: str, folder: Path, names: Collection[str] = (), workers: int = 2
) -> dict[str, str]:
    """Runs the tests that must pass under a base policy, or those named; those that do not, and
    why. `folder` gets the report; `workers`: see `run_tests`."""
    names = names or required(installed_release(), base)
    report = folder / f"{installed_release()}-{base}.xml"
    tests = DOOR_TESTS if base == DOOR else TESTS
    outcomes = run_tests(base, report, tests, chosen=names, workers=workers)
    missing = Outcome("missing")
    ours = {name: outcomes.get(name, missing) for name in names}
    return {name: f"{end.result}: {end.reason}" for name, end in ours.items() if not end.passed}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/conformance.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "bases", nargs="*", help=f"base policies, or {DOOR} (default: {', '.join(BASES)}, {DOOR})"
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "conformance-output", help="folder for the results"
    )
    parser.add_argument(
        "--record", action="store_true", help="store first what passes with vLLM's class"
    )
    args = parser.parse_args()
    unknown = set(args.bases) - {*BASES, DOOR}
    if unknown:
        parser.error(f"unknown base policy: {', '.join(unknown)}")
    output = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    version = installed_release()
    if args.record:
        for name, tests in ((version, TESTS), (f"{version}-{DOOR}", DOOR_TESTS)):
            outcomes = run_tests(None, output / f"{name}-vllm.xml", tests)
            record(name, outcomes)
            print(f"vLLM {name}: {len(recorded(name))} of {len(outcomes)} tests pass", flush=True)
    result = {}
    listed = (RECORDS / f"{version}-{DOOR}.txt").exists()
    bases = (*BASES, DOOR) if listed else BASES
    for base in args.bases or bases:
        begin = time.monotonic()
        lost = lost_tests(base, output)
        count = len(required(version, base))
        result[base] = {"required": count, "passed": count - len(lost), "lost": lost}
        seconds = time.monotonic() - begin
        print(f"vLLM {version}, base: {base}: {count - len(lost)} of {count} in {seconds:.0f} s")
        for name, reason in lost.items():
            print(f"  lost: {name}\n        {reason[:300]}", flush=True)
    (output / f"{version}.json").write_text(json.dumps(result, indent=2) + "\n")
    failed = any(counts["lost"] or not counts["passed"] for counts in result.values())
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
