"""Train a predictor.

    semsched train all --data DIR --output MODEL
        the shipped model: both heads, from the emergency visits, prompts and medical questions of
        the data folder and from the package's own messages in 26 languages. Starts from a student
        of a multilingual encoder, which it makes first and keeps in MODEL/encoder: to train other
        heads on it, pass `--base MODEL/encoder`
    semsched train urgency --csv FILE --output MODEL
        urgency levels from your own labeled texts (columns text,level), as a domain defines them
    semsched train urgency --domain incident --output MODEL
        urgency levels from the example sentences of a domain
    semsched train length --server URL --prompts FILE --output MODEL
        output lengths of the model that you serve: sends it the prompts, then fits the length head.
        If the result orders unseen prompts worse, MODEL stays as it was; what it replaces is
        kept in MODEL/previous
    semsched train length --csv FILE --output MODEL
        output lengths from a file (columns text,output_tokens)

    semsched train instant --data DIR --output MODEL
        the instant reader of the shipped model (or `--base`), from the data folder

`all` and `instant` need a checkout of the project or its sdist: wheels lack the messages.
All but `instant` train the instant reader along with the model. `urgency` and `length` start from
the shipped model (or `--base`), hold out a tenth of the texts by their MD5, and write the report
that `semsched evaluate` gives on those to MODEL/report; `urgency` warns if a count of words does
better. Needs the package's extra `lab`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_semantic_sched.cli.arguments import failing_in_lab
from vllm_semantic_sched.cli.evaluate import measure_of, report_on
from vllm_semantic_sched.lab.evaluation.examples import read_labeled_set
from vllm_semantic_sched.lab.training.wording import has_texts_by_language
from vllm_semantic_sched.policy.facts.decision import bounds_in_words, decision_of
from vllm_semantic_sched.sim.data_folder import data_root

if TYPE_CHECKING:
    from vllm_semantic_sched.lab.evaluation.baselines import Guesser
    from vllm_semantic_sched.lab.training.fine_tune import Parts
    from vllm_semantic_sched.lab.training.fit import Options

_BASE = "before training"
_DATA = "data folder (default: SEMSCHED_DATA)"
_TEST = "texts for the report (default: a tenth of the given ones, which is not trained on)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a subcommand for each part of the predictor."""
    # The module's text is laid out by hand.
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")

    def kind(
        name: str, run: Callable[[argparse.Namespace], None], text: str
    ) -> argparse.ArgumentParser:
        parser = kinds.add_parser(name, help=text)
        parser.set_defaults(run=failing_in_lab()(run), command=f"train {name}")
        return parser

    add = kind("all", _train_all, "the shipped model, from the data folder").add_argument
    add("--data", type=Path, help=_DATA)
    add("--scale", type=float, default=1.0, help="share of the texts per round; 0.01 tries it out")
    add(
        "--layers",
        type=int,
        default=6,
        choices=(2, 3, 4, 6, 12),
        metavar="N",
        help=(
            "of a new network: 2, 3, 4, 6 or 12 (%(default)s); 12, all of the pretrained "
            "encoder's, for a teacher"
        ),
    )
    add(
        "--teacher",
        type=Path,
        metavar="DIR",
        help="network that `semsched train all` wrote, to learn from beside the labels",
    )
    _add_training_arguments(add, epochs=3, base="pretrained")

    add = kind("instant", _train_instant, "the instant reader of a model that exists").add_argument
    add("--data", type=Path, help=_DATA)
    add("--scale", type=float, default=1.0, help="share of the texts; 0.01 tries it out")
    _add_model_arguments(add)

    add = kind("urgency", _train_urgency, "the levels, from labeled texts").add_argument
    add("--csv", type=Path, help="texts with levels: columns text,level")
    add(
        "--domain",
        default="emergency",
        help=(
            "what the levels mean: a shipped domain or a YAML file; without --csv its own "
            "examples are trained on (default: %(default)s)"
        ),
    )
    add("--examples", type=int, default=6000, help="texts made from a domain (%(default)s)")
    _add_training_arguments(add, epochs=8)
    add("--test", type=Path, metavar="CSV", help=_TEST)

    _add_length_arguments(
        kind("length", _train_length, "the output lengths, from a server or a file")
    )


