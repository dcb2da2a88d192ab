"""Update configs/policy-keys.yaml, which has every policy key, the tables of docs/reference.md
(refusal codes, metrics, tasks that failed, releases of vLLM), and those of docs/commands.md
(commands with their options, routes, environment variables).

python scripts/reference.py
"""

import argparse
import functools
import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from vllm_semantic_sched.cli import command_parser
from vllm_semantic_sched.engine.guard import TASKS
from vllm_semantic_sched.engine.metrics.table import COUNTERS, GAUGES, HISTOGRAMS
from vllm_semantic_sched.lab.training.wording import capital
from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.config.section import Key, keys_of
from vllm_semantic_sched.policy.live import restart_reason
from vllm_semantic_sched.policy.overload.refusal import Code

_CODES_HEAD = ("| code | HTTP status | meaning | keys |", "|---|---|---|---|")
_METRICS_HEAD = ("| metric | meaning |", "|---|---|")
_TASKS_HEAD = ("| `doing` | failed while |", "|---|---|")
_OPTIONS_HEAD = ("| option | meaning |", "|---|---|")
_ROUTES_HEAD = ("| route | what it does |", "|---|---|")
_VARIABLES_HEAD = ("| variable | read by | meaning |", "|---|---|---|")
_RELEASES_HEAD = (
    "| vLLM | runs a model | unit tests | engine tests | vLLM's scheduler tests |",
    "|---|---|---|---|---|",
)
_YAML_WORDS = {"None": "null", "True": "true", "False": "false", "()": "[]", "off": "'off'"}
_HEAD = (
    "Every key of a policy file with its default and meaning, written by scripts/reference.py. "
    "Each says who changes it, on what evidence, and where the effect shows. "
    "Copy the keys that you change; `null` is: not set. A server takes a changed file up on "
    "`semsched policy reload`, except for keys that take effect at restart."
)
_ROOT = Path(__file__).resolve().parents[1]
_RELEASES = _ROOT / "tests" / "data" / "matrix.yaml"
KEYS = _ROOT / "configs" / "policy-keys.yaml"
PAGE = _ROOT / "docs" / "reference.md"
COMMANDS_PAGE = _ROOT / "docs" / "commands.md"


class Effect(NamedTuple):
    """Where operators see the effect of a policy key: codes of the requests that it can refuse, and
    metrics, without the prefix `semsched:`."""

    codes: tuple[Code, ...]
    metrics: tuple[str, ...]


class User(NamedTuple):
    """Who changes a key and on what evidence, and the test of its effect if nothing that ships
    sets it."""

    who: str
    test: str | None


@functools.cache
def _texts() -> dict[str, Any]:
    text = Path(__file__).with_name("reference.yaml").read_text(encoding="utf-8")
    texts: dict[str, Any] = yaml.safe_load(text)
    return texts


@functools.cache
def _effects() -> dict[str, Effect]:
    return {
        key: Effect(tuple(map(Code, entry.get("codes", ()))), tuple(entry["metrics"]))
        for key, entry in _texts()["keys"].items()
    }


def effect_of(key: str) -> Effect:
    """The effect of a key, or of the smallest group of it that reference.yaml lists; KeyError if it
    lists neither."""
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        group = ".".join(parts[:end])
        for name in (group, group.removesuffix("[]")):
            if name in _effects():
                return _effects()[name]
    raise KeyError(key)


@functools.cache
def users() -> dict[str, User]:
    """The user of each policy key."""
    return {key: User(entry["who"], entry.get("test")) for key, entry in _texts()["users"].items()}


def insert(path: Path) -> None:
    """Update the tables of a page: each text between a mark like `<!-- codes -->`, which names the
    table, and the next `<!-- end -->`."""
    tables = {
        "codes": codes_table,
        "metrics": metrics_table,
        "tasks": tasks_table,
        "releases": releases_table,
        "commands": commands_text,
        "routes": routes_table,
        "variables": variables_table,
    }
    text = path.read_text("utf-8")
    for name, table in tables.items():
        begin = f"<!-- {name} -->\n"
        if begin in text:
            before, rest = text.split(begin)
            text = before + begin + table() + "<!-- end -->" + rest.split("<!-- end -->", 1)[1]
    path.write_text(text, "utf-8")


def codes_table() -> str:
    """A Markdown table of the refusal codes with HTTP status, meaning and policy keys."""
    lines = [*_CODES_HEAD]
    for code in Code:
        names = [name for name, effect in _effects().items() if code in effect.codes]
        groups = tuple(f"{name}." for name in names)
        keys = ", ".join(f"`{name}`" for name in names if not name.startswith(groups))
        meaning = _texts()["codes"][code.value]
        lines.append(f"| `{code.value}` | {code.status} | {meaning} | {keys} |")
    return "\n".join(lines) + "\n"


def metrics_table() -> str:
    """A Markdown table of the metrics that this package adds to the server's /metrics."""
    lines = [*_METRICS_HEAD]
    for table, ending in ((COUNTERS, "_total"), (GAUGES, ""), (HISTOGRAMS, "")):
        for name, metric in sorted(table.items()):
            kind = " (histogram)" if metric.buckets else ""
            labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
            lines.append(f"| `semsched:{name}{ending}{labels}`{kind} | {metric.help} |")
    return "\n".join(lines) + "\n"


def tasks_table() -> str:
    """A Markdown table of the values of the label `doing` of `semsched:policy_errors_total`."""
    rows = [f"| `{code}` | {task} |" for code, task in TASKS.items()]
    return "\n".join([*_TASKS_HEAD, *rows]) + "\n"


