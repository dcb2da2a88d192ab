"""Trains, calibrates and stores the shipped model, and its instant reader alone."""

import itertools
import random
from pathlib import Path

import torch

from vllm_semantic_sched.lab.evaluation.examples import Example
from vllm_semantic_sched.lab.training.base import (
    base_folder,
    has_heads,
    load_base,
    load_tokenizer,
    set_length_buckets,
    set_level_names,
)
from vllm_semantic_sched.lab.training.calibration import average_for, calibrate, write_thresholds
from vllm_semantic_sched.lab.training.distil import distil
from vllm_semantic_sched.lab.training.e5 import QUERY_PREFIX, packed_file, read_encoder
from vllm_semantic_sched.lab.training.fit import Options, fit
from vllm_semantic_sched.lab.training.languages import unlabeled_texts
from vllm_semantic_sched.lab.training.mixture import Sources, training_round, written_texts
from vllm_semantic_sched.lab.training.student import STUDENT_LAYERS, align, student_of
from vllm_semantic_sched.lab.training.vocabulary import (
    chosen_pieces,
    piece_tokenizer,
    save_tokenizer,
)
from vllm_semantic_sched.predict.instant import InstantTable
from vllm_semantic_sched.predict.network import UrgencyLengthClassifier
from vllm_semantic_sched.predict.text import WindowTokenizer
from vllm_semantic_sched.predict.weights import load_network, save_network

_LEVEL_NAMES = ("immediate", "emergent", "urgent", "semi-urgent", "non-urgent")
_ALIGNED_SCALE = 0.3  # of the texts in a round of training, beside those of other languages
_ALIGNED_EPOCHS = 2
_TEXTS_PER_LANGUAGE = 1500
_FROZEN = 2  # lowest layers of a network that was trained before: its words have their place
_VOCABULARY = 60_000  # pieces: 23 MB in int8
_URGENT_RECALL = 0.72  # of visits of levels 0 and 1; unseen hospitals have a little less


def train_all(
    options: Options,
    root: Path,
    scale: float,
    teacher_folder: Path | None = None,
    layers: int = STUDENT_LAYERS,
) -> int:
    """Train both heads on the data folder `root` and the package's wordings.

    Args:
        scale: share of the texts per round, and of those for validation if it is below 1.
        teacher_folder: a network to learn from beside the labels; None for none.
        layers: of the network that is made if the base is `pretrained`; 12 for a teacher.

    Returns:
        Number of texts that the thresholds were fitted to.

    Raises:
        DataNotFound: a file is missing below `root`.
    """
    sources = Sources.read(root, "train")
    validation = Sources.read(root, "validation").part(min(1.0, scale))
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    if options.base == "pretrained":
        folder, network, tokenizer = _aligned_student(sources, options, scale, layers)
    else:
        folder, network, tokenizer = load_base(options.base)
    network.add_attention()
    known, instant = has_heads(network), InstantTable.load(folder)
    teacher = None if teacher_folder is None else load_network(teacher_folder)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    if not known:
        pairs = (*sources.prompts, *sources.questions)
        set_length_buckets(network, [pair.output_tokens for pair in pairs])
        set_level_names(network, _LEVEL_NAMES)
    fit(
        network,
        tokenizer,
        lambda number: training_round(sources, options.seed * 1000 + number, scale),
        options,
        frozen=_FROZEN if known and teacher is None else 0,
        teacher=teacher,
        # A run that is cut short leaves its last round's model behind.
        after_round=lambda: save_network(network, folder, options.output),
    )
    texts = _calibration_texts(validation, options.seed)
    if known:
        average_for(network, before, tokenizer, texts)
    calibrate(network, tokenizer, texts)
    save_network(network, folder, options.output)
    texts_to_read = _first_round(sources, options.seed, scale)
    distil(options.output, texts_to_read, options.output, seed=options.seed, start=instant)
    visits = [Example(visit.text, visit.level) for visit in validation.visits]
    write_thresholds(options.output, visits, options.threads, _URGENT_RECALL)
    return len(visits)


def _begin_heads(network: UrgencyLengthClassifier, sources: Sources) -> None:
    pairs = (*sources.prompts, *sources.questions)
    set_length_buckets(network, [pair.output_tokens for pair in pairs])
    set_level_names(network, _LEVEL_NAMES)


def train_instant(
    base: str, output: Path, root: Path, scale: float, *, seed: int, threads: int
) -> None:
    """Train the instant reader of a stored network (see `base_folder`) on the texts of the first
    round of `train_all`, and write its table to `output`.

    Raises:
        DataNotFound: a file is missing below `root`.
        FileNotFoundError: the base is not a stored network.
    """
    torch.set_num_threads(threads)
    folder = base_folder(base)
    texts = _first_round(Sources.read(root, "train"), seed, scale)
    distil(folder, texts, output, seed=seed, start=InstantTable.load(folder))


def _aligned_student(
    sources: Sources, options: Options, scale: float, layers: int
) -> tuple[Path, UrgencyLengthClassifier, WindowTokenizer]:
    """A student of the pretrained encoder, with its tokenizer in the folder `encoder` of the
    output. Kept there, because it takes as long as the rest: `--base OUTPUT/encoder` goes on from
    it."""
    folder, rng = options.output / "encoder", random.Random(options.seed)
    packed = read_encoder(packed_file())
    labeled = _first_round(sources, options.seed, scale * _ALIGNED_SCALE)
    texts = unlabeled_texts(written_texts(), round(_TEXTS_PER_LANGUAGE * scale), rng)
    ids = chosen_pieces(packed.pieces, labeled, texts, _VOCABULARY)
    save_tokenizer(piece_tokenizer(packed.pieces, ids), folder)
    tokenizer = load_tokenizer(folder)
    teacher = packed.with_vocabulary(ids)
    student = student_of(teacher, layers)
    prefix = tokenizer.encode([QUERY_PREFIX])[0][1:-1]
    corpus = [*labeled, *itertools.chain.from_iterable(texts.values())]
    if layers < teacher.config.n_layers:
        align(student, teacher, tokenizer, prefix, corpus, seed=options.seed,
              epochs=_ALIGNED_EPOCHS, on_step=options.on_step)  # fmt: skip
    save_network(student, folder, folder, "fp16")
    return folder, student, tokenizer


def _calibration_texts(unseen: Sources, seed: int) -> list[Example]:
    """Texts of people: messages, as many visits and half as many compositions, and prompts and
    questions for the lengths."""
    rng = random.Random(seed)
    written = [*unseen.written, *unseen.written_elsewhere]
    composed = unseen.composer.draw(len(written) // 2, rng)
    visits = rng.sample(unseen.visits, min(len(written), len(unseen.visits)))
    pairs = [
        Example(one.text, None, one.output_tokens) for one in (*unseen.prompts, *unseen.questions)
    ]
    return [*written, *composed, *(Example(one.text, one.level) for one in visits), *pairs]


def _first_round(sources: Sources, seed: int, scale: float) -> list[str]:
    return [one.text for one in training_round(sources, seed * 1000, scale)]
