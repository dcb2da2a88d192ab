"""The HTML page and the picture of a comparison."""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_semantic_sched.lab.bench.client import Record
from vllm_semantic_sched.lab.bench.device_use import LABEL
from vllm_semantic_sched.lab.bench.metrics import (
    Summary,
    fairness,
    finish_order_violations,
    mean_waiting,
)
from vllm_semantic_sched.lab.bench.results import Comparison, MixResult, Round, Rows, environment
from vllm_semantic_sched.lab.bench.schedulers import client_id
from vllm_semantic_sched.lab.bench.server import API_SERVER, PREDICTOR
from vllm_semantic_sched.lab.bench.usage import PREEMPTIONS
from vllm_semantic_sched.lab.report.content import (
    SAME,
    Chart,
    Line,
    Page,
    Table,
    beside,
    grouped_values,
    groups_text,
    level_title,
    names_text,
    short_text,
)
from vllm_semantic_sched.lab.report.gantt import gantt_chart
from vllm_semantic_sched.operate.event_log import LogReader
from vllm_semantic_sched.policy.record.spans import Span

_COLORS = {
    "fcfs": "#8c8c8c",
    "priority": "#d98032",
    "semantic": "#2f7ebc",
    "semantic-true": "#1b9e77",
    "semantic-known": "#9467bd",
}
_VARIANT_COLORS = ("#8c564b", "#bcbd22", "#17becf", "#e377c2")
_PANELS = {
    "mean normalized waiting time [ms/token]": ("normalized_waiting", "mean", 1e3),
    "p99 time to first token [s]": ("ttft", "p99", 1.0),
}
"""By title: a metric, its statistic that is drawn as bars, and a factor on seconds."""

_BUSY = 0.2  # share of the machine's CPU time that other programs may use
_SHOWN_URGENT = 3  # messages of level 0
_SHOWN_OTHERS = 1  # messages of each other level
_MESSAGE_LENGTH = 90  # characters
_ANSWER_LENGTH = 70  # characters
_FIGURES = "Description"  # text chunk of the picture
_LEGEND = (
    "Of the best round; p99 is over all that count. norm. wait. = (finish - arrival) / output "
    "tokens, ms per token; / idle = that over the idle engine's for the same requests, same round; "
    "slowdown = E2E / E2E on an idle engine (fitted); gain = FCFS / this row."
)


def comparison_page(comparison: Comparison, folder: Path) -> Page:
    """What the run shows in a sentence; per mix some messages, who held the seats when (by the
    event logs in `folder`), charts and tables."""
    parts: list[Table | Chart] = []
    sentences = []
    for mix, rows in comparison.mixes.items():
        parts += [*_seats(mix, rows, folder), *_bars(mix, rows), _main_table(mix, rows)]
        messages = messages_table(mix, rows)
        if messages is not None:
            parts.append(messages)
        parts += [*misread_tables(mix, rows), *mix_tables(mix, rows)]
        gain = gain_in_words(rows)
        if gain and len(comparison.mixes) > 1:
            gain = f"Mix {mix}: {gain}"
        if gain:
            sentences.append(gain)
    where = f" ({comparison.label})" if comparison.label else ""
    sentences.append(f"The same requests were sent to each scheduler on a real vLLM server{where}.")
    # The parsed command line holds the function that runs the command.
    options = {key: value for key, value in comparison.options.items() if not callable(value)}
    titles = (row.scheduler.title for rows in comparison.mixes.values() for row in rows.values())
    title = f"semsched bench run: {names_text(titles)}{where}"
    return Page(title, "\n".join(sentences), parts, options, environment())


