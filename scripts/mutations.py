"""Break the scheduler's part of each feature, and see that the feature's test fails.

Each mutation of tests/features/mutations/ replaces one place of the package, in a copy of the
repository, and runs one test there. A test that passes all the same is printed, and the exit
status is 1. Takes 10 to 30 seconds a mutation.

example:
  python scripts/mutations.py --feature "LoRA"
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from vllm_semantic_sched.cli.console import print_table

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "vllm_semantic_sched"
MUTATIONS = ROOT / "tests" / "features" / "mutations"
_TIMEOUT = 600  # seconds of one test
_FAILED = 1  # pytest's exit status; others are errors of the command


def try_mutation(mutation: dict[str, str], root: Path) -> str:
    """Run a mutation's test in a copy of the repository: "found", "missed" or "error"."""
    path = root / PACKAGE / mutation["file"]
    text = path.read_text()
    if text.count(mutation["old"]) != 1:
        return "error: the old text is not there once"
    path.write_text(text.replace(mutation["old"], mutation["new"]))
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    quiet |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, f"tests/{mutation['test']}"],
            cwd=root,
            env=os.environ | quiet | {"PYTHONPATH": str(root)},
            capture_output=True,
            timeout=_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return "found"
    finally:
        path.write_text(text)
    if done.returncode == 0:
        return "missed"
    return "found" if done.returncode == _FAILED else f"error: pytest ended with {done.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--feature", nargs="+", help="only these rows of docs/features.md")
    args = parser.parse_args()
    chosen = [
        mutation
        for file in sorted(MUTATIONS.glob("*.yaml"))
        for mutation in yaml.safe_load(file.read_text()) or []
        if not args.feature or mutation["feature"] in args.feature
    ]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".venv", ".git", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, root, ignore=ignored)
        for number, mutation in enumerate(chosen, 1):
            print(f"{number}/{len(chosen)} {mutation['feature']}", file=sys.stderr)
            rows.append((mutation["feature"], mutation["test"], try_mutation(mutation, root)))
    print_table("A mutation of each feature", ["feature", "test", "result"], rows)
    return 0 if all(result == "found" for _, _, result in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
