"""What refits to corrections gain: kappa and recall of level 0 after the first corrections of
a stream of emergency visits, on the visits that come after them.

    SEMSCHED_DATA=DIR python scripts/studies/corrections.py
"""

import argparse
import random
from pathlib import Path

from common import main, write_json

from vllm_semantic_sched.cli.console import make_console
from vllm_semantic_sched.lab.evaluation.examples import builtin_set
from vllm_semantic_sched.lab.evaluation.metrics import mean
from vllm_semantic_sched.lab.report.tables import make_table
from vllm_semantic_sched.lab.training.corrections import figures, refit
from vllm_semantic_sched.policy.estimates.decision import decide_level
from vllm_semantic_sched.policy.facts.decision import Decision
from vllm_semantic_sched.predict.corrections import Correction
from vllm_semantic_sched.predict.model import TextPredictor
from vllm_semantic_sched.sim.data_folder import data_root

_SETS = {"nhamcs-test": (50, 200, 1000), "ktas": (50, 200, 400)}
_COLUMNS = (
    "set",
    "corrections",
    "streams",
    "refits adopted",
    "kappa: present",
    "every refit",
    "adopted refits",
    "level 0 found: present",
    "every refit",
    "adopted refits",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--predictor", help="folder (default: the shipped one)")
    parser.add_argument("--visits", type=int, default=4000, help="at most (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=5, help="orders (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("bench-output"), metavar="DIR")


def run(args: argparse.Namespace) -> int:
    """Read the visits, print a table and write `corrections.json`."""
    predictor = TextPredictor.load(args.predictor)
    table = make_table("", *_COLUMNS)
    rows = []
    for name, sizes in _SETS.items():
        visits = list(builtin_set(name, data_root()).examples)
        random.Random(1).shuffle(visits)
        visits = visits[: args.visits]
        read = predictor.predict([visit.text for visit in visits])
        stream = [
            Correction(
                0.0,
                prediction.urgency,
                decide_level(prediction.urgency, prediction.decision),
                visit.level or 0,
            )
            for visit, prediction in zip(visits, read, strict=True)
        ]
        for size in sizes:
            row = [
                name,
                size,
                args.streams,
                *_gains(stream, size, args.streams, predictor.decision),
            ]
            rows.append(row)
            cells = (f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row)
            table.add_row(*cells)
    make_console().print(table)
    write_json(
        args.output / "corrections.json", [dict(zip(_COLUMNS, row, strict=True)) for row in rows]
    )
    return 0


def _gains(
    stream: list[Correction], size: int, streams: int, decision: Decision
) -> list[float | int | None]:
    """Refits adopted, and mean figures on the rest of each stream, see `_COLUMNS`."""
    adopted = 0
    results = []
    for seed in range(streams):
        order = random.Random(seed).sample(stream, len(stream))
        refitted = refit(order[:size], decision)
        adopted += refitted.better
        present = _figures(order[size:], decision)
        always = _figures(order[size:], refitted.decision)
        results.append((present, always, always if refitted.better else present))
    means = [
        mean([row[place][figure] or 0.0 for row in results])
        for figure in range(2)
        for place in range(3)
    ]
    return [adopted, *means]


def _figures(
    corrections: list[Correction], decision: Decision
) -> tuple[float | None, float | None]:
    truth = [correction.corrected for correction in corrections]
    decided = [decide_level(correction.probabilities, decision) for correction in corrections]
    return figures(truth, decided)


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
