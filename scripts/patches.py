"""Checks the patches in patches/, and applies them to an installed vLLM.

`check` applies each patch alone and all together to vLLM's source distribution, runs vLLM's
scheduler tests before and after, of which none may be lost, and the tests that the patches bring.
`apply` patches the vLLM of a virtual environment, `revert` takes the patches off again. Both refuse
a vLLM whose files are neither as installed nor as patched.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_sources import CACHE, Environment, environment, fetch_source

if TYPE_CHECKING:
    from conformance import Outcome

ROOT = Path(__file__).resolve().parent.parent
PATCHES = ROOT / "patches"
WORK = CACHE / "patches"
CODE = "--include=vllm/*"  # a wheel has no tests
# What conformance.py does not run and is about preemption or outputs.
MORE_TESTS = [
    "tests/v1/core/test_deferred_block_free.py",
    "tests/v1/core/test_priority_preemption_bug.py",
    "tests/v1/engine/test_output_processor.py",
]


def series(version: str) -> list[Path]:
    """The patches for a release, in order; SystemExit if there are none."""
    patches = sorted(PATCHES.glob(f"vllm-{version}/*.patch"))
    if not patches:
        known = ", ".join(sorted(folder.name for folder in PATCHES.glob("vllm-*")))
        raise SystemExit(f"There are no patches for vLLM {version}, only for {known}.")
    return patches


def touched_files(patches: list[Path]) -> list[str]:
    """Paths that the patches change or create."""
    lines = [line for patch in patches for line in patch.read_text().splitlines()]
    return sorted({line.removeprefix("+++ b/") for line in lines if line.startswith("+++ b/")})


def git_apply(patch: Path, folder: Path, *options: str) -> str:
    """Applies a patch without fuzz; what git says if it does not fit, else nothing."""
    done = subprocess.run(
        ["git", "apply", *options, str(patch)],
        cwd=folder,
        # Inside a checkout, git would leave out what that ignores.
        env=os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent), "LC_ALL": "C"},
        capture_output=True,
        text=True,
    )
    return done.stderr.strip() if done.returncode else ""


# check


def unpack_source(version: str) -> Path:
    """The unpacked source distribution of a release: `vllm/` and `tests/`."""
    folder = WORK / version / "source"
    if folder.exists():
        return folder
    unfinished = folder.with_name("unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    source = fetch_source(version, unfinished.parent)
    with tarfile.open(source) as archive:
        for member in archive:
            _, _, member.name = member.name.partition("/")
            if member.name.startswith(("vllm/", "tests/")):
                archive.extract(member, unfinished, filter="data")
    source.unlink()
    unfinished.rename(folder)
    return folder


def copy_files(source: Path, names: list[str], target: Path) -> None:
    """Fills `target` with those of the files that exist."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in names:
        if (source / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, target / name)


def apply_to_copy(source: Path, patches: list[Path], target: Path, *options: str) -> Path:
    """Applies patches to a copy of what they touch; SystemExit if one does not fit."""
    copy_files(source, touched_files(patches), target)
    for patch in patches:
        problem = git_apply(patch, target, *options)
        if problem:
            raise SystemExit(f"{patch.name} does not apply:\n{problem}")
    return target


def overlay(venv: Environment, version: str, source: Path, changed: Path, target: Path) -> Path:
    """A folder with vLLM and its tests in which `changed` replaces files, else links."""
    from conformance import prepare

    models = prepare(version)
    shutil.rmtree(target, ignore_errors=True)
    installed = installed_in(venv.folder).packages
    for origin, name in ((installed / "vllm", "vllm"), (source / "tests", "tests")):
        shutil.copytree(origin, target / name, copy_function=os.symlink)
    for folder in models.iterdir():
        if folder.is_dir() and folder.name != "tests":
            (target / folder.name).symlink_to(folder)
    # The installed vLLM may be patched itself.
    for name in touched_files(series(version)):
        file = next((top / name for top in (changed, source) if (top / name).exists()), None)
        (target / name).unlink(missing_ok=True)
        if file is not None:
            shutil.copy(file, target / name)
    return target


