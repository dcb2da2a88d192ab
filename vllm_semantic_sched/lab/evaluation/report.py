"""The evaluation report as Markdown that also reads well in a terminal, and its pictures."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vllm_semantic_sched.lab.evaluation.measure import RULES, Evaluation
from vllm_semantic_sched.lab.report.content import Table

CONFUSION_PICTURE = "confusion.png"
RELIABILITY_PICTURE = "reliability.png"
LENGTH_PICTURE = "lengths.png"

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
_RULES = {
    "least_cost": "lowest expected cost",
    "most_likely": "most likely level",
    "thresholds": "thresholds on the expected level",
}
_LEVEL_LEGEND = (
    "Balanced: mean recall of the levels. Kappa: agreement beyond chance with quadratic weights. "
    "AUC, urgent recall, urgent precision: levels 0 and 1 against the rest. ECE: expected "
    "calibration error of the most likely level. Cost: mean cost of the decided level, 1 per level "
    "too early and more per level too late, at the default prices. All rows decide by the rule "
    "named above, except where a row says otherwise."
)
_LENGTH_LEGEND = (
    "Decile accuracy: share of texts in the same tenth of the true lengths as of the predicted "
    "ones (0.1 by chance)."
)


def write_report(evaluation: Evaluation, folder: Path) -> str:
    """Write report.json, report.md and the pictures to `folder`; returns the Markdown.

    A label that the texts do not have gets no picture, and one of an earlier report goes.
    """
    report = evaluation.report
    folder.mkdir(parents=True, exist_ok=True)
    text = markdown(report)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(text, encoding="utf-8")
    for name in (CONFUSION_PICTURE, RELIABILITY_PICTURE, LENGTH_PICTURE):
        (folder / name).unlink(missing_ok=True)
    if report["n_level"]:
        confusion_picture(report, folder / CONFUSION_PICTURE)
        reliability_picture(report, folder / RELIABILITY_PICTURE)
    if evaluation.lengths:
        length_picture(evaluation.lengths, folder / LENGTH_PICTURE)
    return text


def markdown(report: Mapping[str, Any]) -> str:
    """The report of one test set: a table per label, with the baselines as further rows."""
    lines = [
        f"# Predictor on {report['source']}",
        "",
        report["description"],
        "",
        f"Model: {report['model']}. Texts: {report['n']}."
        + (f" Level decided by {rule_text(report)}." if report["n_level"] else ""),
        "",
    ]
    if report["n_level"]:
        lines += [*_level_lines(report), ""]
    for name, groups in report["groups"].items():
        lines += _section(group_table(name, groups))
    if report["claims"]:
        lines += _section(claim_table(report["claims"]))
    if report["n_length"]:
        lines += [*_length_lines(report), ""]
    if report["disagreements"]:
        lines += [*_disagreement_lines(report["disagreements"]), ""]
    return "\n".join(lines)


def rule_text(report: Mapping[str, Any]) -> str:
    """The rule that decides the level, with its parameters."""
    decision = report["decision"]
    if decision["rule"] == "most_likely":
        return "most_likely"
    if decision["rule"] == "thresholds":
        return f"thresholds ({', '.join(f'{one:g}' for one in decision['thresholds'])})"
    prices = ", ".join(f"{price:g}" for price in decision["missed_cost"])
    return f"{decision['rule']} (missed_cost {prices})"


def summary(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """One page about several reports, each in the folder of its name."""
    lines = [f"# Predictor: {next(iter(reports.values()))['model']}", ""]
    for table in summary_tables(reports):
        rows = [
            [f"[{name}]({name}/report.md)" if label == _MODEL else "", label, *cells]
            for name, label, *cells in table.rows
        ]
        lines += [f"## {table.title}", "", *_table(table.columns, rows, left=2), "", table.note, ""]
    lines += [f"- {name}: {one['description']}" for name, one in reports.items()]
    return "\n".join([*lines, ""])


def summary_tables(reports: Mapping[str, Mapping[str, Any]]) -> Iterator[Table]:
    """A table per label, with the predictor and the baselines on all texts that have it."""
    for title, count, columns, legend in (
        ("Urgency levels", "n_level", _LEVEL_COLUMNS, _LEVEL_LEGEND),
        ("Output lengths", "n_length", _LENGTH_COLUMNS, _LENGTH_LEGEND),
    ):
        rows = [
            [name, label, str(figures[count]), *_cells(figures, columns)]
            for name, report in reports.items()
            if report[count]
            for label, figures in ((_MODEL, report), *report["baselines"].items())
            if figures[count]
        ]
        if rows:
            yield Table(title, ["texts", "", "n", *columns.values()], rows, note=legend)


def level_tables(report: Mapping[str, Any]) -> list[Table]:
    """Figures of the predictor and the baselines, recall, precision and confusion matrix."""
    named = [(_MODEL, report)]
    named += [(f"predictor, {_RULES[rule]}", report[rule]) for rule in RULES if rule in report]
    named += [(name, one) for name, one in report["baselines"].items() if one["n_level"]]
    levels = range(len(report["confusion"]))
    per_level = [f"level {level}" for level in levels]
    tables = [
        Table(
            f"Urgency levels (n = {report['n_level']})",
            ["", *_LEVEL_COLUMNS.values()],
            [[name, *_cells(one, _LEVEL_COLUMNS)] for name, one in named],
            note=_LEVEL_LEGEND,
        )
    ]
    for figure in ("recall", "precision"):
        rows = [[name, *(_figure(share, 2) for share in one[figure])] for name, one in named]
        tables.append(Table(figure.capitalize(), [f"{figure} of", *per_level], rows))
    rows = [[str(level), *map(str, report["confusion"][level])] for level in levels]
    header = ["true level", *(f"as {level}" for level in levels)]
    return [*tables, Table("Confusion matrix", header, rows)]


def _level_lines(report: Mapping[str, Any]) -> list[str]:
    figures, *others = level_tables(report)
    lines = _section(figures)
    for table in others:
        lines += [*_table(table.columns, table.rows), ""]
    lines.append(f"![confusion matrix]({CONFUSION_PICTURE})")
    return [*lines, f"![reliability of the probabilities]({RELIABILITY_PICTURE})"]


def group_table(name: str, groups: Mapping[str, Mapping[str, Any]]) -> Table:
    """Figures per group of texts, such as their kinds or languages."""
    columns = {
        "accuracy": "accuracy",
        "kappa": "kappa",
        "recall_within_one": "within one level",
        "recall_of_0": "level 0 decided at 0",
        "missed_of_0": "at 4",
        "false_alarms": "levels 3, 4 decided at 0, 1",
    }
    rows = [
        [group, str(one["n"]), *(_figure(one[key], 2) for key in columns)]
        for group, one in groups.items()
    ]
    return Table(f"By {name}", [name, "n", *columns.values()], rows)


def claim_table(claims: Mapping[str, Mapping[str, float | None]]) -> Table:
    """How far claims about urgency change the level."""
    rows = [
        [f"`{claim}`", *(_figure(one[key], 2) for key in ("calm_read_urgent", "urgent_read_calm"))]
        for claim, one in claims.items()
    ]
    header = ["the prompt", "level 4 read as 0 or 1", "level 0 read as 3 or 4"]
    return Table("Claims about urgency", header, rows)


def length_tables(report: Mapping[str, Any]) -> list[Table]:
    """Figures of the predictor and the baselines, and those per answering model."""
    named = [(_MODEL, report)]
    named += [(name, one) for name, one in report["baselines"].items() if one["n_length"]]
    title, legend = f"Output lengths (n = {report['n_length']})", _LENGTH_LEGEND
    header = ["", *_LENGTH_COLUMNS.values()]
    rows = [[name, *_cells(one, _LENGTH_COLUMNS)] for name, one in named]
    if not report["per_model"]:
        return [Table(title, header, rows, note=legend)]
    legend += " Means over the models that answered; each of them follows."
    return [
        Table(title, header, rows, note=legend),
        Table(
            "Output lengths per answering model",
            ["Kendall tau, answers of", "n", *(name for name, _ in named)],
            [
                [
                    answerer,
                    str(figures["n_length"]),
                    *(_figure(one["per_model"][answerer]["kendall_tau"], 3) for _, one in named),
                ]
                for answerer, figures in report["per_model"].items()
            ],
        ),
    ]


def _length_lines(report: Mapping[str, Any]) -> list[str]:
    figures, *others = length_tables(report)
    lines = _section(figures)
    for table in others:
        lines += [*_table(table.columns, table.rows), ""]
    return [*lines, f"![true and predicted lengths]({LENGTH_PICTURE})"]


def disagreement_table(found: Mapping[str, Any]) -> Table:
    """The largest differences between the network and the instant reader."""
    rows = [
        [
            one["text"],
            *(
                "-" if one[key] is None else str(one[key])
                for key in ("level", "network", "instant")
            ),
        ]
        for one in found["texts"]
    ]
    return Table(
        "Network and instant reader",
        ["largest differences", "true level", "network", "instant"],
        rows,
        note=f"They decide on different levels for {found['share']:.1%} of the texts.",
    )


def _disagreement_lines(found: Mapping[str, Any]) -> list[str]:
    table = disagreement_table(found)
    lines = [f"## {table.title}", "", table.note]
    return [*lines, "", *_table(table.columns, table.rows)] if table.rows else lines


def _section(table: Table) -> list[str]:
    """A heading, a table and its note, with an empty line at the end."""
    note = [table.note, ""] if table.note else []
    return [f"## {table.title}", "", *_table(table.columns, table.rows), "", *note]


def confusion_picture(figures: Mapping[str, Any], path: Path) -> None:
    """Draw the confusion matrix, shaded by the share of each true level, to a PNG."""
    confusion = figures["confusion"]
    shares = [[count / max(1, sum(row)) for count in row] for row in confusion]
    kappa = _figure(figures["quadratic_weighted_kappa"], 2)
    picture, axes = _canvas(
        f"n = {figures['n_level']}, weighted kappa {kappa}",
        "decided urgency level",
        "true urgency level",
    )
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for row, counts in enumerate(confusion):
        for column, count in enumerate(counts):
            shade = "white" if shares[row][column] > 0.6 else "black"
            axes.text(column, row, str(count), ha="center", va="center", color=shade)
    picture.savefig(path, dpi=130)


def reliability_picture(figures: Mapping[str, Any], path: Path) -> None:
    """Draw how often the most likely level is right against its probability, to a PNG."""
    bins = [part for part in figures["reliability"] if part["n"]]
    total = sum(part["n"] for part in bins)
    picture, axes = _canvas(
        f"expected calibration error {_figure(figures['ece'], 3)}",
        "probability of the most likely level",
        "share that is right",
    )
    axes.plot([0, 1], [0, 1], color="grey", linestyle="--", label="calibrated")
    axes.bar(
        [part["low"] for part in bins],
        [part["n"] / total for part in bins],
        width=[part["high"] - part["low"] for part in bins],
        align="edge",
        color="lightgrey",
        label="share of texts",
    )
    confidence = [part["confidence"] for part in bins]
    axes.plot(confidence, [part["accuracy"] for part in bins], marker="o", label="predictor")
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.legend(loc="upper left")
    picture.savefig(path, dpi=130)


def length_picture(lengths: Sequence[tuple[float, float]], path: Path) -> None:
    """Draw predicted against true output lengths (tokens) on logarithmic axes, to a PNG."""
    true, predicted = zip(*lengths, strict=True)
    ends = [min(true + predicted), max(true + predicted)]
    picture, axes = _canvas(f"n = {len(lengths)}", "true output tokens", "predicted output tokens")
    axes.scatter(true, predicted, s=6, alpha=0.3, linewidths=0)
    axes.plot(ends, ends, color="grey", linestyle="--")
    axes.set(xscale="log", yscale="log")
    picture.savefig(path, dpi=130)


def _canvas(title: str, horizontal: str, vertical: str) -> tuple[Figure, Axes]:
    picture = Figure(figsize=(5.2, 4.6), layout="constrained")
    axes = picture.subplots()
    axes.set(title=title, xlabel=horizontal, ylabel=vertical)
    return picture, axes


def _table(
    header: Sequence[str], rows: Sequence[Sequence[str | float | None]], left: int = 1
) -> list[str]:
    """A Markdown table with aligned columns, the first `left` of them to the left."""
    header, *escaped = [[_markdown_cell(str(cell)) for cell in row] for row in (header, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(header, *escaped, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = [
        "-" * width if place < left else "-" * (width - 1) + ":"
        for place, width in enumerate(widths)
    ]
    return [line(header), line(rule), *map(line, escaped)]


def _markdown_cell(text: str) -> str:
    return f"**{text}**" if text == _MODEL else text.replace("|", "\\|")


def _cells(figures: Mapping[str, Any], columns: Mapping[str, str]) -> list[str]:
    return [
        _figure(figures[key], 0 if key == "mean_absolute_error_tokens" else 3) for key in columns
    ]


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
