"""`semsched train`: makes a predictor from data.

    semsched train all --data DIR --output MODEL
        the shipped model: both heads, from the emergency visits, prompts and medical questions
        of the data folder and from the package's own wordings
    semsched train urgency --csv FILE --output MODEL
        levels from your own labelled texts (columns text,level), in the terms of a domain
    semsched train urgency --domain incident --output MODEL
        levels from the example sentences of a domain
    semsched train length --from-server URL --prompts FILE --output MODEL
        output lengths of the model that you serve: asks it, then fits the length head
    semsched train length --csv FILE --output MODEL
        output lengths from a file (columns text,output_tokens)

`urgency` and `length` start from the shipped model (or `--base`), hold a tenth of the texts out
by their MD5, and write the report that `semsched evaluate` writes about them to MODEL/report.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vllm_semantic_sched.datasets import DataNotFound, data_root, split_of
from vllm_semantic_sched.policy.facts.section import PolicyError

if TYPE_CHECKING:
    from vllm_semantic_sched.predict.data import Example
    from vllm_semantic_sched.predict.network import UrgencyLengthClassifier
    from vllm_semantic_sched.predict.text import WindowTokenizer

LEVEL_NAMES = ("immediate", "emergent", "urgent", "semi-urgent", "non-urgent")

THRESHOLDS = "thresholds.yaml"
"""A policy with the fitted `decision.thresholds`, in the folder of a trained model."""

_BUCKETS = 9
_LEAST_TEXTS = 20
_FINE_TUNING_RATE = 5e-5
_URGENCY_RATE = 1e-4  # a few hundred texts; a lower one leaves the old levels in place


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands of `semsched train`."""
    # The module's text is laid out by hand.
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")

    everything = kinds.add_parser("all", help="the shipped model, from the data folder")
    everything.add_argument("--data", type=Path, help="data folder (default: SEMSCHED_DATA)")
    everything.add_argument(
        "--scale", type=float, default=1.0, help="share of the texts per round; 0.01 tries it out"
    )
    _common_arguments(everything, epochs=3)
    _base_argument(everything, default="pretrained")
    everything.set_defaults(make=_train_all)

    urgency = kinds.add_parser("urgency", help="the levels, from labelled texts")
    urgency.add_argument("--csv", type=Path, help="texts with levels: columns text,level")
    urgency.add_argument(
        "--domain",
        default="emergency",
        help="what the levels mean: a shipped domain or a YAML file; without --csv its own "
        "examples are trained on (default: %(default)s)",
    )
    urgency.add_argument(
        "--examples", type=int, default=6000, help="texts made from a domain (%(default)s)"
    )
    _common_arguments(urgency, epochs=8)
    _base_argument(urgency)
    _test_argument(urgency)
    urgency.set_defaults(make=_train_urgency)

    length = kinds.add_parser("length", help="the output lengths, from a server or a file")
    source = length.add_mutually_exclusive_group(required=True)
    source.add_argument("--csv", type=Path, help="texts with lengths: columns text,output_tokens")
    source.add_argument(
        "--from-server",
        metavar="URL",
        help="OpenAI-compatible server to ask, like http://host:8000",
    )
    length.add_argument(
        "--prompts", type=Path, help="--from-server: prompts, one per line, or a CSV with text"
    )
    length.add_argument("--served-model", help="--from-server: its name (default: the first)")
    length.add_argument(
        "--max-tokens", type=int, default=2048, help="--from-server: longest answer (%(default)s)"
    )
    length.add_argument(
        "--concurrency", type=int, default=8, help="--from-server: prompts at once (%(default)s)"
    )
    length.add_argument(
        "--tune-encoder",
        action="store_true",
        help="train the encoder too; better with thousands of texts, slower, and the urgency head "
        "is only held in place by its own predictions on them",
    )
    _common_arguments(length, epochs=4)
    _base_argument(length)
    _test_argument(length)
    length.set_defaults(make=_train_length)