def gain_in_words(rows: Rows) -> str:
    """The gain of the most urgent requests over vLLM's FCFS, and what all pay; may be empty. On a
    machine that was busy with something else: that the figures say little."""
    # The scheduler to speak of: the one that reads texts, else one that is told the urgency.
    own = [row for row in rows.values() if row.scheduler.is_ours]
    row = min(own, key=lambda row: not row.scheduler.reads_text, default=None)
    reference = rows.get("fcfs")
    if reference is None or row is None:
        return ""
    elsewhere = max(done.usage.elsewhere for each in (reference, row) for done in each.rounds)
    if elsewhere > _BUSY:
        return (
            f"Other programs used up to {elsewhere:.0%} of the machine, so these times say little "
            "about the schedulers: run it again on a quiet one."
        )
    before = reference.p99_ttft()
    after = row.p99_ttft()
    ours = mean_waiting(row.records)
    theirs = mean_waiting(reference.records)
    source = "read from the text" if row.scheduler.reads_text else "given as a hint"
    paid = "about" if abs(ours / theirs - 1) < SAME else f"{ours / theirs:.2f} times"
    return (
        f"With the urgency {source}, the most urgent requests had their first token after "
        f"{short_text(after)} s (p99) where vLLM's FCFS took {short_text(before)} s: "
        f"{_compared(before / after)}. All requests together took {paid} as long per token as "
        "under FCFS."
    )


def messages_table(mix: str, rows: Rows) -> Table | None:
    """Return some messages of each level: what was read in them, when their answers began under
    each scheduler, and the first words of the answers. None without a scheduler that reads."""
    reader = next((row for row in rows.values() if row.scheduler.reads_text), None)
    if reader is None:
        return None
    requests = reader.workload.requests
    read = reader.records
    shown = _shown(read)
    return Table(
        f"Mix {mix}: some messages, and when their answers began",
        [
            "message",
            "true level",
            "level read",
            *(f"{row.scheduler.title}, s" for row in rows.values()),
            "the answer began",
        ],
        [
            [
                _cut(requests[index].text, _MESSAGE_LENGTH),
                requests[index].level,
                read[index].read_level,
                *(row.records[index].ttft for row in rows.values()),
                _cut(read[index].answer, _ANSWER_LENGTH),
            ]
            for index in shown
        ],
        note=f"{len(shown)} of {len(read)} requests, by true level (0: most urgent). "
        "The schedulers' columns have the seconds from arrival to the first token. A dash: the "
        "level was not read, because the answer began before.",
    )


def _shown(records: Sequence[Record]) -> list[int]:
    """Indexes of a few answered requests of each level, evenly spread over the run."""
    chosen = []
    for level in sorted({record.level for record in records}):
        of_level = [record.index for record in records if record.ok and record.level == level]
        most = _SHOWN_OTHERS if level else _SHOWN_URGENT
        count = min(len(of_level), most)
        for part in range(count):
            middle = (2 * part + 1) * len(of_level) // (2 * count)
            chosen.append(of_level[middle])
    return chosen


def _compared(factor: float) -> str:
    if not math.isfinite(factor):
        return "not to be compared"
    if abs(factor - 1) < SAME:
        return "about as soon"
    if factor > 1:
        return f"{short_text(factor)} times sooner"
    return f"{short_text(1 / factor)} times later"


def _cut(text: str, length: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 3] + "..."


def _bars(mix: str, rows: Rows) -> Iterator[Chart]:
    """Of `_PANELS`, by level and scheduler, from p50 to p99, with the idle engine as a line."""
    first = next(iter(rows.values()))
    levels = list(first.levels)
    colors = _colors(rows)
    for title, (metric, statistic, scale) in _PANELS.items():
        series = {
            row.scheduler.title: _heights(row.levels, levels, metric, statistic, scale)
            for row in rows.values()
        }
        [idle] = _heights(first.idle_levels, ["0"], metric, statistic, scale)
        lines = []
        if not math.isnan(idle):
            ends = (-0.5, len(levels) - 0.5)
            lines = [Line("idle engine, level 0", ends, (idle, idle), "#c03030", dashed=True)]
        ranges = {}
        for row in rows.values():
            low, high = (_heights(row.levels, levels, metric, end, scale) for end in ("p50", "p99"))
            ranges[row.scheduler.title] = list(zip(low, high, strict=True))
        groups = list(map(level_title, levels))
        reference = rows["fcfs"].scheduler.title if "fcfs" in rows else None
        yield grouped_values(
            f"Mix {mix}: {title}",
            title,
            groups,
            series,
            colors,
            ranges,
            lines,
            sentence=groups_text(groups, series, reference),
            note="Thin lines: from the median to p99.",
        )


