"""Show the scheduler's decision about a text, and the words that decided it.

Prints the probability of each urgency level, the policy's cost of serving at each level, the
decided level, the expected output length and the engine time that follows from it. A word's weight
is how much the log-odds of the decided level fall when the word is left out. The text is read as
given, without a chat template, and lengths are those that the predictor was trained with: a server
calibrates them on its own answers.
"""

import argparse
import dataclasses
import gc
import json

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_semantic_sched.cli.arguments import failing, positive
from vllm_semantic_sched.cli.console import make_console
from vllm_semantic_sched.engine.startup.settings import DEFAULT_POLICY
from vllm_semantic_sched.lab.report.tables import make_table
from vllm_semantic_sched.operate.explain import Explanation, InstantPart, explain
from vllm_semantic_sched.policy.config import load_policy
from vllm_semantic_sched.policy.profile.formula import load_profile

_WORDS_SHOWN = 12
_LEAST_SHOWN = 0.05  # of probability that a word changes
_BAR = 24  # characters for a probability of 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the text, the policy and the predictor that reads it."""
    add = parser.add_argument
    add("text", help="a prompt")
    add("--policy", default=DEFAULT_POLICY, help="name or path (default: %(default)s)")
    add("--predictor", metavar="NAME|DIR", help="folder or hub id (default: the policy's)")
    add("--max-tokens", type=positive, metavar="N", help="the request's own limit (default: none)")
    add("--json", action="store_true", help="print JSON instead of tables")


@failing(FileNotFoundError, ImportError, ValueError)
def run(args: argparse.Namespace) -> None:
    """Explain and print; 1 if policy or predictor cannot be used."""
    # Nothing here lives long, and collecting garbage takes a tenth of the time of the imports.
    gc.disable()
    try:
        policy = load_policy(args.policy)
        profile = load_profile(policy.profile)
        from vllm_semantic_sched.predict.instant import InstantReader
        from vllm_semantic_sched.predict.model import TextPredictor

        model = args.predictor or policy.predictor.model
        predictor = TextPredictor.load(model)
        instant = InstantReader.load(model)
        # Bytes of the command line that are not UTF-8 arrive as characters that cannot be printed.
        text = args.text.encode("utf-8", "replace").decode("utf-8")
        explanation = explain(text, predictor, policy, profile, args.max_tokens, instant)
    finally:
        gc.enable()
    if args.json:
        print(json.dumps(dataclasses.asdict(explanation), indent=2, ensure_ascii=False))
    else:
        _show(make_console(), explanation, profile.source)


def _show(console: Console, explanation: Explanation, engine: str) -> None:
    console.print(
        f"[bold]urgency level {explanation.level}{_named(explanation)}[/] (0 is the most urgent), "
        f"about {explanation.remaining_seconds:.3g} s of engine time"
    )
    console.print(f"engine profile: {engine}", markup=False)
    for note in explanation.notes:
        console.print(f"[yellow]{note}[/]")
    if explanation.shortened:
        console.print("\nread of the text, which is long:")
        console.print(explanation.read, markup=False)
    console.print(f"\nprobability and expected cost of each level; {explanation.rule}")
    levels = _table("level", "served as", "probability", "expected cost")
    costs = zip(explanation.probabilities, explanation.costs, strict=True)
    for level, (share, cost) in enumerate(costs):
        # Several levels of the model may share the policy's last one.
        decided = explanation.served[level] == explanation.tier
        levels.add_row(
            f"> {level}" if decided else f"{level}",
            explanation.served[level],
            f"{share:.3f}",
            f"{cost:.2f}",
            _bar(share),
            style="bold" if decided else None,
        )
    console.print(levels)
    if explanation.lengths:
        estimates = (f"{name} {tokens:.0f}" for name, tokens in explanation.tokens.items())
        console.print(f"output length in tokens: {', '.join(estimates)}")
        lengths = _table("tokens", "probability")
        for bucket in explanation.lengths:
            longest = "more" if bucket.longest is None else bucket.longest
            span = f"{bucket.shortest} - {longest}"
            lengths.add_row(span, f"{bucket.probability:.3f}", _bar(bucket.probability))
        console.print(lengths)
    if explanation.words:
        _show_words(console, explanation)
    if explanation.instant is not None:
        _show_instant(console, explanation.instant)


def _named(explanation: Explanation) -> str:
    """The name of the level's tier, if it has one."""
    return "" if explanation.tier == str(explanation.level) else f", {explanation.tier}"


def _show_words(console: Console, explanation: Explanation) -> None:
    last = len(explanation.probabilities) - 1
    levels = f"level {explanation.weighed}"
    if 0 < explanation.weighed < last:
        levels = f"levels 0 to {explanation.weighed}"
    title = f"words that speak for (+) and against (-) {levels}"
    if explanation.occluded != explanation.word_count:
        half = explanation.occluded // 2
        title += f", of the first and last {half} of {explanation.word_count}"
    shown = [word for word in explanation.words if abs(word.probability) >= _LEAST_SHOWN]
    if not shown:
        console.print(f"{title}: none alone changes its probability by {_LEAST_SHOWN}")
        return
    console.print(title)
    table = _table("word", "log-odds", "probability", words=1)
    for weight in shown[:_WORDS_SHOWN]:
        table.add_row(
            Text(weight.word),  # a word in brackets is not markup
            f"{weight.log_odds:+.2f}",
            f"{weight.probability:+.3f}",
            _bar(abs(weight.probability)),
        )
    console.print(table)


def _show_instant(console: Console, part: InstantPart) -> None:
    rights = "it may not preempt"
    if part.preempts_as is not None:
        rights = f"it may preempt as a request of level {part.preempts_as}"
    shares = ", ".join(f"{share:.3f}" for share in part.probabilities)
    console.print(
        f"\ninstant reader: provisional level {part.level}, about {part.tokens:.0f} tokens; "
        f"until the predictor has read it, {rights}"
    )
    console.print(f"probabilities of the levels: {shares}")
    pieces = ", ".join(f"{name!r} {weight:+.2f}" for name, weight in part.pieces)
    console.print(f"strongest pieces: {pieces}", markup=False)


def _table(*columns: str, words: int = 0) -> Table:
    """A table of these columns and one for bars."""
    table = make_table("", *columns, words=words)
    table.add_column("")
    return table


def _bar(share: float) -> str:
    return "█" * round(share * _BAR)