def _common_arguments(parser: argparse.ArgumentParser, epochs: int) -> None:
    parser.add_argument("--output", type=Path, required=True, help="folder for the trained model")
    parser.add_argument("--seed", type=int, default=1, help="of weights, texts and their order")
    parser.add_argument("--epochs", type=int, default=epochs, help="rounds (%(default)s)")
    parser.add_argument("--minutes", type=float, help="stop after this time (default: no limit)")
    parser.add_argument("--threads", type=int, default=1, help="threads that torch may use")


def _base_argument(parser: argparse.ArgumentParser, default: str = "shipped") -> None:
    parser.add_argument(
        "--base",
        default=default,
        help="model to start from: shipped, pretrained (the bare encoder), or a folder that "
        "`semsched train` wrote (default: %(default)s)",
    )


def _test_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--test",
        type=Path,
        metavar="CSV",
        help="texts for the report (default: a tenth of the given ones, which is not trained on)",
    )


def run(args: argparse.Namespace) -> int:
    """Train, calibrate, save and report; 1 if something needed is missing or wrong."""
    try:
        status: int = args.make(args)
    except (DataNotFound, FileNotFoundError, ImportError, PolicyError, ValueError) as error:
        print(f"semsched train {args.kind}: {error}", file=sys.stderr)
        return 1
    return status


def _train_all(args: argparse.Namespace) -> int:
    import torch

    from vllm_semantic_sched.predict.data import Example, Sources, training_round
    from vllm_semantic_sched.predict.fit import ENCODER_RATE, fit
    from vllm_semantic_sched.predict.validation import (
        calibrate,
        calibration_examples,
        validation_table,
    )
    from vllm_semantic_sched.predict.weights import save_network

    root = args.data or data_root()
    if root is None:
        raise DataNotFound("no data folder: pass --data DIR or set SEMSCHED_DATA")
    sources = Sources.read(root, "train")
    validation = Sources.read(root, "validation")
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    folder, network, tokenizer = _base(args.base)
    if args.base == "pretrained":
        _set_buckets(network, sources.lengths)
        _set_level_names(network, LEVEL_NAMES)
    fit(
        network,
        tokenizer,
        lambda number: training_round(sources, args.seed * 1000 + number, args.scale),
        seed=args.seed,
        epochs=args.epochs,
        minutes=args.minutes,
        encoder_rate=ENCODER_RATE if args.base == "pretrained" else _FINE_TUNING_RATE,
        # A run that is cut short leaves its last round's model behind.
        after_round=lambda: save_network(network, folder, args.output),
    )
    calibrate(network, tokenizer, calibration_examples(validation, args.seed, args.scale))
    save_network(network, folder, args.output)
    print(f"saved to {args.output}")
    _write_thresholds(args, [Example(visit.text, visit.level) for visit in validation.visits])
    print(validation_table(args.output, validation, args.seed))
    return 0


def _train_urgency(args: argparse.Namespace) -> int:
    from torch import nn

    from vllm_semantic_sched.predict.domain import domain_examples, load_domain
    from vllm_semantic_sched.predict.measure import read_examples

    domain = load_domain(args.domain)

    def read(path: Path) -> list[Example]:
        return [one for one in read_examples(path, domain) if one.level is not None]

    if args.csv is not None:
        examples = read(args.csv)
    else:
        examples = domain_examples(domain, args.examples, args.seed)

    def prepare(network: UrgencyLengthClassifier, _: Sequence[Example]) -> None:
        _set_level_names(network, [level.name for level in domain.levels])
        if args.domain != "emergency":  # another scale: what the old head knew would mislead
            network.pre_classifier.reset_parameters()
            network.classifier = nn.Linear(network.config.dim, len(domain.levels))

    goes_on = args.domain == "emergency" and args.base != "pretrained"
    return _fine_tune(args, examples, prepare, _URGENCY_RATE, "length", read, goes_on)


