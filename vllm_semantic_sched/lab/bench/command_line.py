"""Options and tables of commands that compare schedulers on real servers."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from vllm_semantic_sched.lab.bench import workload
from vllm_semantic_sched.lab.bench.prompts import PROMPTS, TRACE, longest_prompt
from vllm_semantic_sched.lab.bench.server import ServerConfig, has_gpu
from vllm_semantic_sched.lab.bench.workload import CONTEXT_TOKENS, MAX_PROMPT_TOKENS
from vllm_semantic_sched.lab.report.tables import make_table
from vllm_semantic_sched.operate.vllm_options import short_steps

if TYPE_CHECKING:
    from vllm_semantic_sched.lab.bench.compare import RunPlan
    from vllm_semantic_sched.lab.bench.results import Rows
    from vllm_semantic_sched.lab.bench.schedulers import SchedulerSpec


def add_plan_arguments(
    parser: argparse.ArgumentParser,
    requests: int,
    max_burst: int,
    overload: float,
    needs_model: bool = True,
) -> None:
    """Declare the options of `make_plan`, with these defaults."""
    load = workload.WorkloadConfig()
    add_server_arguments(parser, needs_model)
    add = parser.add_argument
    add("--policy", default="ems", help="of the semantic schedulers: a name or a YAML file")
    add("--requests", type=int, default=requests, help="per mix (default: %(default)s)")
    add(
        "--overload",
        type=float,
        default=overload,
        help="offered load over the first scheduler's measured capacity (%(default)s)",
    )
    add("--gap", type=float, help="seconds between bursts, instead of --overload")
    add("--maxcon", type=int, default=max_burst, help="largest burst (%(default)s)")
    add("--seed", type=int, default=load.seed, help="of the workload (%(default)s)")
    add(
        "--max-output",
        type=int,
        default=load.max_output_tokens,
        help="longer answers are cut to this many tokens (%(default)s)",
    )
    add(
        "--natural-ends",
        action="store_true",
        help=(
            "the model ends its answers itself, to chats; for a model that has been trained, and "
            "on a CPU with steps as short as those of `semsched serve`"
        ),
    )
    add(
        "--place",
        choices=workload.PLACES,
        default=load.place,
        help="where the message stands: alone, before a question or between two (%(default)s)",
    )
    add(
        "--prompts",
        default=load.prompts,
        metavar="NAME|FILE",
        help=(
            "prompts of chats with a history, as long as those of a GPU's users are: "
            f"{', '.join(PROMPTS)} (1,500, 200, 6,000 tokens in the median; answers of 250), "
            f"{TRACE} (of the data folder) or the file of a trace"
        ),
    )
    add(
        "--tenants",
        default="",
        metavar="WEIGHTS",
        help=(
            "requests come from tenants with these weights, for example 4:1:1, of which semantic "
            "schedulers are told; --detail prints the fairness among them"
        ),
    )
    add(
        "--long-prompts",
        type=float,
        default=load.long_prompts,
        metavar="SHARE",
        help=(
            "share of the requests of levels 1 to 4 with a context of about 1,000 tokens "
            "(%(default)s)"
        ),
    )
    add(
        "--rounds",
        type=int,
        default=1,
        help=(
            "run every scheduler this many times, in reversed order every second time, and "
            "compare the best rounds (%(default)s)"
        ),
    )
    add(
        "--repeats",
        type=int,
        default=2,
        help=(
            "run a round again, up to this many times, if the hypervisor took more than 3 %% of "
            "the CPU time away (%(default)s)"
        ),
    )


def add_server_arguments(parser: argparse.ArgumentParser, needs_model: bool = True) -> None:
    """Declare the model, the output folder and the options of `make_server`."""
    shape = ServerConfig(Path(), Path())
    add = parser.add_argument
    add("--model", required=needs_model, type=Path, help="model folder (see `bench make-model`)")
    add("--output", required=True, type=Path, help="folder for results, pictures and logs")
    add("--seats", type=int, default=shape.seats, help="max_num_seqs (%(default)s)")
    add("--blocks", type=int, default=shape.num_blocks, help="KV blocks; 0: vLLM's choice")
    add("--block-size", type=int, default=shape.block_size, help="tokens per block (%(default)s)")
    add("--stream-interval", type=int, default=shape.stream_interval, help="tokens per message")
    add_nice_argument(parser)
    add("--server-args", default="", help="more arguments of vllm serve, one quoted string")
    add("--quiet", action="store_true", help="no progress")


def add_nice_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the servers' process priority, `--nice`."""
    parser.add_argument(
        "--nice",
        type=int,
        default=0,
        help=(
            "process priority of servers and client; a value below 0 makes other programs disturb "
            "the figures less and needs root"
        ),
    )