def _add_length_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    add("--csv", type=Path, help="texts with lengths: columns text,output_tokens")
    add("--server", metavar="URL", help="OpenAI-compatible server, like http://host:8000")
    add = parser.add_argument
    add("--prompts", type=Path, help="--server: prompts, one per line, or a CSV with text")
    add("--served-model", help="--server: name of its model (default: the first)")
    add("--max-tokens", type=int, default=2048, help="--server: longest answer (%(default)s)")
    add("--concurrency", type=int, default=8, help="--server: prompts at once (%(default)s)")
    add(
        "--tune-encoder",
        action="store_true",
        help=(
            "train the encoder and a deep head for --epochs: for many thousand texts; slow, and "
            "the urgency head is only held in place by its own predictions on them"
        ),
    )
    _add_training_arguments(add, epochs=4)
    add("--test", type=Path, metavar="CSV", help=_TEST)


def _add_training_arguments(add: Callable[..., object], epochs: int, base: str = "shipped") -> None:
    _add_model_arguments(add, base)
    add("--epochs", type=int, default=epochs, help="rounds (%(default)s)")
    add("--minutes", type=float, help="stop after this time (default: no limit)")


def _add_model_arguments(add: Callable[..., object], base: str = "shipped") -> None:
    add("--output", type=Path, required=True, help="folder for the trained model")
    add("--seed", type=int, default=1, help="of weights, texts and their order")
    add("--threads", type=int, default=1, help="threads that torch may use")
    add(
        "--base",
        default=base,
        help=(
            "model to start from: shipped, or a folder that `semsched train` wrote "
            "(default: %(default)s)"
        ),
    )


def _data_folder(args: argparse.Namespace) -> Path:
    """The data folder; FileNotFoundError without it, or without the package's own texts."""
    if not has_texts_by_language():
        raise FileNotFoundError(
            "an installed wheel lacks the texts in 26 languages to train on; run this in a "
            "checkout of this project or in its unpacked sdist"
        )
    root = args.data or data_root()
    if not root:
        raise FileNotFoundError("no data folder: pass --data DIR or set SEMSCHED_DATA")
    return Path(root)


def _train_instant(args: argparse.Namespace) -> None:
    root = _data_folder(args)
    from vllm_semantic_sched.lab.training.train import train_instant
    from vllm_semantic_sched.predict.instant import INSTANT_FILE

    train_instant(args.base, args.output, root, args.scale, seed=args.seed, threads=args.threads)
    print(f"saved to {args.output / INSTANT_FILE}")


def _train_all(args: argparse.Namespace) -> None:
    root = _data_folder(args)
    from vllm_semantic_sched.lab.training.train import train_all

    texts = train_all(_options(args), root, args.scale, args.teacher, args.layers)
    print(f"saved to {args.output}")
    _print_bounds(args.output, texts)


def _train_urgency(args: argparse.Namespace) -> None:
    from vllm_semantic_sched.lab.evaluation.baselines import TFIDF_LEVELS
    from vllm_semantic_sched.lab.training.fine_tune import train_urgency

    tuned = train_urgency(_options(args), args.domain, args.csv, args.examples, args.test)
    report = _report(args, tuned)
    counting = report["baselines"].get(TFIDF_LEVELS, {}).get("auc")
    trained = report["auc"]
    if trained is not None and counting is not None and trained < counting:
        print(
            f"semsched train: warning: on {len(tuned.tests)} held-out texts the model tells urgent "
            f"ones worse (AUC {trained:.2f}) than a count of their words ({counting:.2f}): do not "
            "serve it; train on more texts or for more --epochs",
            file=sys.stderr,
        )


