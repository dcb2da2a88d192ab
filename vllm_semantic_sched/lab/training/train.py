"""Trains, calibrates and stores predictors: the shipped model, urgency levels or output lengths."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import yaml
from torch import nn
from transformers import AutoTokenizer

from vllm_semantic_sched.lab.evaluation.domain import load_domain
from vllm_semantic_sched.lab.evaluation.examples import Example, read_examples, write_examples
from vllm_semantic_sched.lab.evaluation.metrics import likeliest
from vllm_semantic_sched.lab.training.base import (
    base_folder,
    has_heads,
    load_base,
    set_length_buckets,
    set_level_names,
)
from vllm_semantic_sched.lab.training.calibration import (
    calibrate,
    fitted_thresholds,
    validation_figures,
)
from vllm_semantic_sched.lab.training.distil import distil, renewed
from vllm_semantic_sched.lab.training.e5 import QUERY_PREFIX, packed_file, read_encoder
from vllm_semantic_sched.lab.training.fit import (
    ENCODER_RATE,
    FINE_TUNING_RATE,
    Step,
    average,
    fit,
)
from vllm_semantic_sched.lab.training.languages import unlabeled_texts
from vllm_semantic_sched.lab.training.messages import everyday_prompt
from vllm_semantic_sched.lab.training.mixture import (
    Sources,
    domain_examples,
    training_round,
    written_texts,
)
from vllm_semantic_sched.lab.training.student import align, student_of
from vllm_semantic_sched.lab.training.vocabulary import (
    chosen_pieces,
    piece_tokenizer,
    save_tokenizer,
)
from vllm_semantic_sched.policy.config.estimates import Decision
from vllm_semantic_sched.predict.instant import InstantTable
from vllm_semantic_sched.predict.model import TextPredictor
from vllm_semantic_sched.predict.network import UrgencyLengthClassifier
from vllm_semantic_sched.predict.text import WindowTokenizer
from vllm_semantic_sched.predict.weights import load_network, save_network
from vllm_semantic_sched.predict.window import DEFAULT_WINDOW
from vllm_semantic_sched.sim.datasets import split_of

# In the folder of a trained model: a policy with the fitted `decision.thresholds`, and the texts
# that a fine-tuned model was and was not trained on.
THRESHOLDS_FILE = "thresholds.yaml"
TRAINING_FILE = "train.csv"
TEST_FILE = "test.csv"

_LEVEL_NAMES = ("immediate", "emergent", "urgent", "semi-urgent", "non-urgent")
_LEAST_TEXTS = 20
# Beside the labeled texts, for the instant reader: it has no pretraining to fall back on.
_MOST_EVERYDAY = 5000
_ALIGNED_SCALE = 0.3  # of the texts in a round of training, beside those of other languages
_ALIGNED_EPOCHS = 2
_TEXTS_PER_LANGUAGE = 1500
_VOCABULARY = 60_000  # pieces: 23 MB in int8
_URGENT_RECALL = 0.72  # of visits of levels 0 and 1; unseen hospitals have a little less
_URGENCY_RATE = 1e-4  # a few hundred texts; a lower one leaves the old levels in place


@dataclass(frozen=True)
class Options:
    """Options of every training run.

    Attributes:
        output: folder for the trained model.
        base: model to start from, see `load_base`.
        seed: of weights, texts and their order.
        epochs: rounds over the texts.
        minutes: time limit; None for no limit.
        threads: number of threads that torch may use.
        on_step: called after each training step.
    """

    output: Path
    base: str
    seed: int
    epochs: int
    minutes: float | None
    threads: int
    on_step: Callable[[Step], object]


class FineTuned(NamedTuple):
    """Outcome of training on labeled texts.

    Attributes:
        tests: number of test texts.
        known_tests: number of those that were trained on as well; None if the test texts are a
            part of the given texts, held out.
        threshold_texts: number of texts that the thresholds were fitted to; None if levels were
            not trained.
    """

    tests: int
    known_tests: int | None
    threshold_texts: int | None


def train_all(options: Options, root: Path, scale: float) -> tuple[int, dict[str, dict[str, Any]]]:
    """Train both heads on the data folder `root` and the package's wordings.

    Args:
        scale: share of the texts per round, and of those for validation if it is below 1.

    Returns:
        Number of texts that the thresholds were fitted to, and the `validation_figures`.

    Raises:
        DataNotFound: a file is missing below `root`.
    """
    sources = Sources.read(root, "train")
    validation = Sources.read(root, "validation").part(min(1.0, scale))
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    if options.base == "pretrained":
        folder, network, tokenizer = _aligned_student(sources, options, scale)
    else:
        folder, network, tokenizer = load_base(options.base)
    new_heads = not has_heads(network)
    if new_heads:
        pairs = (*sources.prompts, *sources.questions)
        set_length_buckets(network, [pair.output_tokens for pair in pairs])
        set_level_names(network, _LEVEL_NAMES)
    fit(
        network,
        tokenizer,
        lambda number: training_round(sources, options.seed * 1000 + number, scale),
        seed=options.seed,
        epochs=options.epochs,
        minutes=options.minutes,
        encoder_rate=ENCODER_RATE if new_heads else FINE_TUNING_RATE,
        # A run that is cut short leaves its last round's model behind.
        after_round=lambda: save_network(network, folder, options.output),
        on_step=options.on_step,
    )
    calibrate(network, tokenizer, _calibration_texts(validation, options.seed))
    save_network(network, folder, options.output)
    texts = [one.text for one in _first_round(sources, options.seed, scale)]
    distil(options.output, texts, options.output, seed=options.seed)
    visits = [Example(visit.text, visit.level) for visit in validation.visits]
    _write_thresholds(options, visits, _URGENT_RECALL)
    return len(visits), validation_figures(options.output, validation, options.seed, scale)


def train_instant(
    base: str, output: Path, root: Path, scale: float, *, seed: int, threads: int
) -> None:
    """Train the instant reader of a stored network on the texts of the first round of `train_all`.

    Args:
        base: `shipped`, or a folder that `semsched train` wrote.
        output: folder for the reader's table.
        root: data folder.
        scale: share of the texts.

    Raises:
        DataNotFound: a file is missing below `root`.
        FileNotFoundError: the base is not a stored network.
    """
    torch.set_num_threads(threads)
    folder = base_folder(base)
    examples = _first_round(Sources.read(root, "train"), seed, scale)
    distil(folder, [one.text for one in examples], output, seed=seed)


def _aligned_student(
    sources: Sources, options: Options, scale: float
) -> tuple[Path, UrgencyLengthClassifier, WindowTokenizer]:
    """A student of the pretrained encoder, with its tokenizer in the folder `encoder` of the
    output. Kept there, because it takes as long as the rest: `--base OUTPUT/encoder` goes on from
    it."""
    folder, rng = options.output / "encoder", random.Random(options.seed)
    packed = read_encoder(packed_file())
    labeled = [one.text for one in _first_round(sources, options.seed, scale * _ALIGNED_SCALE)]
    texts = unlabeled_texts(written_texts(), round(_TEXTS_PER_LANGUAGE * scale), rng)
    ids = chosen_pieces(packed.pieces, labeled, texts, _VOCABULARY)
    save_tokenizer(piece_tokenizer(packed.pieces, ids), folder)
    tokenizer = WindowTokenizer(AutoTokenizer.from_pretrained(folder), DEFAULT_WINDOW)
    teacher = packed.with_vocabulary(ids)
    student = student_of(teacher)
    prefix = tokenizer.encode([QUERY_PREFIX])[0][1:-1]
    corpus = [*labeled, *itertools.chain.from_iterable(texts.values())]
    align(student, teacher, tokenizer, prefix, corpus, seed=options.seed, epochs=_ALIGNED_EPOCHS,
          on_step=options.on_step)  # fmt: skip
    save_network(student, folder, folder, "fp16")
    return folder, student, tokenizer


def _calibration_texts(unseen: Sources, seed: int) -> list[Example]:
    """Texts of people: messages, as many visits, and prompts and questions for the lengths."""
    written = [*unseen.written, *unseen.written_elsewhere]
    visits = random.Random(seed).sample(unseen.visits, min(len(written), len(unseen.visits)))
    pairs = [
        Example(one.text, None, one.output_tokens) for one in (*unseen.prompts, *unseen.questions)
    ]
    return [*written, *(Example(one.text, one.level) for one in visits), *pairs]


def _first_round(sources: Sources, seed: int, scale: float) -> list[Example]:
    return training_round(sources, seed * 1000, scale)


def train_urgency(
    options: Options, domain_name: str, table: Path | None, count: int, test: Path | None
) -> FineTuned:
    """Train the urgency head on labeled texts, or on the example sentences of a domain.

    Args:
        domain_name: what the levels mean: a shipped domain or a YAML file.
        table: CSV with the columns text,level; None to train on the domain's own sentences.
        count: number of texts made from the domain, without `table`.
        test: CSV with the texts to hold out; None for a tenth of the texts.

    Raises:
        PolicyError: the domain is missing or invalid.
        ValueError: a table is invalid, or there are too few texts.
    """
    domain = load_domain(domain_name)

    def read(path: Path) -> list[Example]:
        return [one for one in read_examples(path, domain) if one.level is not None]

    def prepare(network: UrgencyLengthClassifier, _: Sequence[Example]) -> None:
        set_level_names(network, [level.name for level in domain.levels])
        if domain_name != "emergency":  # another scale: the old head would mislead
            network.pre_classifier.reset_parameters()
            network.classifier = nn.Linear(network.config.dim, len(domain.levels))

    examples = read(table) if table else domain_examples(domain, count, options.seed)
    return _fine_tune(
        options,
        examples,
        None if test is None else read(test),
        keep="length",
        encoder_rate=_URGENCY_RATE,
        prepare=prepare,
        same_heads=domain_name == "emergency",
    )


def train_length(options: Options, table: Path, test: Path | None, tune_encoder: bool) -> FineTuned:
    """Train the length head on a CSV with the columns text,output_tokens.

    Args:
        test: see `train_urgency`.
        tune_encoder: train the encoder as well.

    Raises:
        ValueError: a table is invalid, or there are too few texts.
    """

    def read(path: Path) -> list[Example]:
        return [one for one in read_examples(path) if one.output_tokens is not None]

    def prepare(network: UrgencyLengthClassifier, training: Sequence[Example]) -> None:
        set_length_buckets(network, [one.output_tokens or 0 for one in training])

    return _fine_tune(
        options,
        read(table),
        None if test is None else read(test),
        keep="urgency",
        encoder_rate=FINE_TUNING_RATE if tune_encoder else 0.0,
        prepare=prepare,
    )


def _parts(
    examples: Sequence[Example], tests: Sequence[Example] | None, uncalibrated: bool
) -> tuple[list[Example], list[Example], Sequence[Example], int | None]:
    """Texts to train on, to calibrate on and to test on, and how many of given `tests` are among
    the first."""
    if len(examples) < _LEAST_TEXTS:
        raise ValueError(f"{len(examples)} labeled texts; at least {_LEAST_TEXTS} are needed")
    training, validation, held_out = (
        [one for one in examples if split_of(one.text) == part]
        for part in ("train", "validation", "test")
    )
    if uncalibrated:
        training += validation
    if tests is None:
        return training, validation, held_out, None
    training += held_out
    # Where texts are short, as complaints are, the same ones occur again, at any level.
    trained = {one.text for one in training}
    return training, validation, tests, sum(one.text in trained for one in tests)


def _fit(
    options: Options,
    network: UrgencyLengthClassifier,
    tokenizer: WindowTokenizer,
    examples: Sequence[Example],
    encoder_rate: float,
) -> None:
    fit(
        network,
        tokenizer,
        lambda _: examples,
        seed=options.seed,
        epochs=options.epochs,
        minutes=options.minutes,
        encoder_rate=encoder_rate,
        on_step=options.on_step,
    )


def _keep_texts(options: Options, training: Sequence[Example], tests: Sequence[Example]) -> None:
    write_examples(training, options.output / TRAINING_FILE)
    write_examples(tests, options.output / TEST_FILE)


def _distil(options: Options, training: Sequence[Example], start: InstantTable | None) -> None:
    """Train the instant reader on the new network's answers to the texts and to everyday ones."""
    rng = random.Random(options.seed)
    everyday = [everyday_prompt(rng) for _ in training[:_MOST_EVERYDAY]]
    texts = [one.text for one in training] + everyday
    distil(options.output, texts, options.output, seed=options.seed, start=start)


