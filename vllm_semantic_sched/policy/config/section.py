"""Typed groups of keys, read from YAML and validated. Each problem is reported in one sentence that
names the field, the value and the valid ones."""

import difflib
import json
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError


class PolicyError(ValueError):
    """A policy or profile is unusable. The message names the field and what is valid."""


class Section(BaseModel):
    """A group of keys, immutable and strict. The string below a key describes it."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )


S = TypeVar("S", bound=Section)


def parse_section(model: type[S], data: Any, source: str) -> S:
    """Validate a mapping against a section type. PolicyError with one line per problem."""
    if not isinstance(data, dict):
        raise PolicyError(f"{source}: expected a mapping of keys, got {data!r}")
    try:
        # Strict JSON mode: "3" is not a number, but a YAML list is a tuple.
        return model.model_validate_json(json.dumps(data, default=str), strict=True)
    except TypeError as error:  # YAML allows any value as a key
        raise PolicyError(f"{source}: keys must be plain words: {error}") from error
    except ValidationError as error:
        problems = [_explain(model, problem) for problem in error.errors()]
        raise PolicyError("\n".join(f"{source}: {text}" for text in problems)) from error


def nearest(name: str, names: Iterable[str]) -> str:
    """The quoted name that is most like a wrong one; empty if none is."""
    return "".join(map(repr, difflib.get_close_matches(name, list(names), n=1)))


def _explain(model: type[Section], problem: Any) -> str:
    location = [str(part) for part in problem["loc"]]
    field = ".".join(location) or "policy"
    if problem["type"] == "extra_forbidden":
        keys = list(_section_at(model, location[:-1]).model_fields)
        near = nearest(location[-1], keys)
        hint = f"did you mean {near}? " if near else ""
        return f"{field}: unknown key; {hint}valid keys: {', '.join(keys)}"
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    message = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{field}: {message}, got {problem['input']!r}"


def _section_at(model: type[Section], location: list[str]) -> type[Section]:
    for part in location:
        if not part.isdigit():  # an index into a list does not change the section
            section = section_in(model.model_fields[part].annotation)
            assert section is not None
            model = section
    return model


def section_in(annotation: Any) -> type[Section] | None:
    """The section type of a field (single, optional or in a list); None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if typing.get_origin(annotation) in (tuple, types.UnionType):
        for argument in typing.get_args(annotation):
            section = section_in(argument)
            if section is not None:
                return section
    return None


class Key(NamedTuple):
    """One key of a file."""

    name: str  # dotted; entries of a list have `[]`
    default: str  # empty for a group of keys
    valid: str  # the choices; empty if there are too many to list
    meaning: str


def keys_of(model: type[Section]) -> Iterator[Key]:
    """The keys of a file, in order."""
    required = any(field.is_required() for field in model.model_fields.values())
    yield from _keys(model, prefix="", defaults=None if required else model())


def _keys(model: type[Section], prefix: str, defaults: Section | None) -> Iterator[Key]:
    """`defaults`: the section with its default values; None for the entries of a list."""
    for name, field in model.model_fields.items():
        annotation = field.annotation
        meaning = " ".join((field.description or "").split())
        section = section_in(annotation)
        is_list = typing.get_origin(annotation) is tuple
        if section is None or is_list:
            choices = typing.get_args(annotation)
            literal = typing.get_origin(annotation) is typing.Literal
            valid = " | ".join(map(str, choices)) if literal else ""
            if defaults is not None:
                default = getattr(defaults, name)
            elif field.is_required():
                default = "(required)"
            else:
                default = field.default
            yield Key(f"{prefix}{name}", str(default), valid, meaning)
        elif meaning:
            yield Key(f"{prefix}{name}", "", "", meaning)
        if section is not None:
            inner = field.default if defaults is None else getattr(defaults, name)
            if not isinstance(inner, Section):
                inner = None
            inner_prefix = f"{prefix}{name}[]." if is_list else f"{prefix}{name}."
            yield from _keys(section, inner_prefix, inner)
