"""The index of measurements names every dated page, and files that exist."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "measurements"
INDEX = yaml.safe_load((FOLDER / "measured.yaml").read_text(encoding="utf-8"))
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")


def test_every_page_with_dated_figures_is_in_the_index() -> None:
    dated = {path.name for path in FOLDER.glob("*.md") if DATE.search(path.read_text("utf-8"))}
    assert dated == set(INDEX)


@pytest.mark.parametrize("page", INDEX)
def test_files_that_figures_depend_on_exist(page: str) -> None:
    files = INDEX[page]["of"]
    assert files
    for file in files:
        assert (ROOT / file).exists(), file
