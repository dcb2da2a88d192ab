"""What a comparison shows, in a sentence and a handful of its messages."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vllm_semantic_sched.lab.bench.client import Record
from vllm_semantic_sched.lab.bench.rounds import Rows
from vllm_semantic_sched.lab.report.content import Table

_SAME = 0.05  # ratios closer to 1 than this are called "about as"
_URGENT_SHOWN = 3
_OTHERS_SHOWN = 1  # of each less urgent level
_MESSAGE_LENGTH = 90
_ANSWER_LENGTH = 70


def gain_in_words(rows: Rows) -> str:
    """Return what the most urgent requests gain or lose against vLLM's FCFS, and what all requests
    together pay; empty without both schedulers."""
    # The scheduler to speak of: the one that reads texts, else one that is told the urgency.
    own = [row for row in rows.values() if row.scheduler.is_ours]
    row = min(own, key=lambda row: not row.scheduler.reads_text, default=None)
    reference = rows.get("fcfs")
    if reference is None or row is None:
        return ""
    before, after = reference.p99_ttft(), row.p99_ttft()
    ours, theirs = (one.levels["all"]["normalized_waiting"].mean for one in (row, reference))
    source = "read from the text" if row.scheduler.reads_text else "given as a hint"
    paid = "about" if abs(ours / theirs - 1) < _SAME else f"{ours / theirs:.2f} times"
    return (
        f"With the urgency {source}, the most urgent requests had their first token after "
        f"{_short(after)} s (p99) where vLLM's FCFS took {_short(before)} s: "
        f"{_compared(before / after)}. All requests together took {paid} as long per token as "
        "under FCFS."
    )


def messages_table(mix: str, rows: Rows) -> Table | None:
    """Return some messages of each level: what was read in them, when their answers began under
    each scheduler, and the first words of the answers. None without a scheduler that reads."""
    reader = next((row for row in rows.values() if row.scheduler.reads_text), None)
    if reader is None:
        return None
    records = {name: {record.index: record for record in row.records} for name, row in rows.items()}
    read = records[reader.scheduler.name]
    requests, shown = reader.workload.requests, _shown(reader.records)
    return Table(
        f"Mix {mix}: some messages, and when their answers began",
        [
            *("message", "true level", "level read"),
            *(f"{row.scheduler.title}, s" for row in rows.values()),
            "the answer began",
        ],
        [
            [
                _cut(requests[index].text, _MESSAGE_LENGTH),
                requests[index].level,
                read[index].read_level,
                *(of[index].ttft if index in of else None for of in records.values()),
                _cut(read[index].answer, _ANSWER_LENGTH),
            ]
            for index in shown
        ],
        note=f"{len(shown)} of {len(reader.records)} requests, by true level (0: most urgent). "
        "The schedulers' columns have the seconds from arrival to the first token. A dash: the "
        "level was not read, because the answer began before.",
    )


def _shown(records: Sequence[Record]) -> list[int]:
    """Indexes of a few answered requests of each level, evenly spread over the run."""
    chosen = []
    for level in sorted({record.level for record in records}):
        of_level = [record.index for record in records if record.ok and record.level == level]
        count = min(len(of_level), _OTHERS_SHOWN if level else _URGENT_SHOWN)
        chosen += [of_level[(2 * n + 1) * len(of_level) // (2 * count)] for n in range(count)]
    return chosen


def _compared(factor: float) -> str:
    if not math.isfinite(factor):
        return "not to be compared"
    if abs(factor - 1) < _SAME:
        return "about as soon"
    return f"{_short(max(factor, 1 / factor))} times {'sooner' if factor > 1 else 'later'}"


def _short(value: float) -> str:
    """Two digits or all whole ones, never with an exponent."""
    return f"{value:.2g}" if value < 9.95 else f"{value:.0f}"


def _cut(text: str, length: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 3] + "..."
