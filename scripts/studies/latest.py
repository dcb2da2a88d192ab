"""Write what the measurements of scripts/measure_all.sh printed: a text file for each, and a page
that lists them."""

import argparse
import re
from pathlib import Path

from common import main

from vllm_semantic_sched.lab.profiling.live_engine import processor

_HEAD = """# Latest run of every measurement

`scripts/measure_all.sh` wrote this list and the files behind it: what each measurement printed. The
other pages explain the figures.

| output | day | commit | command |
|---|---|---|---|
"""
# Lines that name files of the run or show progress.
_DROPPED = re.compile(r"^(records|report|picture|figures|rounds|written): |\d+%\|")


def output_of(folder: Path) -> str:
    """The output file of one measurement: how, on what and when it ran, and what it printed."""
    printed = (folder / "printed.txt").read_text("utf-8").splitlines()
    lines = [line.rstrip() for line in printed if not _DROPPED.search(line)]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")
    facts = {name: (folder / name).read_text("utf-8") for name in ("command", "commit", "day")}
    facts["processor"] = processor()
    head = "\n".join(f"{name}: {fact}" for name, fact in facts.items())
    return f"{head}\n\n{text}\n"


def row_of(output: Path) -> str:
    """The row of an output file in the page beside its folder."""
    head = output.read_text("utf-8").partition("\n\n")[0]
    facts = dict(line.split(": ", 1) for line in head.splitlines())
    link = f"[{output.stem}]({output.parent.name}/{output.name})"
    return f"| {link} | {facts['day']} | {facts['commit']} | `{facts['command']}` |\n"


def page_of(outputs: Path) -> str:
    """The page that lists the output files of a folder."""
    files = sorted(outputs.glob("*.txt"), key=lambda output: output.stem)
    return _HEAD + "".join(row_of(output) for output in files)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("results", type=Path, help="folder with a folder for each measurement")
    parser.add_argument("page", type=Path, help="page to write, with the folder output beside it")


def run(args: argparse.Namespace) -> int:
    """Write the files and the page; always 0. Files of measurements without results stay."""
    outputs = args.page.parent / "output"
    outputs.mkdir(parents=True, exist_ok=True)
    for done in sorted(args.results.glob("*/day")):
        output = outputs / f"{done.parent.name}.txt"
        output.write_text(output_of(done.parent), encoding="utf-8")
    args.page.write_text(page_of(outputs), encoding="utf-8")
    return 0


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
