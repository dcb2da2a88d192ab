"""Measure how good a predictor is on labeled texts, with baselines beside it.

The texts come from a CSV with the columns `text`, `level` (0 most urgent to 4, or a level name of
the domain) and/or `output_tokens`, optionally `kind`; from a folder of such files, one for each
language (`es.csv`); or from a held-out part of the data folder; or, with `--all`, from all of
these. The output folder gets report.json, report.md and, with charts, report.html. Needs the
package's extra `lab`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from vllm_semantic_sched.cli.arguments import failing_in_lab
from vllm_semantic_sched.cli.console import save_page
from vllm_semantic_sched.lab.evaluation import examples
from vllm_semantic_sched.lab.evaluation.bars import bars_missed, read_bars
from vllm_semantic_sched.lab.evaluation.compositions import read_composed_set
from vllm_semantic_sched.lab.evaluation.domain import Domain, load_domain
from vllm_semantic_sched.lab.report.page import markdown
from vllm_semantic_sched.lab.training.wording import has_texts_by_language
from vllm_semantic_sched.policy.config import load_policy
from vllm_semantic_sched.policy.config.estimates import MissedCosts
from vllm_semantic_sched.sim.data_folder import data_root

if TYPE_CHECKING:
    from vllm_semantic_sched.lab.evaluation.baselines import Guesser

_SUMMARY = "summary.md"
# Sets of tests/data, beside the messages alone.
_BESIDE = ("compositions", "conversations", "everyday", "long_prompts")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the texts, the report, the predictor and the baselines."""
    add = parser.add_argument_group("texts (one of these; --all also with --data)").add_argument
    add(
        "--data",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE.csv|DIR",
        help=(
            "texts with level and/or output_tokens; of a folder every CSV, each named after the "
            "language of its texts, or every YAML file with parts of compositions or chats; each "
            "of several gets a folder below --output"
        ),
    )
    add(
        "--builtin",
        choices=examples.BUILTIN_SETS,
        metavar="NAME",
        help=f"one of {', '.join(examples.BUILTIN_SETS)}",
    )
    add(
        "--all",
        action="store_true",
        help=(
            f"every builtin, and --data if given: a folder below --output for each, and {_SUMMARY}"
        ),
    )
    add("--data-root", type=Path, metavar="DIR", help="data folder (default: SEMSCHED_DATA)")
    add(
        "--domain",
        metavar="NAME|FILE",
        help=(
            "what the labels in the column level mean (default: 0 to 4, or names of the domain "
            "emergency)"
        ),
    )
    add(
        "--claims",
        action="store_true",
        help=(
            "read each text of the first --data once more with claims about its urgency, such as "
            '"SYSTEM: urgency 0."'
        ),
    )

    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="DIR", help="folder for the report")
    add(
        "--bars",
        type=Path,
        metavar="FILE.yaml",
        help=(
            "figures of report.json to reach, by set: `urgency: {at_least: {accuracy: 0.85}}`; "
            "exit status 1 if one is missed"
        ),
    )
    add("--predictor", metavar="NAME|DIR", help="folder or hub id (default: the shipped one)")
    add(
        "--policy",
        metavar="NAME|FILE",
        help=(
            "policy whose `decision.missed_cost` decides for a model without bounds (default: the "
            "default costs)"
        ),
    )
    baselines = parser.add_mutually_exclusive_group()
    baselines.add_argument(
        "--train",
        type=Path,
        metavar="FILE.csv",
        help=(
            "texts to train the TF-IDF baselines on, in the format of --data (default: those of "
            "the shipped model, if there is a data folder)"
        ),
    )
    baselines.add_argument(
        "--no-baselines", action="store_true", help="leave out TF-IDF, which takes minutes"
    )
    add("--threads", type=int, default=1, help="threads that torch may use (default: %(default)s)")


@failing_in_lab()
def run(args: argparse.Namespace) -> int:
    """Evaluate, write the report and print it; 1 if a figure misses its bar, or if a file, a
    package or an option is wrong."""
    _check(args)
    costs = load_policy(args.policy).decision if args.policy else None
    # All files are read first, so that a mistake in one shows before minutes of work.
    bars = read_bars(args.bars) if args.bars else {}
    root = args.data_root or data_root()
    domain = None if args.domain is None else load_domain(args.domain)
    sets = {path.stem: _read_set(path, domain) for path in args.data}
    builtin = [args.builtin] if args.builtin else []
    if args.all:
        builtin = list(examples.BUILTIN_SETS)
    for name in builtin:
        sets[name] = examples.builtin_set(name, root)
    training = [] if args.no_baselines else _training_examples(args.train, domain, root)
    measure = measure_of(args.predictor, training, args.threads, costs=costs)
    several = args.all or len(sets) > 1
    reports = {}
    for name, labeled in sets.items():
        claims = args.claims and labeled.name == args.data[0].name
        output = args.output / name if several else args.output
        reports[name] = report_on(labeled, measure, output, claims)
    if several:
        _summarize(reports, args.output)
    # One file may have bars for every set; a name that no set has is a mistake.
    known = {*examples.BUILTIN_SETS, *_BESIDE} - {*reports}
    bars = {name: bar for name, bar in bars.items() if name not in known}
    missed = bars_missed(bars, reports)
    for line in missed:
        print(f"semsched evaluate: {line}", file=sys.stderr)
    return int(bool(missed))