def releases_table() -> str:
    """A Markdown table of what scripts/matrix.sh has recorded."""
    releases = yaml.safe_load(_RELEASES.read_text(encoding="utf-8"))
    columns = ("model", "unit", "engine", "conformance")
    rows = []
    for version, row in sorted(releases.items()):
        cells = " | ".join(row.get(column, "-") for column in columns)
        rows.append(f"| {version} | {cells} |")
    return "\n".join([*_RELEASES_HEAD, *rows]) + "\n"


def commands_text() -> str:
    """Markdown sections of all commands: what each does, its usage, and a table of its options."""
    return "".join(_command_sections(command_parser()))


def _command_sections(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The sections of the commands of `parser`, each followed by those of its own commands."""
    for group in _subcommands(parser):
        helps = {choice.dest: choice.help for choice in group._choices_actions}
        for name, command in group.choices.items():
            depth = command.prog.count(" ")
            text = command.description or f"{capital(helps[name])}."
            paragraphs = [_paragraph(paragraph) for paragraph in text.split("\n\n")]
            yield f"{'#' * (depth + 2)} `{command.prog}`\n\n" + "\n\n".join(paragraphs) + "\n\n"
            rows = [
                f"| {_option(action)} | {_cell(_expanded(command, action))} |"
                for action in command._actions
                if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
            ]
            if rows:
                yield "\n".join([*_OPTIONS_HEAD, *rows]) + "\n\n"
            yield from _command_sections(command)


def _paragraph(text: str) -> str:
    """A paragraph of a description on one line; an indented one is an example and stays."""
    if text.startswith(" "):
        return f"```text\n{textwrap.dedent(text).rstrip()}\n```"
    return " ".join(text.split())


def _subcommands(parser: argparse.ArgumentParser) -> "Iterator[argparse._SubParsersAction[Any]]":
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield action


def _option(action: argparse.Action) -> str:
    """How an option or a positional argument is written."""
    if action.choices is not None and action.metavar is None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    else:
        metavar = action.metavar or action.dest.upper()
        value = " ".join(metavar) if isinstance(metavar, tuple) else metavar
    if not action.option_strings:
        return f"`{_cell(value)}`"
    takes_value = action.nargs != 0
    return ", ".join(
        f"`{name} {_cell(value)}`" if takes_value else f"`{name}`" for name in action.option_strings
    )


def _expanded(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """The help of an option with its default filled in."""
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    return f"{text} (required)" if action.required and action.option_strings else text


def _cell(text: str) -> str:
    """`text` on one line of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def routes_table() -> str:
    """A Markdown table of the routes that this package adds to vLLM's server."""
    # Imports vLLM's web framework, which the other tables do without.
    from vllm_semantic_sched.engine.http import admin

    rows = []
    for router in (admin.router, admin.probes):
        for route in router.routes:
            method = next(iter(route.methods))
            text = inspect.getdoc(route.endpoint) or ""
            meaning = _cell(text.partition("\n\n")[0])
            rows.append((route.path, f"| `{method} {route.path}` | {meaning} |"))
    lines = [line for _, line in sorted(rows)]
    return "\n".join([*_ROUTES_HEAD, *lines]) + "\n"


def variables_table() -> str:
    """A Markdown table of the environment variables."""
    rows = [
        f"| `{name}` | {entry['by']} | {entry['meaning']} |"
        for name, entry in _texts()["variables"].items()
    ]
    return "\n".join([*_VARIABLES_HEAD, *rows]) + "\n"


def policy_keys() -> str:
    """A policy file with every key at its default, and its meaning as a comment. Keys of a list's
    entries are comments too."""
    lines = [*textwrap.wrap(_HEAD, 98, initial_indent="# ", subsequent_indent="# ")]
    open_groups: list[str] = []
    for key in keys_of(Policy):
        *groups, name = key.name.split(".")
        mark = "# " if any(group.endswith("[]") for group in groups) else ""
        for depth, group in enumerate(groups):
            if open_groups[: depth + 1] != groups[: depth + 1]:
                open_groups = groups[: depth + 1]
                if not group.endswith("[]"):
                    if depth == 0:
                        lines.append("")
                    lines.append(f"{mark}{'  ' * depth}{group}:")
        if not groups:
            lines.append("")
        indent = mark + "  " * len(groups)
        lines += textwrap.wrap(
            _meaning(key), 98, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
        )
        if key.default:
            lines.append(f"{indent}{name}: {_yaml(key.default)}")
    return "\n".join(lines) + "\n"


def _meaning(key: Key) -> str:
    effect = effect_of(key.name)
    words = [key.meaning]
    if key.valid:
        words.append(f"One of {key.valid}.")
    if restart_reason(key.name) is not None:
        words.append("Takes effect at restart.")
    if key.default:
        if (user := users().get(key.name)) is not None:
            words.append(f"Changed by {user.who}.")
        words.append(f"Metrics: {', '.join(effect.metrics)}.")
    return " ".join(" ".join(words).split())


def _yaml(default: str) -> str:
    """A default as written in a policy file."""
    if default.startswith("(") and default.endswith(")") and "," in default:
        return f"[{default[1:-1]}]"
    return _YAML_WORDS.get(default, default)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(__doc__)
    KEYS.write_text(policy_keys(), "utf-8")
    insert(PAGE)
    insert(COMMANDS_PAGE)