def _train_length(args: argparse.Namespace) -> int:
    from vllm_semantic_sched.predict.collect import collect_lengths
    from vllm_semantic_sched.predict.measure import read_examples

    table = args.csv
    if table is None:
        if args.prompts is None:
            raise ValueError("--from-server needs --prompts FILE")
        table = args.output / "lengths.csv"
        collect_lengths(
            args.from_server,
            args.prompts,
            table,
            model=args.served_model,
            max_tokens=args.max_tokens,
            concurrency=args.concurrency,
        )

    def read(path: Path) -> list[Example]:
        return [one for one in read_examples(path) if one.output_tokens is not None]

    def prepare(network: UrgencyLengthClassifier, training: Sequence[Example]) -> None:
        _set_buckets(network, [one.output_tokens or 0 for one in training])

    rate = _FINE_TUNING_RATE if args.tune_encoder else 0.0
    return _fine_tune(args, read(table), prepare, rate, "urgency", read)


def _fine_tune(
    args: argparse.Namespace,
    examples: Sequence[Example],
    prepare: Callable[[UrgencyLengthClassifier, Sequence[Example]], None],
    encoder_rate: float,
    keep: Literal["urgency", "length"],
    read: Callable[[Path], list[Example]],
    goes_on: bool = False,
) -> int:
    """Train the base on `examples`, less a tenth for calibration, where that is needed, and, where
    no texts are given for it, a tenth for the report.

    Args:
        read: reads a CSV as `examples` was.
        prepare: fits the network's heads to the training examples.
        goes_on: the heads stay those of the base. Then the trained network is averaged with the
            base, whose calibration it keeps.
        keep: the head that is not trained for. It stays as it is under a frozen encoder, and
            is held to what it predicts at the start while the encoder moves.
    """
    import torch

    from vllm_semantic_sched.predict import evaluate
    from vllm_semantic_sched.predict.fit import average, fit
    from vllm_semantic_sched.predict.measure import write_examples
    from vllm_semantic_sched.predict.validation import calibrate
    from vllm_semantic_sched.predict.weights import load_network, save_network

    if len(examples) < _LEAST_TEXTS:
        raise ValueError(f"{len(examples)} labelled texts; at least {_LEAST_TEXTS} are needed")
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    parts = {
        part: [one for one in examples if split_of(one.text) == part]
        for part in ("train", "validation", "test")
    }
    if goes_on:
        parts["train"] += parts["validation"]
    if args.test is not None:
        parts["train"] += parts["test"]
        parts["test"] = read(args.test)
        # Where texts are short, as complaints are, the same ones come again, at any level.
        trained = {one.text for one in parts["train"]}
        known = sum(one.text in trained for one in parts["test"])
        print(f"{known} of the {len(parts['test'])} texts for the report are trained on as well")
    folder, network, tokenizer = _base(args.base)
    training: Sequence[Example] = parts["train"]
    prepare(network, training)
    if not encoder_rate:
        network.head(keep).requires_grad_(False)
    elif args.base != "pretrained":
        training = _held(training, folder, keep, args.threads)
    fit(
        network,
        tokenizer,
        lambda _: training,
        seed=args.seed,
        epochs=args.epochs,
        minutes=args.minutes,
        encoder_rate=encoder_rate,
    )
    if goes_on:
        average(network, load_network(folder).state_dict())
    elif keep == "length":
        calibrate(network, tokenizer, parts["validation"])
    save_network(network, folder, args.output, "fp16")
    print(f"saved to {args.output}")
    for part in ("train", "test"):
        write_examples(parts[part], args.output / f"{part}.csv")
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    command = ["--data", args.output / "test.csv", "--train", args.output / "train.csv"]
    command += ["--model", args.output, "--output", args.output / "report"]
    if keep == "length":
        _write_thresholds(args, parts["train"])
        command += ["--policy", args.output / THRESHOLDS]
    return evaluate.run(parser.parse_args([str(word) for word in command]))


