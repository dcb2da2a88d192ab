#!/usr/bin/env python3
"""Train the second network of a model, which reads the texts that the first one doubts.

It starts from all twelve layers of the pretrained encoder, where the first has six, and so makes
different mistakes; it has the first one's tokenizer and word embeddings. One that exists is trained
further, and averaged with what it was as validation texts tell. Half of its texts are
those of `semsched train all`, half are what the first network doubts most: emergencies beside
requests, and requests, chats and stories that sound like one. Written to MODEL/second.
"""

from __future__ import annotations

import argparse
import copy
import random
from pathlib import Path
from typing import TYPE_CHECKING

from common import main

from vllm_semantic_sched.sim.data_folder import data_root

if TYPE_CHECKING:
    from vllm_semantic_sched.lab.evaluation.examples import Example
    from vllm_semantic_sched.lab.training.base import Model

_SCALE = 0.032  # of a round of `semsched train all`
_COMPOSITIONS = 6500  # in a round
_RATE = 1.6e-4  # of the encoder
_FROZEN = 4  # lowest layers of one that was trained before, which stay as they are


def second_of(first: Model) -> Model:
    """A network of the pretrained encoder's layers, with untrained heads like those of `first`."""
    from vllm_semantic_sched.lab.training.base import Model
    from vllm_semantic_sched.lab.training.e5 import packed_file, read_encoder
    from vllm_semantic_sched.predict.network import UrgencyLengthClassifier

    packed = read_encoder(packed_file())
    config = copy.deepcopy(first.network.config)
    config.n_layers = packed.config.n_layers
    network = UrgencyLengthClassifier(config)
    layers = {
        name: value for name, value in packed.state.items() if name.startswith("transformer.")
    }
    network.distilbert.load_state_dict(layers, strict=False)
    network.distilbert.embeddings = first.network.distilbert.embeddings
    network.add_attention()
    return Model(network, first.tokenizer, first.folder)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add(
        "--predictor", type=Path, required=True, help="folder of the first network; gets the second"
    )
    add("--data", type=Path, default=data_root(), help="data folder (default: SEMSCHED_DATA)")
    add("--minutes", type=float, default=75.0, help="of training (%(default)s)")
    add("--threads", type=int, default=2, help="threads that torch may use (%(default)s)")
    add("--seed", type=int, default=1, help="of weights, texts and their order (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Train, calibrate and write."""
    import torch

    from vllm_semantic_sched.lab.training.base import load_base
    from vllm_semantic_sched.lab.training.calibration import average_for, calibrate
    from vllm_semantic_sched.lab.training.compositions import Draft
    from vllm_semantic_sched.lab.training.fit import FURTHER_HEAD_RATE, FURTHER_RATE, Options, fit
    from vllm_semantic_sched.lab.training.mixture import Sources, training_round
    from vllm_semantic_sched.lab.training.stored import save_network
    from vllm_semantic_sched.lab.training.train import calibration_texts
    from vllm_semantic_sched.predict import SECOND
    from vllm_semantic_sched.predict.weights import load_second

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    sources = Sources.read(args.data, "train")
    first = load_base(str(args.predictor))
    known = load_second(args.predictor, first.network)
    model = second_of(first) if known is None else first._replace(network=known)
    before = {name: value.clone() for name, value in model.network.state_dict().items()}
    forms = {
        Draft.before_tasks: 24,
        Draft.between_tasks: 12,
        Draft.beside_tasks: 6,
        Draft.only_framed: 13,
        Draft.only_tasks: 14,
        Draft.surrounded: 14,
        Draft.chat_that_is_over: 13,
        Draft.chat_without_one: 5,
        Draft.chat: 6,
        Draft.written_chat: 17,
        Draft.long_message: 20,
        Draft.long_framed: 14,
        Draft.long_calm: 20,
    }

    def texts(number: int) -> list[Example]:
        seed = args.seed * 1000 + number
        rng = random.Random(seed)
        drawn = sources.composer.draw(_COMPOSITIONS, rng, forms)
        everyday = rng.sample(sources.everyday, len(sources.everyday) // 8)
        mixed = [*training_round(sources, seed, _SCALE), *drawn, *everyday]
        rng.shuffle(mixed)
        return mixed

    options = Options(
        args.predictor, str(args.predictor), args.seed, epochs=10_000, minutes=args.minutes
    )
    validation = calibration_texts(Sources.read(args.data, "validation"), args.seed)
    if known is None:
        fit(model, texts, options, encoder_rate=_RATE)
    else:
        fit(
            model,
            texts,
            options,
            encoder_rate=FURTHER_RATE,
            head_rate=FURTHER_HEAD_RATE,
            frozen=_FROZEN,
        )
        average_for(model, before, validation)
    calibrate(model, validation)
    save_network(model.network, None, args.predictor / SECOND)
    print(f"written: {args.predictor / SECOND}")
    return 0


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
