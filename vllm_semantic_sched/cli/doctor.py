"""Check a set-up: versions, policy, profile, predictor, memory, and the server if it runs.

Run it in the server's environment. Each check prints a line: ok, warning or fault, what was found,
and what to do. Without --server, no server should be running yet.
"""

import argparse

from vllm_semantic_sched.cli.arguments import add_server_arguments
from vllm_semantic_sched.operate.client import AdminClient
from vllm_semantic_sched.operate.doctor import examine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the server and the options that it gets."""
    add = parser.add_argument
    add_server_arguments(parser, required=False)
    add("--policy", metavar="NAME|FILE", help="the server's policy (default: the server's default)")
    add("--profile", metavar="NAME|FILE", help="its engine profile (default: the policy's)")
    add("--predictor", metavar="NAME|DIR", help="folder or hub id (default: the policy's)")
    add(
        "--kv-transfer-config",
        metavar="JSON",
        dest="kv_transfer",
        help="the option of `vllm serve`, if you use it",
    )


def run(args: argparse.Namespace) -> int:
    """Print the findings as they come; 1 if there is a fault, else 0."""
    server = None if args.server is None else AdminClient(args.server, args.api_key)
    statuses = set()
    for finding in examine(args.policy, args.profile, args.predictor, args.kv_transfer, server):
        print(finding, flush=True)
        statuses.add(finding.status)
    return int("fault" in statuses)