def make_server(args: argparse.Namespace) -> ServerConfig:
    """The server that the options describe, under vLLM's own scheduler."""
    return ServerConfig(
        model=args.model,
        log=args.output / "server.log",
        seats=args.seats,
        num_blocks=args.blocks or None,
        block_size=args.block_size,
        stream_interval=args.stream_interval,
        nice=args.nice,
        extra_args=tuple(shlex.split(args.server_args)),
    )


def make_plan(
    args: argparse.Namespace, schedulers: Sequence[SchedulerSpec], mixes: Sequence[str]
) -> RunPlan:
    """The plan that the options describe; ValueError if one has an impossible value."""
    from vllm_semantic_sched.lab.bench.compare import RunPlan

    for mix in mixes:
        workload.parse_mix(mix)
    load = workload.WorkloadConfig(
        requests=args.requests,
        gap=args.gap or 0.0,
        max_burst=args.maxcon,
        seed=args.seed,
        max_output_tokens=args.max_output,
        long_prompts=args.long_prompts,
        natural=args.natural_ends,
        place=args.place,
        tenants=workload.parse_tenants(args.tenants),
        prompts=args.prompts,
    )
    if load.natural and schedulers[0].kind == "semantic-known":
        raise ValueError(
            "--natural-ends: semantic-known is told the lengths of the first scheduler's answers, "
            "so another one must come first"
        )
    _check_model(args.model, load)
    server = make_server(args)
    if load.natural and not has_gpu():
        given = ("--max-num-seqs", str(server.seats), *server.extra_args)
        more = short_steps(given, len(os.sched_getaffinity(0)))
        server = replace(server, extra_args=(*server.extra_args, *more))
    return RunPlan(
        server=server,
        schedulers=schedulers,
        workloads=[workload.make_workload(replace(load, mix=mix)) for mix in mixes],
        output=args.output,
        overload=None if args.gap else args.overload,
        rounds=args.rounds,
        repeats=args.repeats,
    )


def _check_model(model: Path, load: workload.WorkloadConfig) -> None:
    """Raise ValueError if the model has no end token or cannot hold the load's longest requests."""
    from vllm_semantic_sched.lab.bench.schedulers import end_token

    end_token(model)
    longest = json.loads((model / "config.json").read_text()).get("max_position_embeddings")
    context = CONTEXT_TOKENS if load.long_prompts else 0
    needed = max(MAX_PROMPT_TOKENS + context, longest_prompt(load.prompts))
    needed += load.max_output_tokens
    if longest is not None and longest < needed:
        raise ValueError(
            f"the model holds {longest} tokens, prompt and answer may need {needed}: make one with "
            "`bench make-model --size small`, or choose a shorter --max-output"
        )


def print_problems(console: Console, problems: Sequence[str]) -> int:
    """Print why a command fails; returns its exit status, 0 without a problem."""
    for problem in problems:
        console.print(f"[red]{problem}[/]", soft_wrap=True)
    return int(bool(problems))


def print_summary(console: Console, mix: str, rows: Rows, label: str = "") -> None:
    """Print one row per scheduler, and what the rows show in words; `label`: what it must say."""
    from vllm_semantic_sched.lab.bench import page

    first = next(iter(rows.values()))
    table = make_table(
        f"mix {mix}: {len(first.workload.requests)} requests at {first.overload:.2g} times what "
        "the engine can serve",
        "scheduler", "level 0:\np99 TTFT, s", "level 0: time per\ntoken / idle engine",
        "all levels:\nms per token", "output\ntokens/s",
    )  # fmt: skip
    for row in rows.values():
        waiting = page.fixed(1e3 * row.levels["all"]["normalized_waiting"].mean)
        table.add_row(
            row.scheduler.title,
            page.fixed(row.p99_ttft()),
            page.fixed(row.best.idle_ratio),
            waiting,
            f"{row.best.tokens_per_second:.0f}",
        )
    table.caption = "time per token: from arrival to the last token, waiting included"
    console.print(label)
    console.print(table)
    console.print(page.gain_in_words(rows), soft_wrap=True)


def print_mix(console: Console, mix: str, rows: Rows) -> None:
    """Print all tables of a mix so that they fit a terminal of 100 columns."""
    from vllm_semantic_sched.lab.bench import page

    console.print()
    for content in (*page.mix_tables(mix, rows), *page.misread_tables(mix, rows)):
        words = len(content.columns) if content.columns[-1] == "text" else 1
        table = make_table(content.title, *content.columns, words=words)
        table.columns[0].max_width = 16
        table.padding = (0, 0, 0, 1)
        table.pad_edge = False
        for column in table.columns[1:]:
            column.no_wrap = True
            column.max_width = 76
        for row in content.rows:
            table.add_row(*(Text(str(cell)) for cell in row))
        table.caption = content.note
        console.print(table if content.rows else content.title)
