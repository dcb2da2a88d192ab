"""Keys about hints and the predictor."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from vllm_semantic_sched.policy.config.section import Section
from vllm_semantic_sched.policy.facts.decision import DEFAULT_DECISION

LONGEST_TENANT = 64  # characters at which names of tenants are cut


class Hints(Section):
    """How far the scheduler trusts clients' hints about their own requests."""

    urgency: Literal["honor", "cap", "ignore"] = "honor"
    """`vllm_xargs: {urgency: N}`: `honor` uses it, `cap` uses it but no more urgent than
    `most_urgent_level`, `ignore` does not read it."""
    priority: Literal["honor", "cap", "ignore", "vllm"] = "honor"
    """vLLM's own `priority` field and the X-Vllm-Priority header, when not 0 (vLLM cannot tell 0
    from unset). `honor`, `cap` and `ignore` read it as an urgency level, as in `urgency`. `vllm`
    keeps vLLM's meaning, the lowest number first: -1 is one level more urgent than `default_level`,
    1 one level less, and so on to the first and the last level."""
    most_urgent_level: int = Field(0, ge=0)
    """The most urgent level that a client can claim: with `cap` by `urgency` or `priority`, and
    always by `service_tier`."""
    most_urgent_level_of: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    """The same for single tenants (`{NAME: LEVEL}`), in place of `most_urgent_level`. A client that
    may choose its tenant's name can choose its level, too."""

    @field_validator("most_urgent_level_of")
    @classmethod
    def _names_occur(cls, levels: dict[str, int]) -> dict[str, int]:
        for name in levels:
            if not name or name != name.strip()[:LONGEST_TENANT]:
                raise ValueError(
                    f"hints.most_urgent_level_of: no tenant has the name {name!r}; valid: 1 to "
                    f"{LONGEST_TENANT} characters without spaces around them"
                )
        return levels

    def most_urgent_for(self, tenant: str) -> int:
        """The most urgent level that a tenant's requests can claim."""
        return self.most_urgent_level_of.get(tenant, self.most_urgent_level)


class Predictor(Section):
    """The model that predicts urgency and output length from the prompt, in its own process."""

    enabled: bool = True
    """Off: levels come from hints only."""
    model: str | None = None
    """Local path or hub id of a transformers sequence classifier whose labels, in order, are the
    urgency levels. Unset: the model shipped with the package."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of the predictor process. Unset: one for every eight cores that the engine may
    use, at least one and at most four."""
    instant: Literal["none", "order", "start", "preempt"] = "preempt"
    """What a provisional level may do: that of the instant reader, a small linear model that reads
    each request on arrival. `none`: requests wait for the predictor. `order`: put the request in
    order for the predictor. `start`: also give it its place in the waiting queue, and so a free
    seat. `preempt`: also take the seat of a running request, as far as the level is probable."""

    @property
    def has_instant_reader(self) -> bool:
        """Whether requests get a provisional level."""
        return self.instant != "none"


class Sessions(Section):
    """Requests of one conversation or program (`vllm_xargs: {session: ID}`, or the header
    X-Session-ID), of one tenant."""

    memory: float | None = Field(None, gt=0)
    """Seconds for which a session is remembered after a request. The predictor reads a text after
    the session's last words, as it reads a chat; and until it has, or where it reads nothing, a
    request without a hint runs at least at the level of the session's last urgent one. Of several
    engines, a session stays with one while few requests wait there. Unset: each request by
    itself."""


class MissedCosts(Section):
    """What mistakes about the level cost."""

    missed_cost: tuple[float, ...] = Field(DEFAULT_DECISION.missed_cost, min_length=1)
    """Cost of serving a request one level too late, relative to 1 for one level too early; one
    number per true level, the last one for all further levels. By it prompts are ordered for the
    predictor, and a second of one level is worth that many of the next."""

    @field_validator("missed_cost")
    @classmethod
    def _costs_positive(cls, costs: tuple[float, ...]) -> tuple[float, ...]:
        if any(not 0 < cost < float("inf") for cost in costs):
            raise ValueError(f"decision.missed_cost: {list(costs)} must be numbers above 0")
        return costs
