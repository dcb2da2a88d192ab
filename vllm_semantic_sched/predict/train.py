"""`semsched train`: trains the predictor from a pretrained encoder and the data folder."""

import argparse
import sys
from pathlib import Path

from vllm_semantic_sched.datasets import DataNotFound, data_root

LEVEL_NAMES = ("immediate", "emergent", "urgent", "semi-urgent", "non-urgent")

_BUCKETS = 9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `semsched train`."""
    parser.add_argument("--output", type=Path, required=True, help="folder for the trained model")
    parser.add_argument("--data", type=Path, help="data folder (default: SEMSCHED_DATA)")
    parser.add_argument("--seed", type=int, default=1, help="of weights, texts and their order")
    parser.add_argument("--epochs", type=int, default=2, help="rounds of freshly rendered texts")
    parser.add_argument("--minutes", type=float, help="stop after this time (default: no limit)")
    parser.add_argument("--threads", type=int, default=1, help="threads that torch may use")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="share of the texts per round; 0.01 tries it out"
    )


def run(args: argparse.Namespace) -> int:
    """Train, calibrate, save and print validation figures; 1 if something needed is missing."""
    root = args.data or data_root()
    try:
        if root is None:
            raise DataNotFound("no data folder: pass --data DIR or set SEMSCHED_DATA")
        _train(args, root)
    except (DataNotFound, ImportError) as error:
        print(f"semsched train: {error}", file=sys.stderr)
        return 1
    return 0


def _train(args: argparse.Namespace, root: Path) -> None:
    import torch
    from transformers import AutoTokenizer

    from vllm_semantic_sched.predict.buckets import length_buckets
    from vllm_semantic_sched.predict.data import Sources
    from vllm_semantic_sched.predict.fit import fit
    from vllm_semantic_sched.predict.network import network_from_minilm, pretrained_folder
    from vllm_semantic_sched.predict.text import DEFAULT_WINDOW, WindowTokenizer
    from vllm_semantic_sched.predict.validation import calibrate, validation_table
    from vllm_semantic_sched.predict.weights import save_network

    encoder = pretrained_folder()
    sources = Sources.read(root, "train")
    validation = Sources.read(root, "validation")
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    buckets = length_buckets(sources.lengths, _BUCKETS)
    network = network_from_minilm(
        encoder,
        length_bucket_edges=list(buckets.edges),
        length_bucket_means=list(buckets.means),
        window=DEFAULT_WINDOW,
        temperature=1.0,
        id2label=dict(enumerate(LEVEL_NAMES)),
        label2id={name: level for level, name in enumerate(LEVEL_NAMES)},
    )
    tokenizer = WindowTokenizer(AutoTokenizer.from_pretrained(encoder), DEFAULT_WINDOW)
    fit(
        network,
        tokenizer,
        sources,
        seed=args.seed,
        epochs=args.epochs,
        minutes=args.minutes,
        scale=args.scale,
        # A run that is cut short leaves its last round's model behind.
        after_round=lambda: save_network(network, encoder, args.output),
    )
    calibrate(network, tokenizer, validation, args.seed)
    save_network(network, encoder, args.output)
    print(f"saved to {args.output}")
    print(validation_table(args.output, validation, args.seed))
