"""The HTML page of a comparison."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vllm_semantic_sched.lab.bench.metrics import METRICS, Summary
from vllm_semantic_sched.lab.bench.plots import IDLE_COLOR, PANELS, scheduler_color
from vllm_semantic_sched.lab.bench.readings import client_id
from vllm_semantic_sched.lab.bench.results import Comparison, environment
from vllm_semantic_sched.lab.bench.rounds import MixResult
from vllm_semantic_sched.lab.bench.targets import Target
from vllm_semantic_sched.lab.bench.usage import PREEMPTIONS
from vllm_semantic_sched.lab.report.content import Chart, Line, Page, Table, grouped_bars
from vllm_semantic_sched.lab.report.gantt import gantt_chart
from vllm_semantic_sched.operate.event_log import LogReader
from vllm_semantic_sched.sim.spans import Span

Rows = Mapping[str, MixResult]
"""Results of one mix by scheduler."""

_STATISTICS = ("mean", "p50", "p99")


def comparison_page(found: Comparison, folder: Path, targets: Sequence[Target] = ()) -> Page:
    """Charts and tables per mix, and the seats of the schedulers that write an event log.

    Args:
        folder: that of the results, with the event logs.
        targets: a table of them is added.
    """
    parts: list[Table | Chart] = []
    for mix, rows in found.mixes.items():
        parts += [*_bars(mix, rows), _levels(mix, rows), _totals(mix, rows), _rounds(mix, rows)]
        parts += _misread(mix, rows)
        parts += _seats(mix, rows, folder)
    if targets:
        parts.append(_targets(targets))
    sentence = "The same requests, sent to each scheduler on a real vLLM server."
    if (step := found.decode_step) is not None:
        sentence += (
            f" A decode step on the idle engine takes {step.alone * 1e3:.1f} ms with one request "
            f"and {step.full * 1e3:.1f} ms with {step.seats}."
        )
    # The parsed command line holds the function that runs the command.
    options = {key: value for key, value in found.options.items() if not callable(value)}
    return Page("Comparison of schedulers", sentence, parts, options, environment())


def _bars(mix: str, rows: Rows) -> Iterator[Chart]:
    levels = list(next(iter(rows.values())).levels)
    colors = {
        row.scheduler.title: scheduler_color(row.scheduler, place)
        for place, row in enumerate(rows.values())
    }
    for key, statistic, title, scale in PANELS:
        series = {
            row.scheduler.title: [
                scale * _statistic(row.levels.get(level, {}), key, statistic) for level in levels
            ]
            for row in rows.values()
        }
        idle = next(iter(rows.values())).idle_levels.get("0")
        height = math.inf if idle is None else scale * _statistic(idle, key, statistic)
        chart = grouped_bars(
            *(f"Mix {mix}: {title}", title, list(map(_level_title, levels)), series, colors),
            lowest=height,
        )
        if idle is not None:
            ends = (-0.5, len(levels) - 0.5)
            line = Line("idle engine, urgency 0", ends, (height, height), IDLE_COLOR, dashed=True)
            chart = replace(chart, marks=[*chart.marks, line])
        yield chart


def _level_title(level: str) -> str:
    return level if level == "all" else f"urgency {level}"


def _statistic(summaries: Mapping[str, Summary], key: str, statistic: str) -> float:
    value: float = getattr(summaries[key], statistic) if key in summaries else math.nan
    return value


def _levels(mix: str, rows: Rows) -> Table:
    first = next(iter(rows.values()))
    named = [("idle engine", first.idle_levels)] if first.idle_levels else []
    named += [(row.scheduler.title, row.levels) for row in rows.values()]
    return Table(
        f"Mix {mix}: metrics per level",
        [
            *("scheduler", "level", "requests"),
            *(f"{one.title} {name}, {one.unit}" for one in METRICS for name in _STATISTICS),
        ],
        [
            [
                title,
                _level_title(level),
                summaries["ttft"].count,
                *(
                    one.scale * _statistic(summaries, one.key, name)
                    for one in METRICS
                    for name in _STATISTICS
                ),
            ]
            for title, levels in named
            for level, summaries in levels.items()
        ],
        note="Of the best round; p99 is over all rounds that count. norm. waiting = (finish - "
        "arrival) / output tokens; slowdown = E2E / E2E on an idle engine.",
    )


def _totals(mix: str, rows: Rows) -> Table:
    return Table(
        f"Mix {mix}: totals",
        [
            *("scheduler", "requests", "answered in full", "output tokens/s"),
            *("CPU s / 1,000 tokens", "steps / 1,000 tokens", "overload", "preemptions"),
            *("norm. waiting / idle, urgency 0", "outputs that differ", "latest send, s"),
        ],
        [
            [
                row.scheduler.title,
                row.requests,
                row.requests - len(row.failed),
                row.tokens_per_second,
                row.best.engine_seconds_per_1000,
                row.best.steps_per_1000,
                row.overload,
                row.counters.get(PREEMPTIONS, 0.0),
                row.best.idle_ratio,
                len(row.counted_differences),
                row.latest_send,
            ]
            for row in rows.values()
        ],
        note=f"Answer lengths: {next(iter(rows.values())).workload.length_source}",
    )


def _rounds(mix: str, rows: Rows) -> Table:
    return Table(
        f"Mix {mix}: rounds",
        [
            *("scheduler", "round", "best", "counts", "steal, %", "steal on the idle engine, %"),
            *("other programs, % CPU", "output tokens/s", "CPU s / 1,000 tokens"),
        ],
        [
            [
                row.scheduler.title,
                done.name,
                "yes" if done is row.best else "no",
                "yes" if any(done is one for one in row.counted) else "no",
                100 * done.usage.steal,
                100 * done.idle_usage.steal,
                100 * done.usage.elsewhere,
                done.tokens_per_second,
                done.engine_seconds_per_1000,
            ]
            for row in rows.values()
            for done in row.rounds
        ],
    )


def _misread(mix: str, rows: Rows) -> Iterator[Table]:
    for row in rows.values():
        texts = {one.index: one.read_level for one in row.misread}
        if texts:
            yield Table(
                f"Mix {mix}, {row.scheduler.title}: urgency 0 read as less urgent",
                ["request", "read as", "text"],
                [[n, level, row.workload.requests[n].text] for n, level in texts.items()],
            )


def _seats(mix: str, rows: Rows, folder: Path) -> Iterator[Chart]:
    for row in rows.values():
        log = row.scheduler.events_file(folder, row.best.name)
        prefix = row.scheduler.request_id(mix, 0).removesuffix("0")
        if row.scheduler.reads_text and log.is_file():
            title = f"Mix {mix}, {row.scheduler.title}: seats in the best round"
            yield gantt_chart(title, _spans(log, prefix), len(row.records))


def _spans(log: Path, prefix: str) -> list[Span]:
    """Times in seats of the requests whose ids begin so, in seconds since the first arrival."""
    # The log also has the requests of the warm-up and of the idle engine, without such an id.
    reader = LogReader(limit=sys.maxsize)
    requests = [
        one
        for one in reader.requests(log)
        if client_id(one.request).startswith(prefix) and one.spans
    ]
    requests.sort(key=lambda one: one.arrival)
    start = requests[0].arrival if requests else 0.0
    return [
        replace(
            span,
            request=client_id(one.request).partition(".")[2],
            arrival=span.arrival - start,
            start=span.start - start,
            end=span.end - start,
        )
        for one in requests
        for span in one.spans
    ]


def _targets(targets: Sequence[Target]) -> Table:
    return Table(
        "Targets",
        ["target", "measured", "required", ""],
        [
            [
                one.text,
                one.measured,
                f"at {'most' if one.at_most else 'least'} {one.required:g}",
                "met" if one.met else "missed",
            ]
            for one in targets
        ],
    )
