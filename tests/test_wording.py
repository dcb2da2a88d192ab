"""No text has a phrase that data/wording.yaml lists."""

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
TABLE = yaml.safe_load((ROOT / "tests" / "data" / "wording.yaml").read_text("utf-8"))
FOLDERS = ("configs", "docs", "patches", "scripts", "tests", "vllm_semantic_sched")
KINDS = {".html", ".json", ".md", ".py", ".sh", ".toml", ".yaml"}
# Messages of people, and output of commands as it was.
QUOTED = (
    "configs/domains",
    "docs/measurements/predictor-report",
    "tests/data",
    "vllm_semantic_sched/lab/bench/texts.yaml",
    "vllm_semantic_sched/lab/training/texts",
    "vllm_semantic_sched/predict/weights",
)


def texts() -> Iterator[tuple[str, str]]:
    """Path and content of each file."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*"))]
    for path in (*ROOT.glob("*.md"), *paths):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix in KINDS and path.is_file() and not name.startswith(QUOTED):
            yield name, path.read_text("utf-8")


def joined(text: str) -> str:
    """A text in lower case, in which strings and comments go on after a line break."""
    text = re.sub(r"""["']\s*\n\s*f?["']""", "", text)
    text = re.sub(r"\n\s*#+ ", " ", text)
    return " ".join(text.lower().split())


def problems_of(text: str) -> list[str]:
    """What to write in place of each listed phrase that a text has."""
    text = joined(text)
    return [
        f"{entry['instead']!r}: write {entry['write']!r}"
        for entry in TABLE
        if entry["instead"].lower() in text
    ]


def test_no_text_has_a_listed_phrase() -> None:
    found = [f"{name}: {problem}" for name, text in texts() for problem in problems_of(text)]
    assert not found, "\n".join(found)


def test_phrase_is_found_across_lines() -> None:
    first, *rest = TABLE[0]["instead"].split()
    end = " ".join(rest)
    (expected,) = problems_of(f"a {first} {end}.")
    assert problems_of(f"A {first.title()}\n    {end}.") == [expected]
    assert problems_of(f"# A {first}\n# {end}") == [expected]
    assert problems_of(f'print(\n    "a {first} "\n    f"{end}"\n)') == [expected]
    assert problems_of(f"{end} {first}") == []


def test_rewrites_have_no_listed_phrase_themselves() -> None:
    for entry in TABLE:
        assert problems_of(entry["write"]) == []