def _train_length(args: argparse.Namespace) -> None:
    """Train, and take the old model back if the new one orders unseen prompts worse."""
    from vllm_semantic_sched.lab.evaluation.measure import model_guesser
    from vllm_semantic_sched.lab.training.base import base_folder
    from vllm_semantic_sched.lab.training.fine_tune import train_length
    from vllm_semantic_sched.predict.model import TextPredictor

    table = args.csv or _collected(args)
    # Loaded now: the new model may replace the base.
    base = model_guesser(TextPredictor.load(str(base_folder(args.base))))
    kept = _set_aside(args.output)
    tuned = train_length(_options(args), table, args.test, args.tune_encoder)
    report = _report(args, tuned, {_BASE: base})
    before = report["baselines"].get(_BASE, {}).get("kendall_tau") or 0.0
    after = report["kendall_tau"] or 0.0
    print(f"Kendall tau of {len(tuned.tests)} unseen prompts: {before:.3f} before, {after:.3f} now")
    if after < before:
        if kept is None:
            left = f"do not serve {args.output}"
        else:
            for path in kept.iterdir():
                path.replace(args.output / path.name)
            left = f"{args.output} is as it was"
        figures = f"{after:.3f} after {before:.3f}"
        raise ValueError(f"the new lengths order unseen prompts worse: {figures}; {left}")


def _set_aside(model: Path) -> Path | None:
    """Copy the files of a model into its folder `previous`; None if there is no model yet."""
    if not (model / "config.json").is_file():
        return None
    previous = model / "previous"
    shutil.rmtree(previous, ignore_errors=True)
    previous.mkdir()
    for path in filter(Path.is_file, model.iterdir()):
        shutil.copy2(path, previous)
    return previous


def _collected(args: argparse.Namespace) -> Path:
    """Send the prompts to the server; the table of its answers' lengths."""
    from vllm_semantic_sched.lab.training.collect import collect_lengths

    if args.prompts is None:
        raise ValueError("--server needs --prompts FILE")
    table: Path = args.output / "lengths.csv"
    collected = collect_lengths(
        args.server,
        args.prompts,
        table,
        model=args.served_model,
        max_tokens=args.max_tokens,
        concurrency=args.concurrency,
    )
    problems = collected.problems
    if problems:
        print(f"{len(problems)} prompts failed, the first with {problems[0]}", file=sys.stderr)
    if collected.cut:
        print(f"{collected.cut} answers reached --max-tokens and count as so long", file=sys.stderr)
    return table


def _options(args: argparse.Namespace) -> Options:
    from vllm_semantic_sched.lab.training.fit import Options

    return Options(
        output=args.output,
        base=args.base,
        seed=args.seed,
        epochs=args.epochs,
        minutes=args.minutes,
        threads=args.threads,
    )


def _report(
    args: argparse.Namespace, tuned: Parts, beside: Mapping[str, Guesser] | None = None
) -> dict[str, Any]:
    """Say where the model is; report on it, and others beside it, with the held-out texts."""
    from vllm_semantic_sched.lab.training.fine_tune import TEST_FILE

    print(f"saved to {args.output}")
    if tuned.known_tests is not None:
        known = f"{tuned.known_tests} of the {len(tuned.tests)} texts for the report"
        print(f"{known} are trained on as well")
    if args.kind == "urgency":
        _print_bounds(args.output, len(tuned.training))
    measure = measure_of(str(args.output), tuned.training, beside=beside)
    return report_on(read_labeled_set(args.output / TEST_FILE), measure, args.output / "report")


def _print_bounds(model: Path, texts: int) -> None:
    """Print the fitted bounds of a model."""
    settings = json.loads((model / "config.json").read_text("utf-8"))
    bounds = bounds_in_words(decision_of(settings).bounds)
    print(f"bounds of the levels' probabilities, fitted to {texts} texts: {bounds}")
