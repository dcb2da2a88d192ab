"""Dated figures are no older than what they measure, or the index says why they still hold."""

import datetime
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "measurements"
INDEX = yaml.safe_load((FOLDER / "measured.yaml").read_text(encoding="utf-8"))
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")


def last_change(path: str) -> datetime.date | None:
    """Day of the last commit that changed a file; None outside a checkout with its history."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%cs", "--", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return datetime.date.fromisoformat(done.stdout.strip()) if done.stdout.strip() else None


def oldest_figure(page: str) -> datetime.date:
    found = DATE.findall((FOLDER / page).read_text(encoding="utf-8"))
    return min(map(datetime.date.fromisoformat, found))


def test_every_page_with_dated_figures_is_in_the_index() -> None:
    dated = {path.name for path in FOLDER.glob("*.md") if DATE.search(path.read_text("utf-8"))}
    assert dated == set(INDEX)


@pytest.mark.parametrize("page", INDEX)
def test_figures_are_as_new_as_what_they_measure_or_say_why_not(page: str) -> None:
    entry = INDEX[page]
    assert entry["of"] and all((ROOT / path).exists() for path in entry["of"])
    changes = {path: last_change(path) for path in entry["of"]}
    newer = [path for path, day in changes.items() if day and day > oldest_figure(page)]
    if any(changes.values()):
        assert bool(newer) == bool(entry.get("older")), (
            f"{page}: changed since its oldest figure: {newer}. Measure again, or "
            "say in measured.yaml (`older`) why they still hold; remove a reason without need."
        )
