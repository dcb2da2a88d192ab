"""Fine-tunes a predictor to labeled texts: urgency levels or output lengths."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import nn

from vllm_semantic_sched.lab.datasets import split_of
from vllm_semantic_sched.lab.evaluation.domain import Domain, load_domain
from vllm_semantic_sched.lab.evaluation.examples import Example, read_examples, write_examples
from vllm_semantic_sched.lab.evaluation.metrics import likeliest
from vllm_semantic_sched.lab.training.base import load_base, set_length_buckets, set_level_names
from vllm_semantic_sched.lab.training.calibration import calibrate, write_bounds
from vllm_semantic_sched.lab.training.distil import distil, renewed
from vllm_semantic_sched.lab.training.fit import Options, average, fit
from vllm_semantic_sched.lab.training.length import fit_length_head
from vllm_semantic_sched.lab.training.messages import everyday_prompt
from vllm_semantic_sched.lab.training.mixture import domain_examples
from vllm_semantic_sched.predict.instant import InstantTable
from vllm_semantic_sched.predict.model import TextPredictor
from vllm_semantic_sched.predict.network import UrgencyLengthClassifier
from vllm_semantic_sched.predict.weights import load_network

# In the folder of a fine-tuned model: the texts that it was and was not trained on.
TRAINING_FILE = "train.csv"
TEST_FILE = "test.csv"

_LEAST_TEXTS = 20
# Beside the labeled texts, for the instant reader: it has no pretraining to fall back on.
_MOST_EVERYDAY = 5000
# Of the encoder. Levels come with a few hundred texts: a lower one leaves the old levels in place.
_URGENCY_RATE = 1e-4
_LENGTH_RATE = 5e-5


class Parts(NamedTuple):
    """Texts to train on, to calibrate on and to test on; how many of given tests are trained on as
    well, None if the tests were held out."""

    training: list[Example]
    validation: list[Example]
    tests: Sequence[Example]
    known_tests: int | None


def train_urgency(
    options: Options, domain_name: str, table: Path | None, count: int, test: Path | None
) -> Parts:
    """Train the urgency head on labeled texts, or on the example sentences of a domain.

    Args:
        domain_name: what the levels mean: a shipped domain or a YAML file.
        table: CSV with the columns text,level; None to train on the domain's own sentences.
        count: number of texts made from the domain, without `table`.
        test: CSV with the texts to hold out; None for a tenth of the texts.

    Raises PolicyError if the domain is missing or invalid, and ValueError if a table is, or if
    there are too few texts.
    """
    domain = load_domain(domain_name)

    def prepare(network: UrgencyLengthClassifier, _: Sequence[Example]) -> None:
        set_level_names(network, [level.name for level in domain.levels])
        if domain_name != "emergency":  # another scale: the old head would mislead
            network.pre_classifier.reset_parameters()
            network.classifier = nn.Linear(network.config.dim, len(domain.levels))

    if table is None:
        examples = domain_examples(domain, count, options.seed)
    else:
        examples = _labeled(table, "level", domain)
    tests = None if test is None else _labeled(test, "level", domain)
    return _fine_tune(
        options,
        examples,
        tests,
        keep="length",
        prepare=prepare,
        same_heads=domain_name == "emergency",
    )


def train_length(options: Options, table: Path, test: Path | None, tune_encoder: bool) -> Parts:
    """Train the length head on a CSV with the columns text,output_tokens; with `tune_encoder` the
    encoder as well, with a deep head. See `train_urgency` and `fit_length_head`."""
    examples = _labeled(table, "output_tokens")
    tests = None if test is None else _labeled(test, "output_tokens")
    if not tune_encoder:
        parts = _parts(examples, tests, calibrated=False)
        fit_length_head(options, parts.training)
        return _written(options.output, parts)

    def prepare(network: UrgencyLengthClassifier, training: Sequence[Example]) -> None:
        set_length_buckets(network, [example.output_tokens or 0 for example in training])

    return _fine_tune(options, examples, tests, keep="urgency", prepare=prepare)


def _parts(examples: Sequence[Example], tests: Sequence[Example] | None, calibrated: bool) -> Parts:
    if len(examples) < _LEAST_TEXTS:
        raise ValueError(f"{len(examples)} labeled texts; at least {_LEAST_TEXTS} are needed")
    by_split: dict[str, list[Example]] = {"train": [], "validation": [], "test": []}
    for example in examples:
        by_split[split_of(example.text)].append(example)
    training = by_split["train"]
    validation = by_split["validation"]
    held_out = by_split["test"]
    if not calibrated:
        training += validation
    if tests is None:
        return Parts(training, validation, tests=held_out, known_tests=None)
    training += held_out
    # Where texts are short, as complaints are, the same ones occur again, at any level.
    trained = {example.text for example in training}
    known = sum(example.text in trained for example in tests)
    return Parts(training, validation, tests=tests, known_tests=known)


def _written(output: Path, parts: Parts) -> Parts:
    write_examples(parts.training, output / TRAINING_FILE)
    write_examples(parts.tests, output / TEST_FILE)
    return parts


def _labeled(
    table: Path, label: Literal["level", "output_tokens"], domain: Domain | None = None
) -> list[Example]:
    examples = read_examples(table, domain)
    return [example for example in examples if getattr(example, label) is not None]


def _fine_tune(
    options: Options,
    examples: Sequence[Example],
    tests: Sequence[Example] | None,
    *,
    keep: Literal["urgency", "length"],
    prepare: Callable[[UrgencyLengthClassifier, Sequence[Example]], None],
    same_heads: bool = False,
) -> Parts:
    """Train the base on `examples`, less a tenth to calibrate on, where needed, and a tenth to test
    on, if `tests` is None.

    Args:
        keep: the head that is trained on its own first predictions alone, while the encoder
            changes.
        prepare: fits the network's heads to the training examples.
        same_heads: the heads stay those of the base, if it has any. Then the trained network is
            averaged with the base, whose calibration it keeps.
    """
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model = load_base(options.base)
    network = model.network
    folder = model.folder
    same_heads = same_heads and model.has_heads
    parts = _parts(examples, tests, calibrated=not same_heads)
    training: Sequence[Example] = parts.training
    instant = InstantTable.load(folder)  # before a model in the same folder replaces it
    prepare(network, training)
    if model.has_heads:
        training = _with_predictions(training, folder, keep, options.threads)
    rate = _LENGTH_RATE if keep == "urgency" else _URGENCY_RATE
    fit(model, lambda _: training, options, encoder_rate=rate)
    if same_heads:
        average(network, load_network(folder).state_dict())
    else:
        calibrate(model, parts.validation)
    model.save(options.output, "fp16")
    if instant is not None and keep == "urgency":
        instant = renewed(instant, None, len(network.config.length_bucket_means))
    elif instant is not None and not same_heads:
        instant = renewed(instant, network.config.num_labels, None)
    rng = random.Random(options.seed)
    everyday = [everyday_prompt(rng) for _ in parts.training[:_MOST_EVERYDAY]]
    texts = [example.text for example in parts.training] + everyday
    distil(options.output, texts, options.output, seed=options.seed, start=instant)
    if keep == "length":
        write_bounds(options.output, parts.training, options.threads)
    return _written(options.output, parts)


def _with_predictions(
    examples: Sequence[Example], folder: Path, keep: Literal["urgency", "length"], threads: int
) -> list[Example]:
    """The examples, each with the base's own prediction as the label of the head to keep."""
    predictor = TextPredictor.load(str(folder), threads)
    guesses = predictor.predict([example.text for example in examples])
    if keep == "urgency":
        return [
            replace(example, level=likeliest(guess.urgency))
            for example, guess in zip(examples, guesses, strict=True)
        ]
    means = predictor.length_buckets.means if predictor.length_buckets else ()
    labeled = []
    for example, guess in zip(examples, guesses, strict=True):
        if guess.length:
            example = replace(example, output_tokens=round(means[likeliest(guess.length)]))
        labeled.append(example)
    return labeled
