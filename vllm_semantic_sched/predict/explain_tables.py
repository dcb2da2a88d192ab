"""Shows an explanation of `semsched explain` as tables."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_semantic_sched.predict.explain import Explanation

_WORDS_SHOWN = 12
_BAR = 24  # characters for a probability of 1


def show(console: Console, explanation: Explanation) -> None:
    """Print an explanation as tables."""
    console.print(
        f"[bold]urgency level {explanation.level}[/] (0 is the most urgent), "
        f"about {explanation.remaining_seconds:.3g} s of engine time"
    )
    for note in explanation.notes:
        console.print(f"[yellow]{note}[/]")
    console.print(f"\nprobability and expected cost of each level, rule {explanation.rule}")
    console.print(_level_table(explanation))
    if explanation.lengths:
        estimates = (f"{name} {tokens:.0f}" for name, tokens in explanation.tokens.items())
        console.print(f"output length in tokens: {', '.join(estimates)}")
        console.print(_length_table(explanation))
    if explanation.words:
        console.print(_words_title(explanation))
        console.print(_word_table(explanation))


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE)
    for column in columns:
        table.add_column(column, justify="left" if column in ("", "word") else "right")
    return table


def _level_table(explanation: Explanation) -> Table:
    table = _table("level", "probability", "expected cost", "")
    rows = zip(explanation.probabilities, explanation.costs, strict=True)
    for level, (probability, cost) in enumerate(rows):
        chosen = level == explanation.level
        table.add_row(
            f"> {level}" if chosen else str(level),
            f"{probability:.3f}",
            f"{cost:.2f}",
            _bar(probability),
            style="bold" if chosen else None,
        )
    return table


def _length_table(explanation: Explanation) -> Table:
    table = _table("tokens", "probability", "")
    for share in explanation.lengths:
        end = "more" if share.longest is None else str(share.longest)
        table.add_row(
            f"{share.shortest} - {end}", f"{share.probability:.3f}", _bar(share.probability)
        )
    return table


def _words_title(explanation: Explanation) -> str:
    title = f"words that speak for (+) and against (-) level {explanation.level}"
    if explanation.occluded == explanation.word_count:
        return title
    half = explanation.occluded // 2
    return f"{title}, of the first and last {half} of {explanation.word_count}"


def _word_table(explanation: Explanation) -> Table:
    table = _table("word", "log-odds", "probability", "")
    heaviest = abs(explanation.words[0].log_odds) or 1.0
    for one in explanation.words[:_WORDS_SHOWN]:
        table.add_row(
            Text(one.word),  # as Text: a word in brackets is no markup
            f"{one.log_odds:+.2f}",
            f"{one.probability:+.3f}",
            _bar(abs(one.log_odds) / heaviest),
        )
    return table


def _bar(share: float) -> str:
    return "█" * round(share * _BAR)
