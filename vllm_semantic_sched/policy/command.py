"""`semsched policy`: what can be configured, and whether a file is valid."""

from __future__ import annotations

import argparse
import sys
import textwrap
import typing
from collections.abc import Iterator

from vllm_semantic_sched.admin import reload
from vllm_semantic_sched.policy.config import Policy, load_policy
from vllm_semantic_sched.policy.errors import PolicyError
from vllm_semantic_sched.policy.files import resolve_config, shipped_names
from vllm_semantic_sched.policy.profile import load_profile
from vllm_semantic_sched.policy.section import Section, section_in


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions of `semsched policy`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="names of the shipped policies and engine profiles")
    actions.add_parser("keys", help="every key of a policy file with default and meaning")
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
            print(describe_keys(), end="")
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
    required = any(field.is_required() for field in model.model_fields.values())
    lines = []
    for key, default, valid, meaning in _keys(model, "", None if required else model()):
        lines.append(f"{key}: {default}{f'   ({valid})' if valid else ''}".rstrip())
        lines += textwrap.wrap(meaning, 96, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines) + "\n"


def _keys(
    model: type[Section], prefix: str, defaults: Section | None
) -> Iterator[tuple[str, object, str, str]]:
    """`defaults`: the section as it is where nothing is said; None in the entries of a list."""
    for name, field in model.model_fields.items():
        annotation = field.annotation
        section = section_in(annotation)
        is_list = typing.get_origin(annotation) is tuple
        if section is None or is_list:
            choices = typing.get_args(annotation)
            literal = typing.get_origin(annotation) is typing.Literal
            valid = " | ".join(map(str, choices)) if literal else ""
            default = "(required)" if field.is_required() else field.default
            default = default if defaults is None else getattr(defaults, name)
            yield f"{prefix}{name}", default, valid, field.description or ""
        elif field.description:
            yield f"{prefix}{name}", "", "", field.description
        if section is not None:
            inner = field.default if defaults is None else getattr(defaults, name)
            yield from _keys(
                section,
                f"{prefix}{name}{'[]' if is_list else ''}.",
                inner if isinstance(inner, Section) else None,
            )
