"""Write what the measurements of scripts/measure_all.sh printed into one page."""

import argparse
import re
from pathlib import Path

from common import main

from vllm_semantic_sched.lab.profiling.live_engine import processor

_HEAD = """# Latest run of every measurement

Written by `scripts/measure_all.sh`: what each measurement printed, with its command, commit and
day. The other pages explain the figures.
"""
# Lines that name files of the run or show progress.
_DROPPED = re.compile(r"^(records|report|picture|figures|rounds|written): |\d+%\|")


def sections_of(page: Path) -> dict[str, str]:
    """The sections of a page by name."""
    text = page.read_text("utf-8") if page.exists() else ""
    parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], (part.strip() for part in parts[1::2]), strict=True))


def section(folder: Path) -> str:
    """The section of one measurement."""
    printed = (folder / "printed.txt").read_text("utf-8").splitlines()
    lines = [line.rstrip() for line in printed if not _DROPPED.search(line)]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")
    when = (folder / "when").read_text("utf-8").strip()
    command = (folder / "command").read_text("utf-8")
    return f"`{command}`\n\n{when}, {processor()}.\n\n```text\n{text}\n```"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("results", type=Path, help="folder with a folder for each measurement")
    parser.add_argument("page", type=Path, help="page to write; other sections of it stay")


def run(args: argparse.Namespace) -> int:
    """Write the page; always 0."""
    sections = sections_of(args.page)
    for done in sorted(args.results.glob("*/commit")):
        sections[done.parent.name] = section(done.parent)
    body = "\n\n".join(f"## {name}\n\n{text}" for name, text in sorted(sections.items()))
    args.page.write_text(f"{_HEAD}\n{body}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
