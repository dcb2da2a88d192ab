"""`semsched policy`: what can be configured, and whether a file is valid."""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path

from vllm_semantic_sched.admin import reference, reload
from vllm_semantic_sched.policy.config import Policy, load_policy
from vllm_semantic_sched.policy.facts.files import resolve_config, shipped_names
from vllm_semantic_sched.policy.facts.profile import load_profile
from vllm_semantic_sched.policy.facts.section import PolicyError, Section, keys_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions of `semsched policy`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="names of the shipped policies and engine profiles")
    keys = actions.add_parser("keys", help="every key of a policy file with default and meaning")
    keys.add_argument(
        "--markdown",
        action="store_true",
        help="as tables, with what can change while the server runs, codes and metrics",
    )
    keys.add_argument(
        "--into", type=Path, metavar="PAGE", help="write the tables into docs/reference.md instead"
    )
    check = actions.add_parser("check", help="check a policy by name or path")
    check.add_argument("policy", help="name of a shipped policy, or path of a YAML file")
    show = actions.add_parser("show", help="print a shipped policy, to start one's own from")
    show.add_argument("policy", help="name of a shipped policy, or path of a YAML file")
    reload.add_arguments(
        actions.add_parser("reload", help="make a running server read its policy file again")
    )


def run(args: argparse.Namespace) -> int:
    """Carry out an action; 1 if the policy is invalid."""
    if args.action == "reload":
        return reload.run(args)
    try:
        if args.action == "list":
            print("policies:", *shipped_names("policy"))
            print("profiles:", *shipped_names("profile"))
        elif args.action == "keys":
            if args.into:
                reference.insert(args.into)
            else:
                print(reference.keys_table() if args.markdown else describe_keys(), end="")
        elif args.action == "show":
            print(resolve_config(args.policy, "policy").read_text(encoding="utf-8"), end="")
        else:
            policy = load_policy(args.policy)
            load_profile(policy.profile)
            print(f"{args.policy}: valid, base policy {policy.base}, {policy.levels} levels")
    except PolicyError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def describe_keys(model: type[Section] = Policy) -> str:
    """All keys of a policy file, or of another kind, as text: name, default, valid values,
    meaning."""
    lines = []
    for key in keys_of(model):
        valid = f"   ({key.valid})" if key.valid else ""
        lines.append(f"{key.name}: {key.default}{valid}".rstrip())
        lines += textwrap.wrap(key.meaning, 96, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines) + "\n"
