"""The pages of evaluation reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_semantic_sched.lab.evaluation.measure import Evaluation
from vllm_semantic_sched.lab.evaluation.report import (
    claim_table,
    disagreement_table,
    group_table,
    length_tables,
    level_tables,
    rule_text,
    summary_tables,
)
from vllm_semantic_sched.lab.report.content import (
    SERIES_COLORS,
    Boxes,
    Chart,
    Line,
    Page,
    Points,
    Table,
    python_and_versions,
)

_MOST_POINTS = 3000


def evaluation_page(evaluation: Evaluation) -> Page:
    """The report of one test set."""
    report = evaluation.report
    parts: list[Table | Chart] = []
    if report["n_level"]:
        parts += level_tables(report)
        parts += [_confusion_chart(report["confusion"]), _reliability_chart(report["reliability"])]
    parts += [group_table(name, groups) for name, groups in report["groups"].items()]
    if report["claims"]:
        parts.append(claim_table(report["claims"]))
    if report["n_length"]:
        parts += length_tables(report)
    if evaluation.lengths:
        parts.append(_length_chart(evaluation.lengths))
    if report["disagreements"]:
        parts.append(disagreement_table(report["disagreements"]))
    sentence = f"{report['description']} Model: {report['model']}. Texts: {report['n']}."
    if report["n_level"]:
        sentence += f" Level decided by {rule_text(report)}."
    return Page(
        f"Predictor on {report['source']}",
        sentence,
        parts,
        {key: report[key] for key in ("source", "model", "decision")},
        python_and_versions("torch", "transformers"),
    )


def summary_page(reports: Mapping[str, Mapping[str, Any]]) -> Page:
    """Several reports, each of which has its own page in the folder of its name."""
    first = next(iter(reports.values()))
    descriptions = Table(
        "Texts", ["texts", "description"], [[n, one["description"]] for n, one in reports.items()]
    )
    return Page(
        "Predictor",
        f"Model: {first['model']}. Sets of texts: {len(reports)}.",
        [*summary_tables(reports), descriptions],
        {key: first[key] for key in ("model", "decision")},
        python_and_versions("torch", "transformers"),
    )


def _confusion_chart(confusion: Sequence[Sequence[int]]) -> Chart:
    """Decided over true levels; darker boxes have a larger share of the true level's texts."""
    boxes, colors = [], []
    for row, counts in enumerate(confusion):
        for column, count in enumerate(counts):
            share = count / max(1, sum(counts))
            texts = f"{count} texts, {share:.0%} of the true level"
            label = f"true level {row}, decided {column}: {texts}"
            boxes.append((column - 0.5, column + 0.5, row - 0.5, row + 0.5, label))
            colors.append(_blue(share))
    levels = {float(level): str(level) for level in range(len(confusion))}
    return Chart(
        "Confusion of levels",
        "decided urgency level",
        "true urgency level",
        [Boxes("share of the true level", boxes, colors)],
        x_ticks=levels,
        y_ticks=levels,
        downwards=True,
    )


def _blue(share: float) -> str:
    """From nearly white at 0 to dark blue at 1."""
    pale, dark = (247, 251, 255), (8, 48, 107)
    mixed = (round(a + share * (b - a)) for a, b in zip(pale, dark, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _reliability_chart(reliability: Sequence[Mapping[str, Any]]) -> Chart:
    """How often the most likely level is right against its probability."""
    bins = [part for part in reliability if part["n"]]
    total = sum(part["n"] for part in bins)
    boxes = []
    for part in bins:
        label = f"{part['n']} texts, {part['accuracy']:.1%} right"
        boxes.append((part["low"], part["high"], 0.0, part["n"] / total, label))
    confidence = [part["confidence"] for part in bins]
    accuracy = [part["accuracy"] for part in bins]
    return Chart(
        "Reliability of the probabilities",
        "probability of the most likely level",
        "share that is right",
        [
            Boxes("share of texts", boxes, "#d3d3d3"),
            Line("calibrated", (0, 1), (0, 1), "#808080", dashed=True),
            Line("predictor", confidence, accuracy, SERIES_COLORS[0]),
        ],
    )


def _length_chart(lengths: Sequence[tuple[float, float]]) -> Chart:
    """Predicted against true output lengths in tokens, at most `_MOST_POINTS` texts."""
    shown = lengths[:_MOST_POINTS]
    ends = min(map(min, shown)), max(map(max, shown))
    points = [(a, b, f"true {a:.0f}, predicted {b:.0f}") for a, b in shown]
    texts = Points("text", points, SERIES_COLORS[0])
    return Chart(
        "Output lengths",
        "true output tokens",
        "predicted output tokens",
        [texts, Line("equal", ends, ends, "#808080", dashed=True)],
        note=f"The first {len(shown)} of {len(lengths)} texts."
        if len(shown) < len(lengths)
        else "",
        log_x=True,
        log_y=True,
    )