def _colors(rows: Rows) -> dict[str, str]:
    """By title of the scheduler."""
    colors = {}
    for place, row in enumerate(rows.values()):
        variant_color = _VARIANT_COLORS[place % len(_VARIANT_COLORS)]
        colors[row.scheduler.title] = _COLORS.get(row.scheduler.name, variant_color)
    return colors


def _heights(
    by_level: Mapping[str, Mapping[str, Summary]],
    levels: Iterable[str],
    metric: str,
    statistic: str,
    scale: float,
) -> list[float]:
    """NaN where there is none."""
    return [
        scale * getattr(by_level[level][metric], statistic) if level in by_level else math.nan
        for level in levels
    ]


def _main_table(mix: str, rows: Rows) -> Table:
    """A row per level and scheduler."""
    base = rows["fcfs"].levels if "fcfs" in rows else {}
    cells: list[dict[str, str | float | None]] = []
    for level in next(iter(rows.values())).levels:
        for row in rows.values():
            if level not in row.levels:
                continue
            values = row.levels[level]
            gain = math.nan
            if level in base:
                gain = base[level]["ttft"].p99 / values["ttft"].p99
            cells.append(
                {
                    "level": level,
                    "scheduler": row.scheduler.title,
                    "requests": values["ttft"].count,
                    "TTFT, mean (s)": values["ttft"].mean,
                    "TTFT, p50 (s)": values["ttft"].p50,
                    "TTFT, p99 (s)": values["ttft"].p99,
                    "FCFS's p99 / this": gain,
                    "latency, mean (s)": values["e2e"].mean,
                    "normalized waiting (ms/token)": 1e3 * values["normalized_waiting"].mean,
                }
            )
    return Table.of(f"Mix {mix}: by level", cells, note="Of the best round; p99: of all calm ones.")


def mix_tables(mix: str, rows: Rows) -> Iterator[Table]:
    """Rounds, totals, the order of finishing, and a table per level."""
    first = next(iter(rows.values()))
    yield _rounds(mix, rows)
    yield _totals(mix, rows)
    yield from _devices(mix, rows)
    yield _orders(mix, rows)
    for level in first.levels:
        yield _level(mix, level, rows)


def misread_tables(mix: str, rows: Rows) -> Iterator[Table]:
    """Per scheduler that reads texts, the requests of level 0 that it took for less urgent."""
    for row in rows.values():
        if row.scheduler.reads_text:
            # A request is in every round: the last one counts.
            read_as = {record.index: record.read_level for record in row.misread}
            title = f"{row.scheduler.title}: {len(read_as)} of level 0 read as less urgent"
            cells = [
                [index, level, row.workload.requests[index].text]
                for index, level in read_as.items()
            ]
            yield Table(f"Mix {mix}, {title}", ["request", "read as", "text"], cells)


def _orders(mix: str, rows: Rows) -> Table:
    tenants = next(iter(rows.values())).workload.config.tenants
    cells = []
    for row in rows.values():
        share = finish_order_violations(row.records)
        line = {
            "scheduler": row.scheduler.title,
            "there when a less urgent one finished": f"{100 * share:.0f} %",
        }
        if tenants:
            line["Jain's index"] = fixed(fairness(row.records))
        cells.append(line)
    return Table.of(f"Mix {mix}: finish order (eq. 2)", cells, folded=True)


