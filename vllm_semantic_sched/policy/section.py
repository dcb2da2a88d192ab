"""A typed group of knobs or coefficients, read from YAML.

Unknown keys, wrong types and unknown choices are refused with one sentence per problem that names
the field, the offending value and what is valid.
"""

from __future__ import annotations

import difflib
import json
import types
import typing
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from vllm_semantic_sched.policy.errors import PolicyError


class Section(BaseModel):
    """A group of knobs or coefficients: immutable, and strict about keys and types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


S = TypeVar("S", bound=Section)


def parse_section(model: type[S], data: Any, source: str) -> S:
    """Validate a mapping against a section type.

    Raises:
        PolicyError: with one line per problem, each naming field, value and valid choices.
    """
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


def _explain(model: type[Section], problem: Any) -> str:
    location = [str(part) for part in problem["loc"]]
    field = ".".join(location) or "policy"
    if problem["type"] == "extra_forbidden":
        keys = list(_section_at(model, location[:-1]).model_fields)
        near = difflib.get_close_matches(location[-1], keys, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"{field}: unknown key; {hint}valid keys: {', '.join(keys)}"
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    message = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{field}: {message}, got {problem['input']!r}"


def _section_at(model: type[Section], location: list[str]) -> type[Section]:
    for part in location:
        if not part.isdigit():  # else a place in a list, whose type was found already
            found = section_in(model.model_fields[part].annotation)
            assert found is not None
            model = found
    return model


def section_in(annotation: Any) -> type[Section] | None:
    """The section type that a field holds, alone, optionally or as a list; None if it holds a
    plain value."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if typing.get_origin(annotation) in (tuple, types.UnionType):
        inner = (section_in(argument) for argument in typing.get_args(annotation))
        return next((found for found in inner if found is not None), None)
    return None
