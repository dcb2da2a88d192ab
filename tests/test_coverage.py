"""Each system of the source documents has code, a policy or scenario, a test and a measurement."""

import re

import pytest
from test_documentation import DOCS, ROOT, anchors_of

from vllm_semantic_sched.policy.config.files import shipped_names

MEASUREMENTS = DOCS / "measurements"
IDS = [
    *(f"P{number}" for number in range(1, 11)),
    *(f"S{number}" for number in range(1, 11)),
    *(f"O{number}" for number in range(1, 9)),
    *(f"I{number}" for number in range(1, 5)),
]
ROWS = {
    cells[0]: cells
    for line in (MEASUREMENTS / "coverage.md").read_text("utf-8").splitlines()
    if re.match(r"\| [PSOI]\d+ \|", line)
    for cells in [line.strip("| ").split(" | ")]
}


def test_every_system_has_one_row() -> None:
    assert list(ROWS) == IDS


@pytest.mark.parametrize("name", IDS)
def test_every_cell_names_something_that_exists(name: str) -> None:
    _, title, code, turned_on, test, measured = ROWS[name]
    assert title
    file = code.strip("`")
    assert (ROOT / file).is_file() or (ROOT / "vllm_semantic_sched" / file).is_file(), file
    assert turned_on.strip("`") in {*shipped_names("policy"), *shipped_names("scenario")}
    module, function = test.strip("`").split("::")
    assert f"\ndef {function}(" in (ROOT / module).read_text("utf-8"), test
    page, _, anchor = re.fullmatch(r"\[.+\]\((.+)\)", measured)[1].partition("#")
    path = MEASUREMENTS / page
    assert path.is_file() and (not anchor or anchor in anchors_of(path)), measured
