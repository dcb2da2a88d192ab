"""`semsched bench make-model`: the model that the benchmark serves when there is no other."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from vllm_semantic_sched.bench.tiny_model import SIZES, make_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench make-model`."""
    add = parser.add_argument
    add("directory", type=Path, help="folder to write")
    add("--size", choices=SIZES, default="tiny", help="shape of the model (default: %(default)s)")
    add("--layers", type=int, help="layers, instead of the size's")
    add("--max-model-len", type=int, help="longest sequence, instead of the size's")
    add("--seed", type=int, default=0, help="of the weights (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Write the model unless the same one is there; always 0."""
    changes = {"num_layers": args.layers, "max_model_len": args.max_model_len, "seed": args.seed}
    given = {name: value for name, value in changes.items() if value is not None}
    config = replace(SIZES[args.size], **given)
    written = make_model(args.directory, config)
    print(f"{'wrote' if written else 'already there:'} {args.directory}")
    return 0
