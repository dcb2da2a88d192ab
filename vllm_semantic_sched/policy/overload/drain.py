"""How fast work goes away, and so when it is worth asking again."""

from __future__ import annotations

_HALF_LIFE = 20.0
_ENOUGH = 1.0


class DrainRate:
    """Tokens that the engine finishes per busy second, recent ones counting more.

    Only time in which the engine was busy counts, so that an idle night does not make the
    engine look slow.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def busy(self, seconds: float) -> None:
        """The engine has worked for so long."""
        fade = 0.5 ** (seconds / _HALF_LIFE)
        self._tokens *= fade
        self._seconds = self._seconds * fade + seconds

    def finished(self, tokens: float) -> None:
        """A request with so many tokens, prompt and output, has ended."""
        self._tokens += tokens

    @property
    def rate(self) -> float | None:
        """Tokens per second; None as long as too little was seen."""
        if self._seconds < _ENOUGH or self._tokens <= 0:
            return None
        return self._tokens / self._seconds