def check(version: str, quick: bool) -> bool:
    """Checks the series for a release, or with `quick` only whether it applies; whether all is
    well."""
    from conformance import TESTS, run_tests

    patches = series(version)
    source = unpack_source(version)
    work = WORK / version
    sets = {patch.name: [patch] for patch in patches} | {"all together": patches}
    changed = {
        name: apply_to_copy(source, subset, work / "changed" / name)
        for name, subset in sets.items()
    }
    print(f"vLLM {version}: {len(patches)} patches apply, each alone and all together", flush=True)
    if quick:
        return True
    good = True
    installed = environment(version)

    def run(tests: Sequence[str], files: Path, name: str) -> dict[str, Outcome]:
        tree = overlay(installed, version, source, files, work / "tree")
        report = work / f"{name}.xml"
        return run_tests(None, report, tests, tree=tree, environment=installed)

    for name, subset in sets.items():
        tests = [file for file in touched_files(subset) if file.startswith("tests/")]
        outcomes = run(tests, changed[name], "new").values()
        passed = sum(outcome.passed for outcome in outcomes)
        good &= passed == len(outcomes) > 0
        print(f"  {name}: {passed} of {len(outcomes)} new tests pass", flush=True)
    tests = [*TESTS, *MORE_TESTS]
    outcomes_before = run(tests, work / "nothing", "before")
    before = [name for name, outcome in outcomes_before.items() if outcome.passed]
    after = run(tests, changed["all together"], "after")
    lost = [name for name in before if name not in after or not after[name].passed]
    kept = len(before) - len(lost)
    print(
        f"  vLLM's own tests: {len(before)} pass without patches, {kept} of them with all",
        flush=True,
    )
    for name in lost:
        print(f"    lost: {name}", flush=True)
    return good and not lost and bool(before)


# apply and revert


@dataclass(frozen=True)
class Installed:
    """A vLLM (version without its local part) in a virtual environment: the folder with `vllm/`,
    and the SHA-256 of the files as installed, by path, in the encoding of wheels."""

    packages: Path
    version: str
    hashes: dict[str, str]

    def is_untouched(self, path: str) -> bool:
        """Whether a file is as it was installed; a new one must not exist."""
        file = self.packages / path
        if path not in self.hashes or not file.exists():
            return path not in self.hashes and not file.exists()
        digest = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest())
        return digest.rstrip(b"=").decode() == self.hashes[path]


def read_installed(packages: Path) -> Installed | None:
    """The distribution in a site-packages folder that holds vLLM's code."""
    for record in packages.glob("vllm*.dist-info/RECORD"):
        with record.open(newline="") as lines:
            hashes = {row[0]: row[1].removeprefix("sha256=") for row in csv.reader(lines)}
        if "vllm/__init__.py" in hashes:
            version = record.parent.name.removesuffix(".dist-info").rpartition("-")[2]
            return Installed(packages, version.partition("+")[0], hashes)
    return None


def installed_in(venv: Path) -> Installed:
    """The vLLM of a virtual environment; SystemExit if there is none."""
    ask = "import json, sysconfig; print(json.dumps(sysconfig.get_path('purelib')))"
    try:
        told = subprocess.run(
            [venv / "bin" / "python", "-c", ask], check=True, capture_output=True, text=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        raise SystemExit(f"{venv} is not a virtual environment.") from None
    vllm = read_installed(Path(json.loads(told)))
    if vllm is None:
        raise SystemExit(f"vLLM is not installed in {venv}.")
    return vllm


def patch_installed(venv: Path, back: bool) -> None:
    """Applies the series for the installed release to it, or takes it off. SystemExit if the files
    are neither as installed nor as patched."""
    vllm = installed_in(venv)
    patches = series(vllm.version)
    files = [file for file in touched_files(patches) if file.startswith("vllm/")]
    untouched = all(vllm.is_untouched(file) for file in files)
    work = WORK / "installed"
    try:
        if not untouched:
            # Patched if taking the patches off a copy gives what was installed.
            copy_files(vllm.packages, files, work)
            for patch in reversed(patches):
                git_apply(patch, work, "--reverse", CODE)
            copy = Installed(work, vllm.version, vllm.hashes)
            if not all(copy.is_untouched(file) for file in files):
                modified = [file for file in files if not vllm.is_untouched(file)]
                raise SystemExit(
                    f"vLLM {vllm.version} in {venv} was modified by something else: "
                    f"{', '.join(modified)}. Nothing was changed; reinstall vLLM first."
                )
        elif not back:
            apply_to_copy(vllm.packages, patches, work, CODE)
        if untouched == back:
            state = "has no patches" if back else "is patched already"
            print(f"vLLM {vllm.version} in {venv} {state}.")
            return
        for file in files:
            place = vllm.packages / file
            # Not written in place: installers link files of several environments to one.
            place.unlink(missing_ok=True)
            if (work / file).exists():
                shutil.copy(work / file, place)
        state = "off" if back else "on"
        print(f"vLLM {vllm.version} in {venv}: {len(patches)} patches {state}.")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/patches.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser("check", help="check the patches")
    versions = sorted(folder.name.removeprefix("vllm-") for folder in PATCHES.glob("vllm-*"))
    checking.add_argument("versions", nargs="*", help=f"default: {' '.join(versions)}")
    checking.add_argument("--quick", action="store_true", help="only whether they apply")
    for name, text in (("apply", "patch an installed vLLM"), ("revert", "take the patches off")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--to", type=Path, required=True, metavar="VENV")
    args = parser.parse_args()
    if args.command == "check":
        results = [check(version, args.quick) for version in args.versions or versions]
        return 0 if all(results) else 1
    patch_installed(args.to.resolve(), back=args.command == "revert")
    return 0


if __name__ == "__main__":
    sys.exit(main())
