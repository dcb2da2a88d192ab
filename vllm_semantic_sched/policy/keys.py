"""Every key of a kind of file, read off its fields."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import NamedTuple

from vllm_semantic_sched.policy.section import Section, section_in


class Key(NamedTuple):
    """One key.

    Attributes:
        name: dotted; entries of a list have `[]`.
        default: as text; empty where the key only groups others.
        valid: the choices, if it is one of few.
    """

    name: str
    default: str
    valid: str
    meaning: str


def keys_of(model: type[Section]) -> Iterator[Key]:
    """The keys of a file, in the order of the fields."""
    required = any(field.is_required() for field in model.model_fields.values())
    yield from _keys(model, "", None if required else model())


def _keys(model: type[Section], prefix: str, defaults: Section | None) -> Iterator[Key]:
    """`defaults`: the section as it is where nothing is said; None in the entries of a list."""
    for name, field in model.model_fields.items():
        annotation = field.annotation
        section = section_in(annotation)
        is_list = typing.get_origin(annotation) is tuple
        if section is None or is_list:
            choices = typing.get_args(annotation)
            literal = typing.get_origin(annotation) is typing.Literal
            valid = " | ".join(map(str, choices)) if literal else ""
            default = "(required)" if field.is_required() else field.default
            default = default if defaults is None else getattr(defaults, name)
            yield Key(f"{prefix}{name}", str(default), valid, field.description or "")
        elif field.description:
            yield Key(f"{prefix}{name}", "", "", field.description)
        if section is not None:
            inner = field.default if defaults is None else getattr(defaults, name)
            yield from _keys(
                section,
                f"{prefix}{name}{'[]' if is_list else ''}.",
                inner if isinstance(inner, Section) else None,
            )
