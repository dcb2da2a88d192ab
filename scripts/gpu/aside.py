"""Runs a command while the tracked weights are out of the working tree, and puts them back: a copy
of the tree to a machine with a size limit then fits. Also after an interruption; after a kill, the
next call puts them back first.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

WEIGHTS = "*.safetensors"
_FOLDER = "weights-aside"  # in Git's folder, which belongs to the same disk
_MANIFEST = "manifest.json"


class Altered(SystemExit):
    """A file that was put back is not the one that was moved away."""


def move_aside(root: Path) -> None:
    """Move the tracked weights into Git's folder; no-op if there are none."""
    folder = _folder(root)
    hashes = {path: _hash(root / path) for path in _tracked(root) if (root / path).is_file()}
    folder.mkdir()
    # First: whatever comes between, the next call knows what belongs where.
    (folder / _MANIFEST).write_text(json.dumps(hashes))
    for number, path in enumerate(hashes):
        shutil.move(root / path, folder / str(number))


def put_back(root: Path) -> None:
    """Undo `move_aside`, as far as it came; no-op without. Altered: a file's hash differs."""
    folder = _folder(root)
    if not folder.exists():
        return
    manifest = folder / _MANIFEST
    hashes = json.loads(manifest.read_text()) if manifest.exists() else {}
    for number, path in enumerate(hashes):
        if (folder / str(number)).exists():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(folder / str(number), root / path)
    altered = [path for path, known in hashes.items() if _hash(root / path) != known]
    shutil.rmtree(folder)
    if altered:
        raise Altered(f"altered meanwhile, see `git status`: {', '.join(altered)}")


def run(root: Path, command: list[str]) -> int:
    """Run a command without the weights in the tree; its exit status."""
    put_back(root)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, _interrupted)
    process = None
    try:
        move_aside(root)
        process = subprocess.Popen(command)
        return process.wait()
    finally:
        # From here on nothing interrupts.
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if process is not None and process.poll() is None:
            process.terminate()
        put_back(root)
        print("the weights are back", file=sys.stderr)


def _interrupted(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _tracked(root: Path) -> list[str]:
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", WEIGHTS], check=True, capture_output=True
    ).stdout
    return [os.fsdecode(name) for name in listed.split(b"\0") if name]


def _folder(root: Path) -> Path:
    command = ["git", "-C", str(root), "rev-parse", "--absolute-git-dir"]
    folder = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return Path(folder) / _FOLDER


def _hash(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(f"usage: gpu_check.sh aside COMMAND [ARGUMENT...]\n\n{__doc__}")
        sys.exit(0 if len(sys.argv) > 1 else 2)
    top = ["git", "rev-parse", "--show-toplevel"]
    root = subprocess.run(top, check=True, capture_output=True, text=True).stdout.strip()
    sys.exit(run(Path(root), sys.argv[1:]))


if __name__ == "__main__":
    main()