def _fine_tune(
    options: Options,
    examples: Sequence[Example],
    tests: Sequence[Example] | None,
    *,
    keep: Literal["urgency", "length"],
    encoder_rate: float,
    prepare: Callable[[UrgencyLengthClassifier, Sequence[Example]], None],
    same_heads: bool = False,
) -> FineTuned:
    """Train the base on `examples`, less a tenth for calibration, where that is needed, and, if
    `tests` is None, a tenth to test on.

    Args:
        keep: the head that is not trained. It stays as it is under a frozen encoder, and is trained
            on its own first predictions while the encoder changes.
        encoder_rate: learning rate of the encoder; 0 freezes it.
        prepare: fits the network's heads to the training examples.
        same_heads: the heads stay those of the base, if it has any. Then the trained network is
            averaged with the base, whose calibration it keeps.
    """
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    folder, network, tokenizer = load_base(options.base)
    same_heads = same_heads and has_heads(network)
    training, validation, tests, known = _parts(examples, tests, same_heads)
    instant = InstantTable.load(folder)  # before a model in the same folder replaces it
    prepare(network, training)
    fitted: Sequence[Example] = training
    if not encoder_rate:
        network.head(keep).requires_grad_(False)
    elif has_heads(network):
        fitted = _with_predictions(training, folder, keep, options.threads)
    _fit(options, network, tokenizer, fitted, encoder_rate)
    if same_heads:
        average(network, load_network(folder).state_dict())
    else:
        calibrate(network, tokenizer, validation)
    save_network(network, folder, options.output, "fp16")
    if instant is not None:
        config = network.config
        if keep == "urgency":
            instant = renewed(instant, None, len(config.length_bucket_means))
        elif not same_heads:
            instant = renewed(instant, config.num_labels, None)
    _distil(options, training, instant)
    _keep_texts(options, training, tests)
    if keep == "length":
        _write_thresholds(options, training)
    return FineTuned(len(tests), known, len(training) if keep == "length" else None)


