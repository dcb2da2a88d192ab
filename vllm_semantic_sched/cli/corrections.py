"""Record corrections of levels, and refit the decision to them if that is better.

Reads the corrections that a server has recorded (from the server, or its file corrections.jsonl
beside the event log) and compares the bounds in force with refitted ones on corrections kept
out of the fit. If these are better, a copy of the model with them is written. Says at most how many
emergencies are missed, as far as the corrected requests were drawn at random.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_semantic_sched.cli.arguments import Failure, add_server_arguments, failing, failing_in_lab
from vllm_semantic_sched.operate.client import AdminClient, AdminError
from vllm_semantic_sched.policy.facts.decision import bounds_in_words, decision_of
from vllm_semantic_sched.predict import SHIPPED_WEIGHTS
from vllm_semantic_sched.predict.corrections import parse_corrections, read_corrections

if TYPE_CHECKING:
    from vllm_semantic_sched.lab.training.corrections import Missed, Refit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the source of the corrections, the policy in force and the output."""
    add = parser.add_argument
    add(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="read the corrections from this file and not from the server",
    )
    add_server_arguments(parser)
    add(
        "--correct",
        metavar="ID=LEVEL",
        help="record the true level of a request that has ended, and do nothing else",
    )
    add(
        "--sampled",
        action="store_true",
        help="--correct: the request was drawn at random, not noticed",
    )
    add("--predictor", type=Path, metavar="DIR", help="folder (default: the shipped one)")
    add(
        "--output",
        type=Path,
        default=Path("refitted-model"),
        metavar="DIR",
        help="gets a copy of the model with the refitted bounds (default: %(default)s)",
    )


@failing(AdminError)
@failing_in_lab()
def run(args: argparse.Namespace) -> None:
    """Record, or refit and print; 1 if the source or the model cannot be used, 2 for a wrong
    option."""
    server = AdminClient(args.server, args.api_key)
    if args.correct is not None:
        if args.file is not None:
            raise Failure("--correct is for a server, not for a file", 2)
        return _correct(server, args.correct, args.sampled)
    if args.file is not None:
        corrections = read_corrections(args.file)
    else:
        corrections = parse_corrections(server.call("/corrections").get("corrections", []))
    model: Path = args.predictor or SHIPPED_WEIGHTS
    decision = decision_of(json.loads((model / "config.json").read_text("utf-8")))
    from vllm_semantic_sched.lab.training.corrections import missed_emergencies, refit
    from vllm_semantic_sched.lab.training.decision import write_decision

    _print_missed(missed_emergencies(corrections), len(corrections))
    refitted = refit(corrections, decision)
    _print_refit(refitted)
    if refitted.better:
        shutil.copytree(model, args.output, dirs_exist_ok=True)
        write_decision(args.output, refitted.decision)
        print(f"written: {args.output}; set predictor.model to it and restart the server")


def _correct(server: AdminClient, correction: str, sampled: bool) -> None:
    name, _, level = correction.rpartition("=")
    if not name or not level.isdecimal():
        raise Failure(f"--correct {correction}: expected ID=LEVEL", 2)
    answer = server.post("/correct", id=name, level=int(level), sampled=sampled)
    print(f"{name}: served at level {answer['level']}, corrected to {answer['corrected']}")


def _print_missed(missed: Missed, corrections: int) -> None:
    print(f"{corrections} corrections, {missed.sampled} of requests drawn at random")
    if missed.sampled:
        print(
            f"of {missed.emergencies} level-0 requests among these, {missed.missed} were served at "
            f"level 2 or later: at most {missed.of_emergencies:.1%} of all level-0 requests, and "
            f"{missed.of_requests:.2%} of all requests, are missed (95 %)"
        )
    if missed.sampled < corrections:
        print(
            "Corrections of requests that somebody noticed are biased: no bound follows from them, "
            "and a refit to them favors what gets noticed. Draw some at random (--sampled)."
        )


def _print_refit(refit: Refit) -> None:
    def text(figures: tuple[float | None, float | None]) -> str:
        kappa, recall = ("-" if figure is None else f"{figure:.3f}" for figure in figures)
        return f"kappa {kappa}, level 0 found {recall}"

    print(f"in force:                  {text(refit.before)}")
    print(f"refitted, without its own: {text(refit.after)}")
    bounds = bounds_in_words(refit.decision.bounds)
    verdict = "better" if refit.better else "not clearly better: nothing is written"
    print(f"bounds {bounds}: {verdict}")
