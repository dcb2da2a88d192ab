"""How predicted probabilities of the levels become one level: a part of the model that predicts
them, because it fits their calibration."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

DECISION = "decision"
"""Key of these settings in the `config.json` of a model's folder."""

Rule = Literal["least_cost", "most_likely", "thresholds"]
"""`thresholds`: a level that is at least as probable as `certain`, else the expected level, cut at
`thresholds`; `least_cost` for a model with another number of levels than these cut. `least_cost`:
the lowest expected cost, where a mistake costs the levels it is off, times `missed_cost` if the
request is more urgent than decided. `most_likely`: the most probable."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The rule of a model. ValueError if a setting is invalid.

    Attributes:
        certain: `thresholds`: minimum probability for using the most likely level directly; above
            1, always use `thresholds`.
        possible: `thresholds`: the predictor's probability of level 0 from which a request gets
            level 1 or 0, and that from which it never gets the last level, even if that is
            `certain`. Above 1: off.
        thresholds: the expected level (0 to 4, the mean of the prediction) below which a request
            gets level 0, level 1, and so on. One fewer than levels. The default fits emergency
            triage.
        missed_cost: as the policy's key, where no policy says otherwise.
    """

    rule: Rule = "thresholds"
    certain: float = 0.73
    possible: tuple[float, float] = (0.2, 0.02)
    thresholds: tuple[float, ...] = (1.15, 2.06, 2.35, 2.9)
    missed_cost: tuple[float, ...] = (12.0, 6.0, 1.0)

    def __post_init__(self) -> None:
        if self.rule not in get_args(Rule):
            raise ValueError(f"decision.rule: {self.rule!r}; valid: {', '.join(get_args(Rule))}")
        if not 0.5 < self.certain <= 1.01:
            raise ValueError(f"decision.certain: {self.certain:g}; valid: above 0.5, up to 1.01")
        if len(self.possible) != 2 or not all(bound > 0 for bound in self.possible):
            raise ValueError(
                f"decision.possible: {list(self.possible)} must be two numbers above 0"
            )
        ascending = all(low < high for low, high in itertools.pairwise(self.thresholds))
        if not (self.thresholds and ascending and all(map(math.isfinite, self.thresholds))):
            raise ValueError(
                f"decision.thresholds: {list(self.thresholds)} must be ascending numbers"
            )


DEFAULT_DECISION = Decision()


def decision_of(settings: Mapping[str, Any]) -> Decision:
    """The decision in a model's `config.json`; the default if it has none. ValueError if it is
    invalid."""
    given = settings.get(DECISION, {})
    known = {field.name for field in dataclasses.fields(Decision)}
    if not isinstance(given, dict) or given.keys() - known:
        raise ValueError(f"decision: {given!r}; valid keys: {', '.join(sorted(known))}")
    values: dict[str, Any] = {
        name: tuple(one) if isinstance(one, list) else one for name, one in given.items()
    }
    try:
        decision = Decision(**values)
    except TypeError as error:  # something other than a number
        raise ValueError(f"decision: {given!r}: {error}") from error
    return DEFAULT_DECISION if decision == DEFAULT_DECISION else decision