def _level(mix: str, level: str, rows: Rows) -> Table:
    first = next(iter(rows.values()))
    urgent = level == "0"
    title = level_title(level)
    if urgent:
        title += " (most urgent)"
    counts = first.levels[level]["ttft"]
    title += f", {counts.count} requests"
    if counts.tail_count != counts.count:
        title += f" (p99: {counts.tail_count})"
    columns = ["scheduler", "TTFT, s\nmean p50 p99", "TPOT\nms", "E2E\ns", "norm. wait.\nmean p99"]
    if urgent:
        columns.append("/ idle")
    columns += ["slow-\ndown", "norm.w.\ngain", "p99 TTFT\ngain"]
    base = rows["fcfs"].levels.get(level) if "fcfs" in rows else None
    lines = []
    if urgent and "0" in first.idle_levels:
        lines.append(["idle engine", *_cells(first.idle_levels["0"], base, idle_ratio="-")])
    for row in rows.values():
        cells = ["-"] * (len(columns) - 1)
        if level in row.levels:
            idle_ratio = fixed(row.best.idle_ratio) if urgent else None
            cells = _cells(row.levels[level], base, idle_ratio)
        lines.append([row.scheduler.title, *cells])
    note = _LEGEND if level == "all" else ""
    return Table(f"Mix {mix}: {title}", columns, lines, note, folded=True)


def _cells(
    summaries: Mapping[str, Summary],
    base: Mapping[str, Summary] | None,  # FCFS, if it ran
    idle_ratio: str | None,  # None: no such column
) -> list[str]:
    ttft = summaries["ttft"]
    waiting = summaries["normalized_waiting"]
    cells = [
        f"{fixed(ttft.mean)} {fixed(ttft.p50)} {fixed(ttft.p99)}",
        fixed(1e3 * summaries["tpot"].mean),
        fixed(summaries["e2e"].mean),
        f"{fixed(1e3 * waiting.mean)} {fixed(1e3 * waiting.p99)}",
    ]
    if idle_ratio is not None:
        cells.append(idle_ratio)
    cells.append(fixed(summaries["slowdown"].mean))
    if base is None:
        return [*cells, "-", "-"]
    waiting_gain = base["normalized_waiting"].mean / waiting.mean
    ttft_gain = base["ttft"].p99 / ttft.p99
    return [*cells, f"{waiting_gain:.2f}x", f"{ttft_gain:.2f}x"]


def _totals(mix: str, rows: Rows) -> Table:
    """What each scheduler served, at what cost, and the outputs that differ."""
    first = next(iter(rows.values()))
    reference = rows.get("fcfs")
    cells = []
    for row in rows.values():
        speed = row.best.tokens_per_second
        differ = "-"
        if row is not first or len(row.rounds) > 1:
            differ = f"{len(row.counted_differences)}"
            ties = len(row.differences) - len(row.counted_differences)
            if ties:
                differ += f" (+{ties})"
        cells.append(
            {
                "scheduler": row.scheduler.title,
                "answered": f"{row.requests - len(row.failed)}/{row.requests}",
                "output\ntok/s": f"{speed:.0f}",
                "vs FCFS": f"{speed / reference.best.tokens_per_second:.3f}" if reference else "-",
                "CPU s /\n1k tok": fixed(row.best.engine_seconds_per_1000),
                "steps /\n1k tok": fixed(row.best.steps_per_1000),
                "over-\nload": f"{row.overload:.3g}x",
                "preemp-\ntions": f"{row.best.usage.counters.get(PREEMPTIONS, 0):.0f}",
                "outputs\ndiffer": differ,
                "latest\nsend, s": f"{row.latest_send:.2f}",
            }
        )
    return Table.of(
        f"Mix {mix}: totals",
        cells,
        folded=True,
        note="outputs differ: (+n) more at a near tie of the two best tokens; "
        f"answer lengths: {first.workload.length_source}",
    )


