"""The evaluation report as Markdown, and the confusion matrix as a picture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def markdown(report: Mapping[str, Any]) -> str:
    """The report for a reader: figures per guesser, then the model's confusion matrix."""
    lines = [f"# Predictor on {report['source']}", "", f"Model: {report['model']}", ""]
    if "urgency" in report:
        lines += _urgency_lines(report["urgency"])
    if "length" in report:
        lines += ["| output length | n | Kendall tau |", "|---|---|---|"]
        lines += [
            f"| {name} | {figures['n']} | {figures['kendall_tau']:.3f} |"
            for name, figures in report["length"].items()
        ]
        lines.append("")
    return "\n".join(lines)


def _urgency_lines(urgency: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = [
        "| urgency | n | accuracy | balanced accuracy | weighted kappa | AUC level 0-1 "
        "| recall 0 / 1 / 2 / 3 / 4 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, figures in urgency.items():
        recall = " / ".join(_figure(value, 2) for value in figures["recall"])
        lines.append(
            f"| {name} | {figures['n']} | {figures['accuracy']:.3f} "
            f"| {figures['balanced_accuracy']:.3f} | {figures['quadratic_weighted_kappa']:.3f} "
            f"| {_figure(figures['auc_level_0_or_1'], 3)} | {recall} |"
        )
    confusion = urgency["model"]["confusion"]
    levels = range(len(confusion))
    lines += ["", "| true level | " + " | ".join(f"as {level}" for level in levels) + " |"]
    lines.append("|---" * (len(confusion) + 1) + "|")
    lines += [
        f"| {level} | " + " | ".join(str(count) for count in confusion[level]) + " |"
        for level in levels
    ]
    return [*lines, ""]


def confusion_picture(figures: Mapping[str, Any], path: Path) -> None:
    """Draw the confusion matrix, shaded by the share of each true level, to a PNG.

    Raises ImportError if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'drawing needs matplotlib (pip install "vllm-semantic-sched[train]")'
        ) from error
    confusion = figures["confusion"]
    shares = [[count / max(1, sum(row)) for count in row] for row in confusion]
    picture = Figure(figsize=(5.2, 4.6), layout="constrained")
    axes = picture.subplots()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for row, counts in enumerate(confusion):
        for column, count in enumerate(counts):
            colour = "white" if shares[row][column] > 0.6 else "black"
            axes.text(column, row, str(count), ha="center", va="center", color=colour)
    axes.set_xlabel("predicted urgency level")
    axes.set_ylabel("true urgency level")
    axes.set_title(f"n = {figures['n']}, weighted kappa {figures['quadratic_weighted_kappa']:.2f}")
    picture.savefig(path, dpi=130)


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