def _write_thresholds(args: argparse.Namespace, examples: Sequence[Example]) -> None:
    """Write and print a policy that cuts the stored model's expected level where it agrees best
    with the levels of `examples`."""
    import yaml

    from vllm_semantic_sched.predict.model import TextPredictor
    from vllm_semantic_sched.predict.validation import fitted_thresholds

    predictor = TextPredictor.load(str(args.output), args.threads)
    probabilities = [one.urgency for one in predictor.predict([one.text for one in examples])]
    thresholds = fitted_thresholds(probabilities, [one.level or 0 for one in examples])
    decision = {"rule": "thresholds", "thresholds": list(thresholds)}
    text = yaml.safe_dump({"decision": decision}, default_flow_style=None, sort_keys=False)
    path = args.output / THRESHOLDS
    path.write_text(text, encoding="utf-8")
    print(f"thresholds on the expected level, fitted to {len(examples)} texts: {path}\n{text}")


def _base(name: str) -> tuple[Path, UrgencyLengthClassifier, WindowTokenizer]:
    """The folder with the tokenizer, the network and the tokenizer to start from."""
    from transformers import AutoTokenizer

    from vllm_semantic_sched.predict.model import SHIPPED_WEIGHTS
    from vllm_semantic_sched.predict.network import network_from_minilm, pretrained_folder
    from vllm_semantic_sched.predict.text import DEFAULT_WINDOW, WindowTokenizer
    from vllm_semantic_sched.predict.weights import is_stored_network, load_network

    if name == "pretrained":
        folder = pretrained_folder()
        network = network_from_minilm(
            folder,
            length_bucket_edges=[],
            length_bucket_means=[float(_LEAST_TEXTS)],
            window=DEFAULT_WINDOW,
            temperature=1.0,
        )
    else:
        folder = SHIPPED_WEIGHTS if name == "shipped" else Path(name)
        if not is_stored_network(folder):
            raise FileNotFoundError(
                f"--base {name}: not shipped, pretrained, or a folder that `semsched train` wrote"
            )
        network = load_network(folder)
    tokenizer = WindowTokenizer(AutoTokenizer.from_pretrained(folder), DEFAULT_WINDOW)
    return folder, network, tokenizer


def _set_buckets(network: UrgencyLengthClassifier, lengths: Sequence[int]) -> None:
    """Give the network a new length head, for buckets at the quantiles of `lengths`."""
    from torch import nn

    from vllm_semantic_sched.predict.buckets import length_buckets

    buckets = length_buckets(lengths, _BUCKETS)
    network.config.length_bucket_edges = list(buckets.edges)
    network.config.length_bucket_means = list(buckets.means)
    network.length_pre_classifier.reset_parameters()
    network.length_classifier = nn.Linear(network.config.dim, len(buckets.means))


def _set_level_names(network: UrgencyLengthClassifier, names: Sequence[str]) -> None:
    network.config.id2label = dict(enumerate(names))
    network.config.label2id = {name: level for level, name in enumerate(names)}


def _held(examples: Sequence[Example], folder: Path, keep: str, threads: int) -> Sequence[Example]:
    """The examples, each with the base's own answer where they carry none for the head to keep."""
    from dataclasses import replace

    from vllm_semantic_sched.predict.model import TextPredictor

    predictor = TextPredictor.load(str(folder), threads)
    buckets = predictor.length_buckets
    held = []
    for one, guess in zip(examples, predictor.predict([one.text for one in examples]), strict=True):
        if keep == "urgency":
            one = replace(one, level=max(range(len(guess.urgency)), key=guess.urgency.__getitem__))
        elif guess.length is not None and buckets is not None:
            bucket = max(range(len(guess.length)), key=guess.length.__getitem__)
            one = replace(one, output_tokens=round(buckets.means[bucket]))
        held.append(one)
    return held
