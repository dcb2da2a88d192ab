"""Tables of policy keys and metrics for docs/operations.md, made from the code."""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

from vllm_semantic_sched.engine.metric_table import COUNTERS, GAUGES, HISTOGRAMS
from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.keys import Key, keys_of
from vllm_semantic_sched.policy.live import restart_reason
from vllm_semantic_sched.policy.overload.refusal import Code
from vllm_semantic_sched.policy.section import Section

_KEYS_HEAD = (
    "| key | default | live | what it does | code | seen in |",
    "|---|---|---|---|---|---|",
)
_METRICS_HEAD = ("| metric | labels | meaning |", "|---|---|---|")


class Effect(NamedTuple):
    """Where operators see the effect of a policy key.

    Attributes:
        codes: of refusals that the key causes.
        metrics: names without the prefix `semsched:`.
    """

    codes: tuple[Code, ...]
    metrics: tuple[str, ...]


@functools.cache
def _effects() -> dict[str, Effect]:
    text = Path(__file__).with_name("effects.yaml").read_text(encoding="utf-8")
    return {
        key: Effect(tuple(map(Code, entry.get("codes", ()))), tuple(entry["metrics"]))
        for key, entry in yaml.safe_load(text).items()
    }


def effect_of(key: str) -> Effect:
    """The effect of a key, or of the smallest group it is in that effects.yaml lists.

    Raises:
        KeyError: effects.yaml lists neither.
    """
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        group = ".".join(parts[:end])
        for name in (group, group.removesuffix("[]")):
            if name in _effects():
                return _effects()[name]
    raise KeyError(key)


def describe_keys(model: type[Section] = Policy) -> str:
    """All keys of a kind of file as text: name, default, valid values and meaning."""
    lines = []
    for key in keys_of(model):
        valid = f"   ({key.valid})" if key.valid else ""
        lines.append(f"{key.name}: {key.default}{valid}".rstrip())
        lines += textwrap.wrap(key.meaning, 96, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines) + "\n"


def insert(path: Path) -> None:
    """Update the tables of a page: the text from `<!-- keys -->` and `<!-- metrics -->` to the
    next `<!-- end -->`."""
    text = path.read_text("utf-8")
    for name, table in (("keys", keys_table()), ("metrics", metrics_table())):
        begin = f"<!-- {name} -->\n"
        before, rest = text.split(begin)
        text = before + begin + table + "<!-- end -->" + rest.split("<!-- end -->", 1)[1]
    path.write_text(text, "utf-8")


def metrics_table() -> str:
    """A Markdown table of the metrics that this package adds to the server's /metrics."""
    lines = [*_METRICS_HEAD]
    for table, ending in ((COUNTERS, "_total"), (GAUGES, ""), (HISTOGRAMS, "")):
        for name, metric in sorted(table.items()):
            kind = " (histogram)" if metric.buckets else ""
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            lines.append(f"| `semsched:{name}{ending}`{kind} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"


def keys_table() -> str:
    """A Markdown table of the keys at the top of a policy file, and one per section."""
    groups: dict[str, list[str]] = {"": []}
    for key in keys_of(Policy):
        group, *inner = re.split(r"[.\[]", key.name)
        groups.setdefault(group if inner else "", []).append(" | ".join(_cells(key)))
    lines: list[str] = []
    for group, rows in groups.items():
        lines += ["", f"### `{group}`" if group else "### At the top", "", *_KEYS_HEAD, *rows]
    return "\n".join(lines).strip() + "\n"


def _cells(key: Key) -> Iterator[str]:
    effect = effect_of(key.name)
    valid = f" One of {key.valid}." if key.valid else ""
    yield f"| `{key.name}`"
    yield f"{key.default}"
    yield "yes" if restart_reason(key.name) is None else "restart"
    yield " ".join(f"{key.meaning}{valid}".split()).replace("|", "\\|")
    yield ", ".join(f"`{code.value}`" for code in effect.codes)
    yield ", ".join(f"`{name}`" for name in effect.metrics) + " |"
