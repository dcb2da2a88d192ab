"""Say where a request stands in the queue, or set its level while it waits or runs.

Without a level it prints how many requests are ahead and when the request is expected to start. A
level counts from the next step on, whatever the text of the request says: a raised request is the
next of its level, and may preempt as that level may; a lowered one may be preempted.
"""

import argparse
import getpass
from typing import Any
from urllib.parse import urlencode

from vllm_semantic_sched.cli.arguments import add_server_arguments, failing
from vllm_semantic_sched.operate.client import AdminClient, AdminError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the request, the level, and who sets it."""
    add = parser.add_argument
    add(
        "request",
        metavar="REQUEST",
        help="its id: of the client's answer, its x-request-id, or of the event log",
    )
    add("level", metavar="LEVEL", nargs="?", type=int, help="the new level, 0 is the most urgent")
    add("--why", default="", metavar="TEXT", help="for the event log")
    add("--by", metavar="NAME", help="who sets it, for the event log (default: you)")
    add_server_arguments(parser)


@failing(AdminError)
def run(args: argparse.Namespace) -> None:
    """Print a line for each part of the request; 1 if the server refuses, or has no such one."""
    server = AdminClient(args.server, args.api_key)
    if args.level is None:
        answer = server.call("/level?" + urlencode({"id": args.request}))
    else:
        by = args.by or getpass.getuser()
        answer = server.post("/level", id=args.request, level=args.level, by=by, why=args.why)
    for standing in answer["requests"]:
        print(f"{standing['request']}: {_words(standing)}")


def _words(standing: dict[str, Any]) -> str:
    level = f"level {standing['level']} ({standing['level_from'].replace('_', ' ')})"
    if "level_before" in standing:
        level = f"level {standing['level_before']} became {standing['level']}"
    if standing["state"] == "running":
        return f"{level}, runs"
    if "ahead" not in standing:
        return f"{level}, waits outside the order: not ready (grammar, adapter, KV), or observed"
    ahead, seconds = standing["ahead"], standing["expected_wait"]
    start = "the server is paused" if seconds is None else f"expected to start in {seconds:.1f} s"
    return f"{level}, waits with {ahead} ahead, {start}"
