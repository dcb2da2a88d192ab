"""Evaluation reports as pages of tables and charts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from vllm_semantic_sched.lab.report.content import (
    SERIES_COLORS,
    Boxes,
    Chart,
    Line,
    Page,
    Table,
    python_and_versions,
)
from vllm_semantic_sched.policy.facts.decision import bounds_in_words

_MODEL = "predictor"
_LEVEL_COLUMNS = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced",
    "quadratic_weighted_kappa": "kappa",
    "auc": "AUC",
    "urgent_recall": "urgent recall",
    "urgent_precision": "urgent precision",
    "ece": "ECE",
    "expected_cost": "cost",
}
_LENGTH_COLUMNS = {
    "kendall_tau": "Kendall tau",
    "decile_accuracy": "decile accuracy",
    "mean_absolute_error_tokens": "mean error (tokens)",
}
_GROUP_COLUMNS = {
    "accuracy": "accuracy",
    "kappa": "kappa",
    "recall_within_one": "within one level",
    "recall_of_0": "level 0 decided at 0",
    "found_of_0": "at 0, 1",
    "missed_of_0": "at 4",
    "urgent_recall": "levels 0, 1 decided at 0, 1",
    "false_alarms": "levels 3, 4 decided at 0, 1",
}
_CLAIM_COLUMNS = {
    "calm_read_urgent": "level 4 read as 0 or 1",
    "urgent_read_calm": "level 0 read as 3 or 4",
}
_LEVEL_LEGEND = (
    "Balanced: mean recall of the levels. Kappa: agreement beyond chance with quadratic weights. "
    "AUC, urgent recall, urgent precision: levels 0 and 1 against the rest. ECE: expected "
    "calibration error of the most likely level. Cost: mean cost of the decided level, 1 per level "
    "too early and more per level too late, at the default prices. All rows decide by the rule "
    "named above, but for the instant reader, which has its own."
)
_LENGTH_LEGEND = (
    "Decile accuracy: share of texts in the same tenth of the true lengths as of the predicted "
    "ones (0.1 by chance)."
)

_CALIBRATED = 0.02  # difference of probability and share that is right

Figures = Mapping[str, Any]


def evaluation_page(report: Figures) -> Page:
    """A report of `evaluate_predictor`: tables of levels, groups, claims and lengths, as far as
    it has them."""
    parts: list[Table | Chart] = []
    if report["n_level"]:
        parts += _level_tables(report)
        parts.append(_reliability_chart(report["reliability"]))
    for name, groups in report["groups"].items():
        rows = [
            [group, str(figures["n"]), *_cells(figures, _GROUP_COLUMNS, 2)]
            for group, figures in groups.items()
        ]
        parts.append(Table(f"By {name}", [name, "n", *_GROUP_COLUMNS.values()], rows))
    if report["claims"]:
        rows = [
            [f"`{claim}`", *_cells(figures, _CLAIM_COLUMNS, 2)]
            for claim, figures in report["claims"].items()
        ]
        parts.append(Table("Claims about urgency", ["the prompt", *_CLAIM_COLUMNS.values()], rows))
    if report["n_length"]:
        parts.append(_length_table(report))
    sentence = f"{report['description']} Model: {report['model']}. Texts: {report['n']}."
    if report["n_level"]:
        sentence += f" Level decided by {_rule_text(report['decision'])}."
    return Page(
        f"Predictor on {report['source']}: semsched evaluate",
        sentence,
        parts,
        {key: report[key] for key in ("source", "model", "decision")},
        python_and_versions("torch", "transformers"),
    )


def summary_page(reports: Mapping[str, Figures]) -> Page:
    """Several reports, each of which has its own page in the folder of its name."""
    first = next(iter(reports.values()))
    descriptions = Table(
        "Texts",
        ["texts", "description"],
        [[name, report["description"]] for name, report in reports.items()],
    )
    return Page(
        "Predictor",
        f"Model: {first['model']}. Sets of texts: {len(reports)}.",
        [*_summary_tables(reports), descriptions],
        {key: first[key] for key in ("model", "decision")},
        python_and_versions("torch", "transformers"),
    )


def _rule_text(decision: Figures) -> str:
    if decision["bounds"]:
        return f"bounds ({bounds_in_words(decision['bounds'])})"
    prices = ", ".join(f"{price:g}" for price in decision["missed_cost"])
    return f"expected cost (missed_cost {prices})"


def _summary_tables(reports: Mapping[str, Figures]) -> Iterator[Table]:
    """A table per label, with the predictor and the baselines on all texts that have it."""
    for title, count, columns, legend in (
        ("Urgency levels", "n_level", _LEVEL_COLUMNS, _LEVEL_LEGEND),
        ("Output lengths", "n_length", _LENGTH_COLUMNS, _LENGTH_LEGEND),
    ):
        rows = [
            [name, label, str(figures[count]), *_cells(figures, columns)]
            for name, report in reports.items()
            if report[count]
            for label, figures in _with_baselines(report, count)
        ]
        if rows:
            yield Table(title, ["texts", "", "n", *columns.values()], rows, note=legend)


def _with_baselines(report: Figures, count: str) -> list[tuple[str, Figures]]:
    """The figures of the predictor and of the baselines that predict the label."""
    known = [(name, figures) for name, figures in report["baselines"].items() if figures[count]]
    return [(_MODEL, report), *known]


def _level_tables(report: Figures) -> Iterator[Table]:
    """Figures of the predictor and the baselines, recall, precision and confusion matrix."""
    named = _with_baselines(report, "n_level")
    rows = [[name, *_cells(figures, _LEVEL_COLUMNS)] for name, figures in named]
    title = f"Urgency levels (n = {report['n_level']})"
    yield Table(title, ["", *_LEVEL_COLUMNS.values()], rows, note=_LEVEL_LEGEND)
    levels = range(len(report["confusion"]))
    for figure in ("recall", "precision"):
        rows = [[name, *_cells(figures[figure], levels, 2)] for name, figures in named]
        header = [f"{figure} of", *(f"level {level}" for level in levels)]
        yield Table(figure.capitalize(), header, rows)
    rows = [[str(level), *map(str, report["confusion"][level])] for level in levels]
    yield Table("Confusion matrix", ["true level", *(f"as {level}" for level in levels)], rows)


def _length_table(report: Figures) -> Table:
    """Figures of the predictor and the baselines."""
    title = f"Output lengths (n = {report['n_length']})"
    legend = _LENGTH_LEGEND
    if report["per_model"]:
        legend += " Means over the models that answered."
    named = _with_baselines(report, "n_length")
    rows = [[name, *_cells(figures, _LENGTH_COLUMNS)] for name, figures in named]
    return Table(title, ["", *_LENGTH_COLUMNS.values()], rows, note=legend)


def _cells(figures: Any, columns: Iterable[Any], digits: int = 3) -> list[str]:
    cells = []
    for key in columns:
        value = figures[key]
        if value is None:
            cells.append("-")
        elif key == "mean_absolute_error_tokens":
            cells.append(f"{value:.0f}")
        else:
            cells.append(f"{value:.{digits}f}")
    return cells


def _reliability_chart(reliability: Sequence[Figures]) -> Chart:
    """How often the most likely level is right against its probability."""
    bins = [part for part in reliability if part["n"]]
    total = sum(part["n"] for part in bins)
    boxes = []
    for part in bins:
        label = f"{part['n']} texts, {part['accuracy']:.1%} right"
        boxes.append((part["low"], part["high"], 0.0, part["n"] / total, label))
    confidence = [part["confidence"] for part in bins]
    accuracy = [part["accuracy"] for part in bins]
    claimed = sum(part["n"] * part["confidence"] for part in bins) / total
    right = sum(part["n"] * part["accuracy"] for part in bins) / total
    if abs(claimed - right) < _CALIBRATED:
        verdict = "well calibrated on average"
    else:
        verdict = "too sure" if claimed > right else "not sure enough"
    sentence = (
        f"The most likely level had a probability of {claimed:.2f} on average, and was right in "
        f"{right:.2f} of the texts: {verdict}. Points below the dashed line are too sure."
    )
    return Chart(
        "Reliability of the probabilities",
        "probability of the most likely level",
        "share that is right",
        [
            Boxes("share of texts", boxes, "#d3d3d3"),
            Line("calibrated", (0, 1), (0, 1), "#808080", dashed=True),
            Line("predictor", confidence, accuracy, SERIES_COLORS[0]),
        ],
        sentence,
    )
