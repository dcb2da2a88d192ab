"""The command `semsched`, one subcommand per job. The module of each has `add_arguments`, which
declares its options, and `run`, which runs it and returns the exit status (None: 0); if it has
subcommands, `run` may be a default of theirs instead."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from vllm_semantic_sched import __version__
from vllm_semantic_sched.cli.arguments import Failure

# A module of this package each; the first paragraph of its docstring is its line of help.
_COMMANDS = (
    "serve",
    "bench",
    "train",
    "evaluate",
    "explain",
    "policy",
    "level",
    "maintenance",
    "doctor",
    "top",
    "trace",
    "why",
    "whatif",
    "canary",
    "corrections",
    "profile",
    "simulate",
    "plan",
    "annotate",
)


class _PrintCompletion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> None:
        import shtab  # its import would slow down every other command

        print(shtab.complete(parser, given[1]))
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; its exit status."""
    arguments = parse(argv)
    try:
        return arguments.run(arguments) or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Failure as failure:
        print(f"semsched {arguments.command}: {failure}", file=sys.stderr)
        return failure.status


def command_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands, or of one, which is faster: it imports that one's module."""
    parser = argparse.ArgumentParser(
        prog="semsched", description="Urgency-first scheduling for vLLM."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=("bash", "zsh", "tcsh"),
        help="print a script that completes commands in this shell",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in _COMMANDS if only is None else (only,):
        module = importlib.import_module(f"{__name__}.{name}")
        text = str(module.__doc__)
        command = commands.add_parser(
            name, help=text.partition("\n\n")[0], description=text, allow_abbrev=False
        )
        module.add_arguments(command)
        command.set_defaults(run=getattr(module, "run", None))
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of a subcommand, with its function `run`. Exits if they are wrong."""
    words = sys.argv[1:] if argv is None else list(argv)
    # Only help needs all modules. Extras, and what is slow to import, they import when they run.
    parser = command_parser(words[0] if words and words[0] in _COMMANDS else None)
    arguments, passed_on = parser.parse_known_args(words)
    arguments.passed_on = passed_on
    arguments.words = words
    if passed_on and not getattr(arguments, "passes_on", False):
        parser.error(f"unrecognized arguments: {' '.join(passed_on)}")
    return arguments
