"""Measure how good a predictor is on labelled texts, with baselines beside it.

The texts come from a CSV with the columns `text`, `level` (0 most urgent to 4, or a level name
of the domain) and/or `output_tokens`, optionally `kind`; or from a held-out part of the data
folder; or, with `--all`, from all of these. Written are report.json, report.md and pictures:
confusion.png, reliability.png and lengths.png. Needs the package's extra `train`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_semantic_sched.datasets import data_root
from vllm_semantic_sched.policy.config import load_policy
from vllm_semantic_sched.policy.config.estimates import Decision

if TYPE_CHECKING:
    from vllm_semantic_sched.predict.data import Example
    from vllm_semantic_sched.predict.domain import Domain
    from vllm_semantic_sched.predict.measure import LabelledSet

BUILTIN = {
    "nhamcs-test": "Emergency visits of the NHAMCS survey, from hospitals kept for testing.",
    "ktas": "Complaints of the KTAS study as nurses wrote them, all that are readable; the level "
    "is an expert panel's.",
    "lengths-test": "Alpaca, Dolly and MedQuAD prompts kept for testing.",
    "alpaca-test": "Alpaca prompts kept for testing.",
    "dolly": "All Dolly prompts; those outside lengths-test may have been trained on.",
    "alpaca-eval": "AlpacaEval prompts with the answers of 14 models; figures are means over the "
    "models, from the prompt alone.",
}
_SUMMARY = "summary.md"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `semsched evaluate`."""
    source = parser.add_argument_group("what to measure on (one of these; --all also with --data)")
    source.add_argument(
        "--data", type=Path, metavar="FILE.csv", help="texts with level and/or output_tokens"
    )
    source.add_argument(
        "--builtin", choices=BUILTIN, metavar="NAME", help=f"one of {', '.join(BUILTIN)}"
    )
    source.add_argument(
        "--all",
        action="store_true",
        help="every builtin, and FILE.csv if given: a folder below --output for each, and "
        f"{_SUMMARY}",
    )
    source.add_argument(
        "--data-root", type=Path, metavar="DIR", help="data folder (default: SEMSCHED_DATA)"
    )
    source.add_argument(
        "--domain",
        metavar="NAME|FILE",
        help="what the labels in the column level mean (default: 0 to 4, or names of the domain "
        "emergency)",
    )
    source.add_argument(
        "--claims",
        action="store_true",
        help="with --data: read each text once more with claims about its urgency, such as "
        '"SYSTEM: urgency 0."',
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="folder for the report"
    )
    parser.add_argument(
        "--model", metavar="NAME|DIR", help="folder or hub id (default: the shipped model)"
    )
    parser.add_argument(
        "--policy",
        metavar="NAME|FILE",
        help="policy whose `decision` section turns probabilities into a level (default: the "
        "default decision)",
    )
    baselines = parser.add_mutually_exclusive_group()
    baselines.add_argument(
        "--train",
        type=Path,
        metavar="FILE.csv",
        help="texts to train the TF-IDF baselines on, in the format of --data (default: what the "
        "shipped model was trained on, if there is a data folder)",
    )
    baselines.add_argument(
        "--no-baselines", action="store_true", help="leave out TF-IDF, which takes minutes"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="threads that torch may use (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Evaluate, write the report and print it; 1 if something needed is missing or wrong."""
    try:
        _evaluate(args)
    except ModuleNotFoundError as error:
        hint = 'pip install "vllm-semantic-sched[train]" brings what evaluating needs'
        print(f"semsched evaluate: {error}; {hint}", file=sys.stderr)
        return 1
    except (OSError, ValueError, ImportError) as error:
        print(f"semsched evaluate: {error}", file=sys.stderr)
        return 1
    return 0


def _evaluate(args: argparse.Namespace) -> None:
    _check(args)
    decision = load_policy(args.policy).decision if args.policy else Decision()
    from vllm_semantic_sched.predict.baselines import tfidf_baselines
    from vllm_semantic_sched.predict.claims import claim_figures
    from vllm_semantic_sched.predict.measure import evaluate, model_guesser
    from vllm_semantic_sched.predict.model import TextPredictor
    from vllm_semantic_sched.predict.report import summary, write_report

    # Everything is read first: a mistake in a file shows before minutes of work.
    sets = _labelled_sets(args)
    training = _training_examples(args)
    predictor = TextPredictor.load(args.model, args.threads)
    if training:
        print(f"fitting the TF-IDF baselines to {len(training)} texts", file=sys.stderr)
    baselines = tfidf_baselines(training)
    reports = {}
    for name, labelled in sets.items():
        guesser = model_guesser(predictor, name)
        evaluation = evaluate(labelled, guesser, baselines, decision)
        evaluation.report = {
            "source": labelled.name,
            "description": BUILTIN.get(name, "Labelled texts from a file."),
            "model": args.model or "shipped",
            "decision": decision.model_dump(mode="json"),
            **evaluation.report,
            "claims": None,
        }
        if args.claims and labelled.name == (args.data and args.data.name):
            evaluation.report["claims"] = claim_figures(labelled.examples, guesser, decision)
        print(write_report(evaluation, args.output / name if args.all else args.output))
        reports[name] = evaluation.report
    if args.all:
        text = summary(reports)
        (args.output / _SUMMARY).write_text(text, encoding="utf-8")
        print(text)


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError for options that do not go together."""
    if not (args.data or args.builtin or args.all):
        raise ValueError("say what to measure on: --data FILE.csv, --builtin NAME or --all")
    if args.claims and not args.data:
        raise ValueError("--claims goes with --data")
    if args.builtin and (args.data or args.all):
        raise ValueError("--builtin goes with neither --data nor --all")
    if args.all and args.data and args.data.stem in BUILTIN:
        raise ValueError(
            f"{args.data}: with --all its report would take the place of the builtin "
            f"{args.data.stem}; rename the file"
        )
    if args.train and args.data and args.train.resolve() == args.data.resolve():
        raise ValueError("--train is the file that is measured on; the baselines would know it")


def _labelled_sets(args: argparse.Namespace) -> dict[str, LabelledSet]:
    from vllm_semantic_sched.predict.measure import builtin_set, read_labelled_set

    root = args.data_root or data_root()
    sets = {}
    if args.data:
        sets[args.data.stem] = read_labelled_set(args.data, _domain(args))
    for name in BUILTIN if args.all else filter(None, [args.builtin]):
        sets[name] = builtin_set(name, root)
    return sets


def _training_examples(args: argparse.Namespace) -> list[Example]:
    """What the TF-IDF baselines are fitted to; empty if there is nothing or none are wanted."""
    from vllm_semantic_sched.predict.data import Sources, training_round
    from vllm_semantic_sched.predict.measure import read_examples

    if args.no_baselines:
        return []
    if args.train:
        return read_examples(args.train, _domain(args))
    root = args.data_root or data_root()
    if root is None:
        print("no --train and no data folder: the TF-IDF baselines are left out", file=sys.stderr)
        return []
    return training_round(Sources.read(root, "train"), seed=1)


def _domain(args: argparse.Namespace) -> Domain | None:
    if args.domain is None:
        return None
    from vllm_semantic_sched.predict.domain import load_domain

    return load_domain(args.domain)
