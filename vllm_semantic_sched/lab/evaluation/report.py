"""The tables of evaluation reports."""

from collections.abc import Iterator, Mapping
from typing import Any

from vllm_semantic_sched.lab.evaluation.measure import RULES
from vllm_semantic_sched.lab.report.content import Table

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


def rule_text(report: Mapping[str, Any]) -> str:
    """The rule that decides the level, with its parameters."""
    decision = report["decision"]
    if decision["rule"] == "most_likely":
        return "most_likely"
    if decision["rule"] == "thresholds":
        return f"thresholds ({', '.join(f'{one:g}' for one in decision['thresholds'])})"
    prices = ", ".join(f"{price:g}" for price in decision["missed_cost"])
    return f"{decision['rule']} (missed_cost {prices})"


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


def group_table(name: str, groups: Mapping[str, Mapping[str, Any]]) -> Table:
    """Figures per group of texts, such as their kinds or languages."""
    columns = {
        "accuracy": "accuracy",
        "kappa": "kappa",
        "recall_within_one": "within one level",
        "recall_of_0": "level 0 decided at 0",
        "missed_of_0": "at 4",
        "urgent_recall": "levels 0, 1 decided at 0, 1",
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


def _cells(figures: Mapping[str, Any], columns: Mapping[str, str]) -> list[str]:
    return [
        _figure(figures[key], 0 if key == "mean_absolute_error_tokens" else 3) for key in columns
    ]


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
