"""`semsched bench make-model`: the model that the benchmark serves when there is no other."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from vllm_semantic_sched.bench.tiny_model import TinyModelConfig, make_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench make-model`."""
    default = TinyModelConfig()
    parser.add_argument("directory", type=Path, help="folder to write")
    parser.add_argument("--layers", type=int, default=default.num_layers)
    parser.add_argument("--max-model-len", type=int, default=default.max_model_len)
    parser.add_argument("--seed", type=int, default=default.seed)


def run(args: argparse.Namespace) -> int:
    """Write the model unless the same one is there; always 0."""
    config = replace(
        TinyModelConfig(),
        num_layers=args.layers,
        max_model_len=args.max_model_len,
        seed=args.seed,
    )
    written = make_model(args.directory, config)
    print(f"{'wrote' if written else 'already there:'} {args.directory}")
    return 0
