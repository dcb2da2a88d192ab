"""What the documentation names exists: files, links, commands and options."""

import re
import shlex
from pathlib import Path

import pytest

from vllm_semantic_sched.admin import reference
from vllm_semantic_sched.cli import main
from vllm_semantic_sched.engine.metrics.table import COUNTERS, GAUGES, HISTOGRAMS
from vllm_semantic_sched.policy.command import describe_keys
from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.keys import keys_of

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(page.read_text("utf-8") for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text("utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(
        r"`((?:scripts|configs|tests|docs|patches|policy|predict|engine)/[\w./-]+)`", text
    ):
        assert (ROOT / path).exists() or (ROOT / "vllm_semantic_sched" / path).exists(), path


def _commands() -> list[list[str]]:
    lines = re.sub(r"\\\n\s*", "", TEXT).splitlines()
    found = [line.strip() for line in lines if line.strip().startswith("semsched ")]
    found += re.findall(r"`(semsched [a-z][^`\n]*)`", TEXT)
    return [shlex.split(line, comments=True)[1:] for line in dict.fromkeys(found)]


@pytest.mark.parametrize("words", _commands(), ids=" ".join)
def test_commands_and_their_options_exist(words: list[str], capsys) -> None:
    names = [word for word in words if re.fullmatch(r"[a-z-]+", word) and not word.startswith("-")]
    for depth in (2, 1):  # two levels of subcommands at most
        with pytest.raises(SystemExit) as stop:
            main([*names[:depth], "--help"])
        if stop.value.code == 0:
            break
    assert stop.value.code == 0, capsys.readouterr().err
    helped = capsys.readouterr().out
    for option in (word for word in words if word.startswith("--")):
        assert option in helped, option


def test_policy_keys_named_in_the_text_exist() -> None:
    keys = {line.split(":")[0] for line in describe_keys().splitlines()}
    sections = {key.split(".")[0] for key in keys if "." in key}
    for key in re.findall(r"`([a-z_]+\.[a-z_]+)(?::[^`]*)?`", TEXT):
        if key.split(".")[0] in sections:
            assert key in keys, key


def test_the_tables_of_the_operations_page_are_those_of_the_code(tmp_path) -> None:
    page = ROOT / "docs" / "operations.md"
    copy = tmp_path / "operations.md"
    copy.write_text(page.read_text("utf-8"), "utf-8")
    reference.insert(copy)
    assert copy.read_text("utf-8") == page.read_text("utf-8"), (
        "run `semsched policy keys --into docs/operations.md`"
    )


def test_every_knob_names_metrics_that_exist() -> None:
    counters = {f"{name}_total" for name in COUNTERS}
    for key in keys_of(Policy):
        assert set(reference.trace_of(key.name).metrics) <= counters | {*GAUGES, *HISTOGRAMS}


def test_metrics_named_in_the_text_exist() -> None:
    counters = {f"{name}_total" for name in COUNTERS}
    named = set(re.findall(r"`semsched:([a-z_0-9]+)", TEXT))
    assert named <= counters | {*GAUGES, *HISTOGRAMS}
