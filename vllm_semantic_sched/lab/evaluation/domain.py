"""Domains: YAML files that say what the urgency levels mean, with labels and sentences of each.

The shipped model knows the domain `emergency`; a classifier for other levels has to be trained.
"""

import difflib
import re
from collections.abc import Collection
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from vllm_semantic_sched.policy.config.files import read_config
from vllm_semantic_sched.policy.config.section import Section, parse_section
from vllm_semantic_sched.predict import URGENCY_LEVELS

WORD = re.compile(r"\{([^{}]*)\}")
"""A placeholder in a sentence, such as `{host}`."""


class Level(Section):
    """What one urgency level means."""

    name: str = Field(min_length=1, description="A word or two for reports.")
    meaning: str = Field(min_length=1, description="What belongs here, as one would tell people.")


class Domain(Section):
    """A whole domain file. Level 0 is the most urgent; the last one takes all that asks for no
    help."""

    # At most five: the urgency head has no more outputs.
    levels: tuple[Level, ...] = Field(
        min_length=2, max_length=5, description="The levels, most urgent first."
    )
    labels: dict[str, int] = Field(
        min_length=1, description="What labels of CSV files stand for: a level's number each."
    )
    examples: dict[int, tuple[str, ...]] = Field(
        {}, description="Sentences of each level; `[a|b]` stands for any one alternative."
    )
    words: dict[str, tuple[str, ...]] = Field(
        {}, description="What `{name}` in a sentence stands for: any one of these."
    )
    wordings: Literal["emergency"] | None = Field(
        None, description="Sentences of the package to use, in place of `examples`."
    )

    @field_validator("labels")
    @classmethod
    def _labels_unambiguous(cls, labels: dict[str, int]) -> dict[str, int]:
        seen: dict[str, tuple[str, int]] = {}
        for label, level in labels.items():
            first, first_level = seen.setdefault(_plain(label), (label, level))
            if first_level != level:
                raise ValueError(
                    f"labels: {first!r} and {label!r} are read alike but stand for levels "
                    f"{first_level} and {level}"
                )
        return labels

    @model_validator(mode="after")
    def _levels_exist(self) -> "Domain":
        count = len(self.levels)
        for label, level in self.labels.items():
            if not 0 <= level < count:
                raise ValueError(f"labels.{label}: {level} is not a level; valid: 0 to {count - 1}")
        if self.examples and self.wordings:
            raise ValueError("wordings: cannot stand beside examples; keep one of them")
        if self.wordings and count != URGENCY_LEVELS:
            raise ValueError(
                f"wordings: {self.wordings!r} has {URGENCY_LEVELS} levels, this domain {count}"
            )
        for name, choices in self.words.items():
            if not choices:
                raise ValueError(f"words.{name}: needs at least one word")
        if self.examples:
            self._check_examples()
        return self

    def _check_examples(self) -> None:
        count = len(self.levels)
        for level in sorted({*self.examples, *range(count)}):
            if not 0 <= level < count:
                raise ValueError(f"examples.{level}: not a level; valid: 0 to {count - 1}")
            if not self.examples.get(level):
                raise ValueError(f"examples.{level}: needs at least one sentence")
            try:
                for sentence in self.examples[level]:
                    check_template(sentence, self.words)
            except ValueError as error:
                raise ValueError(f"examples.{level}: {error}") from error

    @cached_property
    def _label_of_plain(self) -> dict[str, str]:
        """Of two labels that are read alike the first one."""
        return {_plain(label): label for label in reversed(self.labels)}

    def level_of(self, label: str) -> int:
        """The level that `label` stands for; case, spaces, hyphens and underscores do not matter.
        ValueError with the labels of each level for any other label."""
        names = self._label_of_plain
        plain = _plain(label)
        if plain in names:
            return self.labels[names[plain]]
        by_level: dict[int, list[str]] = {}
        for name, level in self.labels.items():
            by_level.setdefault(level, []).append(name)
        valid = "; ".join(f"{level} = {', '.join(by_level[level])}" for level in sorted(by_level))
        near = difflib.get_close_matches(plain, names, n=1)
        hint = f"did you mean {names[near[0]]!r}? " if near else ""
        raise ValueError(f"label {label!r}: unknown; {hint}valid labels: {valid}")


def load_domain(name_or_path: str | Path) -> Domain:
    """Read a domain by the name of a shipped one (`emergency`, `incident`) or by path; PolicyError
    if the file is missing, is not YAML, or is invalid."""
    data, source = read_config(name_or_path, kind="domain")
    if data is None:  # an empty file
        data = {}
    return parse_section(Domain, data, source)


def check_template(sentence: str, words: Collection[str]) -> None:
    """Check a sentence with alternatives in brackets and words in braces: ValueError if the
    brackets do not match, or `words` lacks a `{word}`."""
    depths = [*accumulate({"[": 1, "]": -1}.get(letter, 0) for letter in sentence)]
    if depths and (min(depths) < 0 or depths[-1]):
        raise ValueError(f"brackets do not match in {sentence!r}")
    for name in WORD.findall(sentence):
        if name not in words:
            valid = ", ".join(words) or "none, there is no `words`"
            raise ValueError(f"unknown word {{{name}}} in {sentence!r}; valid: {valid}")


def _plain(label: str) -> str:
    return re.sub(r"[\s_-]+", "", label.casefold())