def _write_thresholds(
    options: Options, examples: Sequence[Example], urgent_recall: float = 0.0
) -> None:
    """Write a policy that cuts the stored model's expected level where it agrees best with the
    levels of `examples`, with at least this recall of levels 0 and 1."""
    predictor = TextPredictor.load(str(options.output), options.threads)
    probabilities = [one.urgency for one in predictor.predict([one.text for one in examples])]
    thresholds = fitted_thresholds(
        probabilities, [one.level or 0 for one in examples], Decision().certain, urgent_recall
    )
    decision = {"rule": "thresholds", "thresholds": list(thresholds)}
    text = yaml.safe_dump({"decision": decision}, default_flow_style=None, sort_keys=False)
    (options.output / THRESHOLDS_FILE).write_text(text, encoding="utf-8")


def _with_predictions(
    examples: Sequence[Example], folder: Path, keep: Literal["urgency", "length"], threads: int
) -> list[Example]:
    """The examples, each with the base's own prediction as the label of the head to keep."""
    predictor = TextPredictor.load(str(folder), threads)
    buckets = predictor.length_buckets
    labeled = []
    for one, guess in zip(examples, predictor.predict([one.text for one in examples]), strict=True):
        if keep == "urgency":
            one = replace(one, level=likeliest(guess.urgency))
        elif guess.length is not None and buckets is not None:
            one = replace(one, output_tokens=round(buckets.means[likeliest(guess.length)]))
        labeled.append(one)
    return labeled
