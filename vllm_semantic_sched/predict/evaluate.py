"""`semsched evaluate`: how good a predictor is on labelled texts, with baselines beside it.

Reads a CSV with the columns `text` and `level` (0-4) and/or `output_tokens`, or a held-out
part of the data folder; writes report.json, report.md and, with levels, confusion.png.
"""

import argparse
import json
import sys
from pathlib import Path

from vllm_semantic_sched.datasets import DataNotFound, data_root

BUILTIN = ("nhamcs-test", "lengths-test")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `semsched evaluate`."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, help="CSV with text and level and/or output_tokens")
    source.add_argument("--builtin", choices=BUILTIN, help="a held-out part of the data folder")
    parser.add_argument("--output", type=Path, required=True, help="folder for the report")
    parser.add_argument("--model", help="folder or hub id (default: the shipped model)")
    parser.add_argument("--data-root", type=Path, help="data folder (default: SEMSCHED_DATA)")
    parser.add_argument("--no-baselines", action="store_true", help="skip TF-IDF, which trains")
    parser.add_argument("--threads", type=int, default=1, help="threads that torch may use")


def run(args: argparse.Namespace) -> int:
    """Evaluate, write the report and print it; 1 if something needed is missing."""
    try:
        _evaluate(args)
    except (DataNotFound, FileNotFoundError, ValueError, ImportError) as error:
        print(f"semsched evaluate: {error}", file=sys.stderr)
        return 1
    return 0


def _evaluate(args: argparse.Namespace) -> None:
    from vllm_semantic_sched.predict import measure
    from vllm_semantic_sched.predict.baselines import TfidfBaseline
    from vllm_semantic_sched.predict.data import Sources, training_round
    from vllm_semantic_sched.predict.model import TextPredictor
    from vllm_semantic_sched.predict.report import confusion_picture, markdown

    root = args.data_root or data_root()
    if args.data:
        examples = measure.read_examples(args.data)
    else:
        examples = measure.builtin_examples(args.builtin, root)
    guesses = {"model": measure.guesser(TextPredictor.load(args.model, args.threads))}
    if not args.no_baselines and root is not None:
        mixture = training_round(Sources.read(root, "train"), seed=1)
        guesses["TF-IDF + logistic regression"] = TfidfBaseline(mixture).guess
    elif not args.no_baselines:
        print("no data folder: the TF-IDF baseline is left out", file=sys.stderr)

    report = measure.evaluate(examples, guesses)
    report["source"] = args.builtin or args.data.name
    report["model"] = args.model or "shipped"
    args.output.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=2) + "\n"
    (args.output / "report.json").write_text(text, encoding="utf-8")
    (args.output / "report.md").write_text(markdown(report), encoding="utf-8")
    if "urgency" in report:
        try:
            confusion_picture(report["urgency"]["model"], args.output / "confusion.png")
        except ImportError as error:
            print(f"no picture: {error}", file=sys.stderr)
    print(markdown(report))