def _devices(mix: str, rows: Rows) -> Iterator[Table]:
    """What emulated devices did, and the host for them."""
    cells = []
    for row in rows.values():
        use = row.best.device
        if use is None:
            return
        cells.append(
            {
                "scheduler": row.scheduler.title,
                "tok/s\nbusy": f"{use.tokens:.0f}",
                "idle\n%": f"{100 * use.idle:.1f}",
                "host p50\nms": fixed(1e3 * use.host_p50),
                "host p99\nms": fixed(1e3 * use.host_p99),
                "engine core\nCPU s / 1k tok": fixed(row.best.engine_seconds_per_1000),
                "API server\nCPU ms / req.": fixed(row.best.milliseconds_per_request(API_SERVER)),
                "predictor\nCPU ms / req.": fixed(row.best.milliseconds_per_request(PREDICTOR)),
            }
        )
    yield Table.of(
        f"Mix {mix}: device and host ({LABEL})",
        cells,
        note="until the last arrival; CPU times: of the whole load. idle: around steps at least "
        "half as large as the largest. host: from a step's output to the next submission: update, "
        "arrivals, schedule(). Engine core: with the emulated worker",
    )


def _rounds(mix: str, rows: Rows) -> Table:
    """Every round, what disturbed it and what it is used for."""
    return Table.of(
        f"Mix {mix}: rounds",
        [
            {
                "scheduler": row.scheduler.title,
                "round": done.name,
                "steal\n%": f"{100 * done.usage.steal:.1f}",
                "idle\nsteal": f"{100 * done.idle_usage.steal:.1f}",
                "other\nuse": f"{100 * done.usage.elsewhere:.0f}",
                "output\ntok/s": f"{done.tokens_per_second:.0f}",
                "CPU s /\n1k tok": fixed(done.engine_seconds_per_1000),
                "waits\nurg.0": fixed(1e3 * mean_waiting(done.records, [0])),
                "waits\nall": fixed(1e3 * mean_waiting(done.records)),
                "idle": fixed(1e3 * mean_waiting(done.idle, [0])),
                "used for": _use(done, row),
            }
            for row in rows.values()
            for done in row.rounds
        ],
        folded=True,
        note="best: every figure but p99, which is over the rounds marked so; noisy: over 3 % "
        "steal; other use: % of the CPU time; CPU s: of EngineCore; waits: normalized waiting, ms "
        "per token; idle: level 0 when alone",
    )


def _use(done: Round, row: MixResult) -> str:
    counted = any(done is counted_round for counted_round in row.counted)
    marks = (("best", done is row.best), ("p99", counted), ("noisy", not done.calm))
    return " ".join(mark for mark, applies in marks if applies) or "-"


def fixed(value: float) -> str:
    """About three digits and five characters, so that columns line up; "-" if undefined."""
    if math.isnan(value):
        return "-"
    for limit, digits in ((10, 3), (100, 2), (1000, 1)):
        if value < limit:
            return f"{value:.{digits}f}"
    return f"{value:.0f}"


def _seats(mix: str, rows: Rows, folder: Path) -> Iterator[Chart]:
    """Of the schedulers that read texts, by their event logs, beside vLLM's FCFS."""
    charts = []
    for row in rows.values():
        log = row.scheduler.events_file(folder, row.best.name)
        prefix = row.scheduler.request_id(mix, 0).removesuffix("0")
        if row.scheduler.reads_text and log.is_file():
            title = f"Mix {mix}, {row.scheduler.title}: seats in the best round"
            charts.append(gantt_chart(title, _spans(log, prefix), len(row.records)))
    reference = rows.get("fcfs")
    if reference is not None and charts:
        title = f"Mix {mix}, {reference.scheduler.title}: seats in the best round"
        chart = gantt_chart(title, _stock_spans(reference.records), len(reference.records))
        note = f"{chart.note} vLLM has no event log: as the client saw it, less vLLM's queue time."
        charts.insert(0, replace(chart, note=note))
    yield from beside(charts)


