"""How predicted probabilities of the levels become one level: a part of the model that predicts
them, because it fits their calibration."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

DECISION = "decision"
"""Key of these settings in the `config.json` of a model's folder."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The rule of a model. ValueError if a setting is invalid.

    Attributes:
        bounds: for each level but the last, the probability from which a request gets it: of this
            level and all more urgent ones together. The most urgent level that reaches its bound
            counts, and the last one if none does. Without bounds, or for predictions of another
            number of levels, the level with the lowest expected cost by `missed_cost`.
        missed_cost: as the policy's key, where no policy says otherwise.
    """

    bounds: tuple[float, ...] = ()
    missed_cost: tuple[float, ...] = (12.0, 6.0, 1.0)

    def __post_init__(self) -> None:
        if not all(0 < bound <= 1 for bound in self.bounds):
            raise ValueError(
                f"decision.bounds: {list(self.bounds)}; valid: numbers above 0, up to 1"
            )


DEFAULT_DECISION = Decision()


def bounds_in_words(bounds: Iterable[float]) -> str:
    """Bounds as messages and reports show them."""
    return ", ".join(f"{bound:g}" for bound in bounds)


def decision_of(settings: Mapping[str, Any]) -> Decision:
    """The decision in a model's `config.json`; the default if it has none. ValueError if it is
    invalid."""
    given = settings.get(DECISION, {})
    known = {field.name for field in dataclasses.fields(Decision)}
    if not isinstance(given, dict) or given.keys() - known:
        raise ValueError(f"decision: {given!r}; valid keys: {', '.join(sorted(known))}")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
    }
    try:
        decision = Decision(**values)
    except TypeError as error:  # something other than numbers
        raise ValueError(f"decision: {given!r}: {error}") from error
    return DEFAULT_DECISION if decision == DEFAULT_DECISION else decision
