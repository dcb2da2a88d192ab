"""Tables of comparisons of schedulers on real servers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from vllm_semantic_sched.cli.console import make_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from vllm_semantic_sched.lab.bench.metrics import Summary
    from vllm_semantic_sched.lab.bench.results import DecodeStep
    from vllm_semantic_sched.lab.bench.rounds import MixResult, Round
    from vllm_semantic_sched.lab.bench.targets import Target

_REFERENCE = "fcfs"
_TITLE_WIDTH = 16
_TEXT_WIDTH = 80
_TARGET_WIDTH = 58


def print_summary(console: Console, mix: str, rows: Mapping[str, MixResult]) -> None:
    """Print one row per scheduler, and what the rows show in words."""
    first = next(iter(rows.values()))
    table = make_table(
        f"mix {mix}: {len(first.workload.requests)} requests at {first.overload:.2g} times what "
        "the engine can serve",
        "scheduler", "urgency 0:\np99 TTFT, s", "urgency 0: time per\ntoken / idle engine",
        "all levels:\nms per token", "output\ntokens/s",
    )  # fmt: skip
    for row in rows.values():
        table.add_row(
            row.scheduler.title,
            _number(row.p99_ttft()),
            _number(row.best.idle_ratio),
            _number(1e3 * _mean(row.best.values, "all")),
            f"{row.tokens_per_second:.0f}",
        )
    table.caption = "time per token: from arrival to the last token, waiting included"
    console.print()
    console.print(table)
    console.print(in_words(rows), soft_wrap=True)


def _times(ratio: float) -> str:
    return "about" if abs(ratio - 1) < 0.05 else f"{ratio:.2f} times"


def in_words(rows: Mapping[str, MixResult]) -> str:
    """What the urgent requests gain over vLLM's FCFS, and what all others pay; empty without both
    schedulers."""
    reference = rows.get(_REFERENCE)
    ours = [row for row in rows.values() if row.scheduler.kind.startswith("semantic")]
    ours.sort(key=lambda row: not row.scheduler.reads_text)
    if reference is None or not ours:
        return ""
    row = ours[0]
    before, after = reference.p99_ttft(), row.p99_ttft()
    cost = _mean(row.best.values, "all") / _mean(reference.best.values, "all")
    source = "read from the text" if row.scheduler.reads_text else "given as a hint"
    return (
        f"With the urgency {source}, the most urgent requests had their first token after "
        f"{after:.2g} s (p99) where vLLM's FCFS took {before:.2g} s: {before / after:.2g} times "
        f"sooner. All requests together took {_times(cost)} as long per token as under FCFS."
    )


def print_mix(console: Console, mix: str, rows: Mapping[str, MixResult]) -> None:
    """Print the results of one mix of levels: rounds, totals, a table per urgency level, and what
    was misread."""
    first = next(iter(rows.values()))
    console.print()
    console.rule(f"mix {mix}: {len(first.workload.requests)} requests")
    console.print(f"answer lengths: {first.workload.length_source}")
    console.print(_rounds(rows))
    console.print(_totals(rows))
    for level in first.levels:
        console.print(_level_table(level, rows))
    console.print(
        "norm. waiting = (finish - arrival) / output tokens, ms per token; / idle = norm. waiting "
        "over\nthat of the same requests on the idle engine, same round; slowdown = E2E / E2E on "
        "an idle engine\n(fitted); gain = FCFS / this row."
    )
    _print_misread(console, rows)


def print_decode_step(console: Console, step: DecodeStep | None) -> None:
    """Print how much a step costs more with all seats taken."""
    if step is not None:
        console.print(
            f"decode step on the idle engine: {step.alone * 1e3:.1f} ms with one request, "
            f"{step.full * 1e3:.1f} ms with {step.seats}; "
            f"step({step.seats}) / step(1) = {step.ratio:.2f}"
        )


def print_targets(console: Console, targets: Iterable[Target]) -> None:
    """Print each target with the measured value."""
    table = make_table("targets", "target", "measured", "required", "")
    table.columns[0].max_width = _TARGET_WIDTH
    for target in targets:
        verdict = "[green]met[/]" if target.met else "[red]missed[/]"
        required = f"at {'most' if target.at_most else 'least'} {target.required:g}"
        table.add_row(target.text, f"{target.measured:.3g}", required, verdict)
    console.print(table)


def _rounds(rows: Mapping[str, MixResult]) -> Table:
    table = make_table(
        "rounds", "scheduler", "round", "steal, %\nload, idle", "other\nuse, %", "output\ntok/s",
        "CPU s /\n1k tok", "norm. waiting\nurg. 0, all", "idle", "used for",
    )  # fmt: skip
    _narrow(table)
    for row in rows.values():
        for done in row.rounds:
            table.add_row(
                row.scheduler.title,
                done.name,
                f"{100 * done.usage.steal:.1f} {100 * done.idle_usage.steal:5.1f}",
                f"{100 * done.usage.elsewhere:.0f}",
                f"{done.tokens_per_second:.0f}",
                _number(done.engine_seconds_per_1000),
                f"{_waiting(done, '0')} {_waiting(done, 'all'):>5}",
                _number(1e3 * _mean(done.idle_values, "0")),
                _use(done, row),
            )
    table.caption = (
        "best: every figure but p99, which is over the rounds marked so; noisy: over 3 % steal.\n"
        "other use: CPU time of other programs; CPU s: of EngineCore; idle: urgency 0 when alone"
    )
    return table


def _use(done: Round, row: MixResult) -> str:
    marks = [
        mark
        for mark, applies in (
            ("best", done is row.best),
            ("p99", any(done is one for one in row.counted)),
            ("noisy", not done.calm),
        )
        if applies
    ]
    return " ".join(marks) or "-"


def _totals(rows: Mapping[str, MixResult]) -> Table:
    from vllm_semantic_sched.lab.bench.usage import PREEMPTIONS

    table = make_table(
        "totals", "scheduler", "answered", "output\ntok/s", "vs FCFS", "CPU s /\n1k tok",
        "steps /\n1k tok", "over-\nload", "preemp-\ntions", "outputs\ndiffer", "latest\nsend, s",
    )  # fmt: skip
    _narrow(table)
    first = next(iter(rows.values()))
    reference = rows.get(_REFERENCE)
    for row in rows.values():
        ratio = row.tokens_per_second / reference.tokens_per_second if reference else None
        compared = row is not first or len(row.rounds) > 1
        ties = len(row.differences) - len(row.counted_differences)
        table.add_row(
            row.scheduler.title,
            f"{row.requests - len(row.failed)}/{row.requests}",
            f"{row.tokens_per_second:.0f}",
            "-" if ratio is None else f"{ratio:.3f}",
            _number(row.best.engine_seconds_per_1000),
            _number(row.best.steps_per_1000),
            f"{row.overload:.3g}x",
            f"{row.counters.get(PREEMPTIONS, 0):.0f}",
            f"{len(row.counted_differences)}{f' (+{ties})' if ties else ''}" if compared else "-",
            f"{row.latest_send:.2f}",
        )
    table.caption = "outputs differ: (+n) more at a near tie of the two best tokens"
    return table


def _level_table(level: str, rows: Mapping[str, MixResult]) -> Table:
    title = "all levels" if level == "all" else f"urgency {level}"
    if level == "0":
        title += " (most urgent)"
    first = next(iter(rows.values()))
    counts = first.levels[level]["ttft"]
    title += f", {counts.count} requests"
    if counts.tail_count != counts.count:
        title += f" (p99: {counts.tail_count})"
    urgent = level == "0"
    table = make_table(
        title, "scheduler", "TTFT, s\nmean p50 p99", "TPOT\nms", "E2E\ns",
        "norm. wait.\nmean p99", *(["/ idle"] if urgent else []), "slow-\ndown",
        "norm.w.\ngain", "p99 TTFT\ngain",
    )  # fmt: skip
    _narrow(table)
    reference = rows.get(_REFERENCE)
    base = reference.levels.get(level) if reference else None
    if urgent and "0" in first.idle_levels:
        table.add_row(*_cells("idle engine", first.idle_levels["0"], base, "-", level))
    for row in rows.values():
        summaries = row.levels.get(level)
        if summaries is None:
            table.add_row(row.scheduler.title, *["-"] * (len(table.columns) - 1))
            continue
        ratio = _number(row.best.idle_ratio)
        table.add_row(*_cells(row.scheduler.title, summaries, base, ratio, level))
    return table


def _cells(
    title: str,
    summaries: Mapping[str, Summary],
    base: Mapping[str, Summary] | None,
    ratio: str,
    level: str,
) -> list[str]:
    ttft, waiting = summaries["ttft"], summaries["normalized_waiting"]
    gains = ["-", "-"]
    if base is not None:
        gains = [
            f"{base['normalized_waiting'].mean / waiting.mean:.2f}x",
            f"{base['ttft'].p99 / ttft.p99:.2f}x",
        ]
    return [
        title,
        " ".join(map(_number, (ttft.mean, ttft.p50, ttft.p99))),
        _number(1e3 * summaries["tpot"].mean),
        _number(summaries["e2e"].mean),
        f"{_number(1e3 * waiting.mean)} {_number(1e3 * waiting.p99)}",
        *([ratio] if level == "0" else []),
        _number(summaries["slowdown"].mean),
        *gains,
    ]


def _print_misread(console: Console, rows: Mapping[str, MixResult]) -> None:
    for row in rows.values():
        misread = {record.index: record for record in row.misread}
        if not row.scheduler.reads_text:
            continue
        console.print(f"{row.scheduler.title}: {len(misread)} of urgency 0 read as less urgent")
        for index, record in misread.items():
            text = row.workload.requests[index].text
            shown = text if len(text) <= _TEXT_WIDTH else text[: _TEXT_WIDTH - 3] + "..."
            console.print(f"  read as {record.read_level}: {shown}", markup=False, soft_wrap=True)


def _narrow(table: Table) -> None:
    """Let the titles wrap, so that the table fits a terminal of 100 columns."""
    table.columns[0].max_width = _TITLE_WIDTH
    table.padding = (0, 0, 0, 1)
    table.pad_edge = False
    for column in table.columns[1:]:
        column.no_wrap = True


def _waiting(done: Round, level: str) -> str:
    return _number(1e3 * _mean(done.values, level))


def _mean(values: Mapping[str, Mapping[str, list[float]]], level: str) -> float:
    found = values.get(level, {}).get("normalized_waiting", [])
    return sum(found) / len(found) if found else math.nan


def _number(value: float) -> str:
    """About three digits and five characters, so that columns line up; "-" if undefined."""
    if math.isnan(value):
        return "-"
    for limit, digits in ((10, 3), (100, 2), (1000, 1)):
        if value < limit:
            return f"{value:.{digits}f}"
    return f"{value:.0f}"
