"""Trains, calibrates and stores the shipped model, and its instant reader alone."""

import itertools
import random
from pathlib import Path

import torch

from vllm_semantic_sched.lab.evaluation.examples import Example
from vllm_semantic_sched.lab.training import vocabulary
from vllm_semantic_sched.lab.training.base import (
    Model,
    base_folder,
    load_base,
    load_tokenizer,
    set_length_buckets,
    set_level_names,
)
from vllm_semantic_sched.lab.training.calibration import average_for, calibrate, write_bounds
from vllm_semantic_sched.lab.training.distil import distil
from vllm_semantic_sched.lab.training.e5 import packed_file, read_encoder
from vllm_semantic_sched.lab.training.fit import (
    ENCODER_RATE,
    FURTHER_HEAD_RATE,
    FURTHER_RATE,
    HEAD_RATE,
    Options,
    fit,
)
from vllm_semantic_sched.lab.training.languages import unlabeled_texts
from vllm_semantic_sched.lab.training.mixture import Sources, training_round, written_texts
from vllm_semantic_sched.lab.training.student import align, student_of
from vllm_semantic_sched.predict.instant import InstantTable
from vllm_semantic_sched.predict.weights import load_network

_LEVEL_NAMES = ("immediate", "emergent", "urgent", "semi-urgent", "non-urgent")
_ALIGNED_SCALE = 0.3  # of the texts in a round of training, beside those of other languages
_TEXTS_PER_LANGUAGE = 1500
_FROZEN = 2  # lowest layers of a network that was trained before: its words have their place
_VOCABULARY = 60_000  # pieces: 23 MB in int8
_URGENT_RECALL = 0.72  # of visits of levels 0 and 1; unseen hospitals have a little less


def train_all(
    options: Options, root: Path, scale: float, teacher_folder: Path | None, layers: int
) -> int:
    """Train both heads on the data folder `root` and the package's wordings. Returns the number of
    texts that the bounds were fitted to; FileNotFoundError if a file is missing below `root`.

    Args:
        scale: share of the texts per round, and of those for validation if it is below 1.
        teacher_folder: a network to learn from beside the labels.
        layers: of the network that is made if the base is `pretrained`; 12 for a teacher.
    """
    sources = Sources.read(root, "train")
    validation = Sources.read(root, "validation").part(min(1.0, scale))
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    new = options.base == "pretrained"
    model = _aligned_student(sources, options, scale, layers) if new else load_base(options.base)
    network = model.network
    instant = InstantTable.load(model.folder)
    network.add_attention()
    known = model.has_heads
    further = known and teacher_folder is None
    teacher = load_network(teacher_folder) if teacher_folder else None
    before = {name: value.clone() for name, value in network.state_dict().items()}
    if not known:
        lengths = [pair.output_tokens for pair in (*sources.prompts, *sources.questions)]
        set_length_buckets(network, lengths)
        set_level_names(network, _LEVEL_NAMES)
    fit(
        model,
        lambda number: training_round(sources, options.seed * 1000 + number, scale),
        options,
        encoder_rate=FURTHER_RATE if further else ENCODER_RATE,
        head_rate=FURTHER_HEAD_RATE if further else HEAD_RATE,
        frozen=_FROZEN if further else 0,
        teacher=teacher,
        # A run that is cut short leaves its last round's model behind.
        after_round=lambda: model.save(options.output),
    )
    texts = calibration_texts(validation, options.seed)
    if known:
        average_for(model, before, texts)
    calibrate(model, texts)
    model.save(options.output)
    first_texts = _first_round(sources, options.seed, scale)
    distil(options.output, first_texts, options.output, seed=options.seed, start=instant)
    visits = [Example(visit.text, visit.level) for visit in validation.visits]
    write_bounds(options.output, visits, options.threads, _URGENT_RECALL)
    return len(visits)


def train_instant(
    base: str, output: Path, root: Path, scale: float, *, seed: int, threads: int
) -> None:
    """Train the instant reader of a stored network (see `base_folder`) on the texts of the first
    round of `train_all`, and write its table to `output`. FileNotFoundError if a data file is
    missing."""
    torch.set_num_threads(threads)
    folder = base_folder(base)
    texts = _first_round(Sources.read(root, "train"), seed, scale)
    distil(folder, texts, output, seed=seed, start=InstantTable.load(folder))


def _aligned_student(sources: Sources, options: Options, scale: float, layers: int) -> Model:
    """A student of the pretrained encoder, also written to OUTPUT/encoder, where `--base` finds it:
    it takes as long as the rest."""
    folder = options.output / "encoder"
    rng = random.Random(options.seed)
    packed = read_encoder(packed_file())
    labeled = _first_round(sources, options.seed, scale * _ALIGNED_SCALE)
    texts = unlabeled_texts(written_texts(), round(_TEXTS_PER_LANGUAGE * scale), rng)
    ids = vocabulary.chosen_pieces(packed.pieces, labeled, texts, _VOCABULARY)
    vocabulary.save_tokenizer(vocabulary.piece_tokenizer(packed.pieces, ids), folder)
    teacher = packed.with_vocabulary(ids)
    student = Model(student_of(teacher, layers), load_tokenizer(folder), folder)
    corpus = [*labeled, *itertools.chain.from_iterable(texts.values())]
    if layers < teacher.config.n_layers:
        align(student, teacher, corpus, options)
    student.save(folder, "fp16")
    return student


def calibration_texts(unseen: Sources, seed: int) -> list[Example]:
    """Messages, as many visits, half as many compositions; prompts and questions for lengths."""
    rng = random.Random(seed)
    written = [*unseen.written, *unseen.written_elsewhere, *unseen.everyday]
    composed = unseen.composer.draw(len(written) // 2, rng)
    visits = rng.sample(unseen.visits, min(len(written), len(unseen.visits)))
    return [
        *written,
        *composed,
        *(Example(visit.text, visit.level) for visit in visits),
        *(
            Example(pair.text, None, pair.output_tokens)
            for pair in (*unseen.prompts, *unseen.questions)
        ),
    ]


def _first_round(sources: Sources, seed: int, scale: float) -> list[str]:
    return [example.text for example in training_round(sources, seed * 1000, scale)]
