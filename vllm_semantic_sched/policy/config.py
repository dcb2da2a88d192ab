"""The policy file: every knob, its default and its meaning, typed and validated.

A policy is YAML. Each default is stated once, here, beside the text that explains it. Unknown
keys, wrong types and unknown choices are refused with one sentence per problem that names the
field, the offending value and what is valid.
"""

from __future__ import annotations

import difflib
import json
import types
import typing
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from vllm_semantic_sched.policy.errors import PolicyError
from vllm_semantic_sched.policy.files import read_config


class Section(BaseModel):
    """A group of knobs or coefficients: immutable, and strict about keys and types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


S = TypeVar("S", bound=Section)


class Hints(Section):
    """What a client may say about its own request: the trust boundary of the scheduler."""

    urgency: Literal["honour", "cap", "ignore"] = Field(
        "honour",
        description="`vllm_xargs: {urgency: N}`: use it, use it but no more urgent than "
        "`most_urgent_level`, or leave it unread.",
    )
    priority: Literal["honour", "cap", "ignore"] = Field(
        "honour",
        description="vLLM's own `priority` field and the X-Vllm-Priority header, read as an "
        "urgency level when not 0 (vLLM cannot tell 0 from unset); same choices as `urgency`.",
    )
    most_urgent_level: int = Field(
        0, ge=0, description="With `cap`: the most urgent level that a hint can claim."
    )


class Preemption(Section):
    """Taking seats and KV blocks from running requests for more urgent waiting ones."""

    enabled: bool = Field(True, description="Preempt running requests for waiting ones at all.")
    min_level_gap: int = Field(
        1,
        ge=1,
        description="A victim must be at least this many levels less urgent than the request it "
        "makes room for.",
    )
    max_per_request: int = Field(
        3,
        ge=0,
        description="Times one request can be preempted for others; after that it is protected.",
    )
    max_victims_per_step: int = Field(
        8, ge=1, description="Upper bound on victims in one scheduling step."
    )


class Stage(Section):
    """Stage awareness (paper, Alg. 2): prefills of less urgent requests beside an urgent decode."""

    mode: Literal["cap", "gate", "off"] = Field(
        "cap",
        description="`cap` bounds the prefill tokens of such a step, `gate` admits none, `off` "
        "leaves steps as vLLM builds them.",
    )
    protected_level: int = Field(
        0,
        ge=0,
        description="Decodes of this level and of more urgent ones are protected.",
    )
    max_slowdown: float = Field(
        1.0,
        gt=0,
        description="`cap`: prefill time added to a step, as a share of one decode step's time "
        "by the engine profile.",
    )
    min_prefill_tokens: int = Field(
        64, ge=1, description="`cap`: prefill tokens that a step may always have."
    )


class Predictor(Section):
    """The model that reads urgency and output length from the prompt, beside the engine."""

    enabled: bool = Field(True, description="Off: levels come from hints only.")
    model: str | None = Field(
        None,
        description="Local path or hub id of a transformers sequence classifier whose labels, in "
        "order, are the urgency levels. Unset: the model shipped with the package.",
    )
    mode: Literal["immediate", "full_batching"] = Field(
        "immediate",
        description="Predict as soon as requests arrive, or wait for a full batch (paper, "
        "section 4.1).",
    )
    max_batch: int = Field(16, ge=1, description="Most texts in one forward pass.")
    max_wait: float = Field(
        0.05,
        ge=0,
        description="`full_batching`: seconds after which an incomplete batch goes anyway.",
    )
    max_queue: int = Field(
        10_000,
        ge=1,
        description="Texts that may wait for the predictor; requests beyond that run at the "
        "default level.",
    )
    cache_size: int = Field(
        4096,
        ge=0,
        description="Distinct prompts whose predictions are remembered; an identical prompt is "
        "answered from memory. 0: none.",
    )
    timeout: float = Field(
        30.0,
        gt=0,
        description="Seconds for one forward pass after which the predictor process counts as "
        "stuck and is started anew; its requests run at the default level.",
    )
    extra_latency: float = Field(
        0.0,
        ge=0,
        description="Seconds added to every batch: shows what a slower predictor would cost.",
    )
    threads: int = Field(1, ge=1, description="CPU threads of the predictor process.")


class Decision(Section):
    """From the predicted probabilities of the levels to one level."""

    rule: Literal["least_cost", "most_likely"] = Field(
        "least_cost",
        description="`least_cost`: the level with the lowest expected cost, where a mistake costs "
        "the number of levels it is off, times `missed_cost` if the request is more urgent than "
        "decided. `most_likely`: the most probable level, whatever mistakes cost.",
    )
    missed_cost: tuple[float, ...] = Field(
        (12.0, 6.0, 1.0),
        min_length=1,
        description="`least_cost`: what it costs to serve a request one level too late, beside 1 "
        "for one level too early; one number per true level, the last one for all further levels.",
    )

    @field_validator("missed_cost")
    @classmethod
    def _costs_positive(cls, costs: tuple[float, ...]) -> tuple[float, ...]:
        if any(not 0 < cost < float("inf") for cost in costs):
            raise ValueError(f"decision.missed_cost: {list(costs)} must be numbers above 0")
        return costs


class Length(Section):
    """How a predicted distribution over output-length buckets becomes a number of tokens."""

    estimate: Literal["mean", "median", "p90"] = Field(
        "mean",
        description="Point estimate of the output length; `p90` is the length that nine requests "
        "in ten stay below.",
    )
    calibrate: bool = Field(
        True,
        description="Let the lengths that buckets stand for follow the answers of the served "
        "model.",
    )
    default_tokens: int = Field(
        256, ge=1, description="Output tokens assumed where no prediction is available."
    )


class Policy(Section):
    """A whole policy file."""

    base: Literal["semantic", "priority", "sjf", "fcfs"] = Field(
        "semantic",
        description="What runs first: `semantic` (urgency, then remaining time), `priority` "
        "(urgency, then arrival), `sjf` (remaining time), `fcfs` (vLLM's own scheduler, "
        "untouched).",
    )
    levels: int = Field(5, ge=1, le=100, description="Urgency levels; 0 is the most urgent.")
    default_level: int = Field(
        2, ge=0, description="Level of a request that nothing is known about (yet)."
    )
    profile: str = Field(
        "default",
        description="Engine profile (alpha, beta, gamma): a name under configs/profiles or a path.",
    )
    hints: Hints = Hints()
    preemption: Preemption = Preemption()
    stage: Stage = Stage()
    predictor: Predictor = Predictor()
    decision: Decision = Decision()
    length: Length = Length()

    @model_validator(mode="after")
    def _levels_exist(self) -> Policy:
        last = self.levels - 1
        for name, value in (
            ("default_level", self.default_level),
            ("hints.most_urgent_level", self.hints.most_urgent_level),
            ("stage.protected_level", self.stage.protected_level),
        ):
            if value > last:
                raise ValueError(f"{name}: {value} is not a level; valid: 0 to {last}")
        return self

    @property
    def uses_urgency(self) -> bool:
        """Whether the rank depends on the urgency level."""
        return self.base in ("semantic", "priority")

    @property
    def uses_length(self) -> bool:
        """Whether the rank depends on the predicted output length."""
        return self.base in ("semantic", "sjf")


def load_policy(name_or_path: str | Path) -> Policy:
    """Read a policy by the name of a shipped one (`ems`) or by path.

    Raises:
        PolicyError: the file is missing, is not YAML, or says something invalid.
    """
    data, source = read_config(name_or_path, kind="policy")
    return parse_policy({} if data is None else data, source)


def parse_policy(data: Any, source: str = "policy") -> Policy:
    """Validate what a policy file holds. `source` is named in the message.

    Raises:
        PolicyError: with one line per problem.
    """
    return parse_section(Policy, data, source)


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
        annotation = model.model_fields[part].annotation
        if isinstance(annotation, types.UnionType):
            annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
        assert isinstance(annotation, type) and issubclass(annotation, Section)
        model = annotation
    return model