def _stock_spans(records: Iterable[Record]) -> list[Span]:
    """From the end of vLLM's queue time, or the first token if it was not told, to the last one."""
    spans = []
    for record in records:
        if record.sent is None or record.first_token is None or record.finish is None:
            continue
        start = record.first_token
        if record.engine_queue_seconds is not None:
            start = min(start, record.sent + record.engine_queue_seconds)
        spans.append(
            Span(record.index, record.level, record.arrival, start, record.finish, "finish")
        )
    spans.sort(key=lambda span: span.arrival)
    return spans


def _spans(log: Path, prefix: str) -> list[Span]:
    """Times in seats of the requests whose ids begin so, in seconds since the first arrival."""
    # The log also has the requests of the warm-up and of the idle engine, without such an id.
    requests = [
        request
        for request in LogReader(limit=sys.maxsize).requests(log)
        if client_id(request.request).startswith(prefix) and request.spans
    ]
    requests.sort(key=lambda request: request.arrival)
    start = requests[0].arrival if requests else 0.0
    return [
        replace(
            span,
            request=client_id(request.request).partition(".")[2],
            arrival=span.arrival - start,
            start=span.start - start,
            end=span.end - start,
        )
        for request in requests
        for span in request.spans
    ]


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """Write a PNG of how long the requests of level 0 waited: a panel for each mix, in it a row
    of dots for each scheduler, on a linear axis from 0. Their p99s are in the file, too: see
    `figures_of_picture`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    mixes = comparison.mixes
    most = max(map(len, mixes.values()))
    figure, axes = pyplot.subplots(
        1, len(mixes), figsize=(6.6 * len(mixes), 1.3 + 0.62 * most), squeeze=False, sharey=True
    )
    for axis, (mix, rows) in zip(axes[0], mixes.items(), strict=True):
        _draw_waits(axis, mix, rows)
    caption = "Each dot is an urgent request of a counted round. Further left is better."
    figure.text(0.01, 0.02, caption, fontsize=9, color="#555555")
    figure.text(0.6, 0.02, comparison.label, fontsize=9, color="#c03030")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figures = {mix: _p99s(rows) for mix, rows in mixes.items()}
    figure.savefig(path, dpi=150, metadata={_FIGURES: json.dumps(figures)})
    pyplot.close(figure)


def _draw_waits(axis: Any, mix: str, rows: Rows) -> None:
    colors = _colors(rows)
    for place, row in enumerate(rows.values()):
        waits = sorted(row.urgent_waits())
        if not waits:
            continue
        # Spread, so that equal waits do not hide each other.
        heights = [place + 0.3 * ((5 * rank) % 8 / 7 - 0.5) for rank in range(len(waits))]
        color = colors[row.scheduler.title]
        axis.scatter(waits, heights, s=26, color=color, alpha=0.75, linewidths=0)
        axis.annotate(
            f"p99 {row.p99_ttft():.3g} s",
            (waits[-1], place),
            xytext=(9, 0),
            textcoords="offset points",
            verticalalignment="center",
            fontsize=10,
            color=color,
        )
    axis.set_title(f"Mix {mix}: seconds until the first token of urgent requests", fontsize=11)
    axis.set_yticks(range(len(rows)), [row.scheduler.title for row in rows.values()])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    longest = max((wait for row in rows.values() for wait in row.urgent_waits()), default=1.0)
    axis.set_xlim(0, 1.25 * longest)  # room for the label beside the longest
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)


def _p99s(rows: Rows) -> dict[str, str]:
    """p99 time to first token of level 0 by scheduler, as printed, in seconds."""
    return {name: f"{row.p99_ttft():.3g}" for name, row in rows.items()}


def figures_of_picture(path: Path) -> dict[str, dict[str, str]]:
    """p99 time to first token of level 0 in seconds, as printed, by mix and scheduler, of a
    picture that `draw_comparison` wrote. KeyError if it has none."""
    from PIL import Image

    with Image.open(path) as picture:
        figures: dict[str, dict[str, str]] = json.loads(picture.info[_FIGURES])
    return figures
