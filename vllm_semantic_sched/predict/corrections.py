"""Corrections: what operators say the level of a request should have been. Nothing but numbers."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from vllm_semantic_sched.policy.config.overload import Events

_FILE = "corrections.jsonl"
_LARGEST = 10_000_000  # bytes, about 60,000 corrections; then the file is renamed


class Correction(NamedTuple):
    """A level that an operator has corrected, as one line of the file."""

    time: float  # Unix
    probabilities: tuple[float, ...]  # as predicted, one per level
    level: int  # at which the request was served
    corrected: int  # its true level
    sampled: bool = False  # drawn at random, and not because somebody noticed it


def corrections_path(events: Events) -> Path | None:
    """The file of corrections, in the folder of the event log; None without one."""
    return None if events.path is None else Path(events.path).expanduser().with_name(_FILE)


def append(path: Path, correction: Correction) -> None:
    """Add a correction to a file that only its user can read; a full one is renamed to FILE.1.
    OSError if it cannot be written."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size >= _LARGEST:
        path.replace(f"{path}.1")
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(json.dumps(correction._asdict()) + "\n")


def read_corrections(path: Path) -> list[Correction]:
    """The corrections in a file and in the one before it, oldest first. OSError if it cannot be
    read; ValueError names a line that is no correction."""
    old = Path(f"{path}.1")
    text = (old.read_text("utf-8") if old.exists() else "") + path.read_text("utf-8")
    return parse_corrections(map(json.loads, text.splitlines()))


def parse_corrections(entries: Iterable[Any]) -> list[Correction]:
    """Corrections from a file's or a server's objects. ValueError names one that is none."""
    corrections = []
    for number, entry in enumerate(entries, 1):
        try:
            correction = Correction(**entry)
            probabilities = tuple(map(float, correction.probabilities))
        except TypeError as error:
            raise ValueError(f"correction {number}: {error}") from error
        last = len(probabilities) - 1
        if last < 1 or not (correction.level >= 0 and 0 <= correction.corrected <= last):
            raise ValueError(f"correction {number}: its levels do not fit its probabilities")
        corrections.append(correction._replace(probabilities=probabilities))
    return corrections