def measure_of(
    model: str | None,  # None: the shipped one
    training: Sequence[examples.Example],
    threads: int = 1,
    beside: Mapping[str, Guesser] | None = None,
    costs: MissedCosts | None = None,  # None: the default ones
) -> Callable[..., dict[str, Any]]:
    """`evaluate_predictor` of a model, `beside` other ones and the TF-IDF baselines. Fits these to
    `training` and prints that this takes time."""
    from vllm_semantic_sched.lab.evaluation.baselines import tfidf_baselines
    from vllm_semantic_sched.lab.evaluation.measure import evaluate_predictor
    from vllm_semantic_sched.predict.instant import InstantReader
    from vllm_semantic_sched.predict.model import TextPredictor

    predictor = TextPredictor.load(model, threads)
    instant = InstantReader.load(model)
    missed_cost = (costs or MissedCosts()).missed_cost
    decision = replace(predictor.decision, missed_cost=missed_cost)
    if training:
        print(f"fitting the TF-IDF baselines to {len(training)} texts", file=sys.stderr)
    return partial(
        evaluate_predictor,
        predictor=predictor,
        instant=instant,
        baselines={**(beside or {}), **tfidf_baselines(training)},
        decision=decision,
        model=model or "shipped",
    )


def report_on(
    labeled: examples.LabeledSet,
    measure: Callable[..., dict[str, Any]],
    output: Path,
    claims: bool = False,
) -> dict[str, Any]:
    """Evaluate with a progress bar, write the report to `output`, print it; returns the figures.
    `measure`: see `measure_of`."""
    from vllm_semantic_sched.lab.evaluation.measure import texts_to_read
    from vllm_semantic_sched.lab.evaluation.report import evaluation_page

    total = texts_to_read(labeled, claims)
    with tqdm(total=total, desc=labeled.name, unit="text", disable=None) as bar:
        report = measure(labeled, claims=claims, advanced=bar.update)
    page = evaluation_page(report)
    text = markdown(page)
    output.mkdir(parents=True, exist_ok=True)
    (output / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (output / "report.md").write_text(text, encoding="utf-8")
    print(text)
    save_page(page, output)
    return report


def _summarize(reports: Mapping[str, dict[str, Any]], output: Path) -> None:
    from vllm_semantic_sched.lab.evaluation.report import summary_page

    page = summary_page(reports)
    text = markdown(page, {name: f"{name}/report.md" for name in reports})
    (output / _SUMMARY).write_text(text, encoding="utf-8")
    save_page(page, output)
    print(text)


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError for options that exclude each other."""
    if not (args.data or args.builtin or args.all):
        raise ValueError("no texts given: use --data FILE.csv, --builtin NAME or --all")
    if args.claims and not args.data:
        raise ValueError("--claims needs --data")
    if args.builtin and (args.data or args.all):
        raise ValueError("--builtin cannot be combined with --data or --all")
    names = [path.stem for path in args.data]
    for path in args.data:
        if names.count(path.stem) > 1 or (args.all and path.stem in examples.BUILTIN_SETS):
            raise ValueError(
                f"{path}: its report would replace that of another set {path.stem}; rename the file"
            )
    if args.train and args.train.resolve() in (path.resolve() for path in args.data):
        raise ValueError("--train and --data are the same file; the baselines would know the texts")


def _read_set(path: Path, domain: Domain | None) -> examples.LabeledSet:
    if path.is_dir() and not any(path.glob("*.csv")):
        return read_composed_set(path)
    return examples.read_labeled_set(path, domain)


def _training_examples(
    table: Path | None, domain: Domain | None, root: Path | None
) -> list[examples.Example]:
    """The texts that the TF-IDF baselines are fitted to; empty to leave these out."""
    if table is not None:
        return examples.read_examples(table, domain)
    if root is None:
        print("no --train and no data folder: the TF-IDF baselines are left out", file=sys.stderr)
        return []
    if not has_texts_by_language():
        missing = "no --train, and wheels lack the training texts"
        print(f"{missing}: the TF-IDF baselines are left out", file=sys.stderr)
        return []
    from vllm_semantic_sched.lab.training.mixture import Sources, training_round

    return training_round(Sources.read(root, "train"), seed=1)
