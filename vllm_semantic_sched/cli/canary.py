"""Try a policy on a part of a running server's traffic.

With one engine the new policy takes turns with the current one; of several engines some run it, and
sessions stay with their engines. It is rolled back when it misses an SLO of the current policy's
tiers. The server drives this by itself; it ends after --lease whatever becomes of this command.
"""

import argparse
import math
from typing import Any

from vllm_semantic_sched.cli.arguments import add_server_arguments, failing
from vllm_semantic_sched.cli.console import print_table
from vllm_semantic_sched.lab.report.content import number_text
from vllm_semantic_sched.operate.client import AdminClient, AdminError
from vllm_semantic_sched.policy.canary import compare
from vllm_semantic_sched.policy.config.files import read_config
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.policy.overload.slo import MEASURES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions start, status and stop."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    start = actions.add_parser("start", help="begin to try a policy")
    add_server_arguments(start)
    add = start.add_argument
    add("--policy", required=True, metavar="NAME|FILE", help="the new policy")
    add("--share", type=float, default=0.1, help="of the traffic (default: %(default)s)")
    add(
        "--until-broken",
        action="append",
        choices=(*MEASURES, "any"),
        help="SLOs that end it: ttft, tpot, e2e (default: any); can be repeated",
    )
    add(
        "--period",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="of one turn of each policy (default: %(default)g)",
    )
    add(
        "--lease",
        type=float,
        default=86_400.0,
        metavar="SECONDS",
        help="after which it ends (default: %(default)g)",
    )
    add_server_arguments(actions.add_parser("status", help="compare both policies so far"))
    stop = actions.add_parser("stop", help="end it")
    add_server_arguments(stop)
    stop.add_argument(
        "--keep",
        action="store_true",
        help="leave the new policy in force until the next reload or restart",
    )


@failing(AdminError, PolicyError)
def run(args: argparse.Namespace) -> int:
    """Carry out an action and print how it stands; 1 if the server or the policy refuses, 3 if the
    canary was rolled back."""
    client = AdminClient(args.server, args.api_key)
    if args.action == "start":
        content, _ = read_config(args.policy, kind="policy")
        measures = args.until_broken or ["any"]
        answer = client.post(
            "/canary/start",
            policy=content or {},
            watch=list(MEASURES) if "any" in measures else measures,
            share=args.share,
            period=args.period,
            lease=args.lease,
        )
    elif args.action == "stop":
        answer = client.post("/canary/stop", keep=args.keep)
    else:
        answer = client.call("/canary")
    engines = answer["engines"]
    known = [engine for engine in engines if engine]
    if not known:
        print("no canary since the start of the server")
        return 0
    for number, engine in enumerate(engines):
        if not engine["running"]:
            state = engine["end"]
        elif engine["role"] == "turns":
            state = f"both in turn, now the {engine['arm']} policy"
        else:
            state = f"the {engine['role']} policy"
        print(f"engine {number}: {state}")
    _print_table(known)
    return 3 if any(engine["end"].startswith("rolled back") for engine in known) else 0


def _print_table(engines: list[dict[str, Any]]) -> None:
    tiers = engines[0]["tiers"]
    rows = []
    for line in compare([engine["tallies"] for engine in engines]):
        interval = "-" if line.interval is None else "{:.2f} to {:.2f}".format(*line.interval)
        kept = ("-" if math.isnan(share) else f"{share:.1%}" for share in line.kept)
        rows.append(
            (
                tiers[line.level],
                line.measure,
                "{} / {}".format(*line.counts),
                *map(number_text, line.means),
                interval,
                *kept,
            )
        )
    if not rows:
        print(
            "nothing counted yet: requests count when they have ended, and not if they arrived in "
            "the first fifth of a turn"
        )
        return
    words = ("tier", "measure")
    figures = ("requests", "mean now, s", "new", "ratio, 95 %", "kept now", "new")
    print_table(
        "current policy and new one: geometric means", (*words, *figures), rows, words=len(words)
    )
