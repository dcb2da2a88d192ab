"""How many texts a forward pass may hold, so that an urgent newcomer is soon read."""

from collections.abc import Sequence

# Before anything is measured: seconds for a character of a padded text on one slow core.
_FIRST_GUESS = 1e-4
_NEW_SHARE = 0.3  # of a measurement in the running mean
_SHORTEST = 128  # characters; a shorter text costs hardly less
_LONGEST = 1008  # characters that the network's window holds at most


class PassSize:
    """Bounds forward passes to a number of seconds, from the measured speed of earlier ones.

    A pass takes as long as its number of texts times its longest text, to which the others are
    padded.
    """

    def __init__(self, seconds: float) -> None:
        self._limit = seconds
        self._rate = _FIRST_GUESS

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether a pass over texts of these lengths (characters) is expected to end within the
        limit. A single text always fits."""
        return len(lengths) <= 1 or _work(lengths) * self._rate <= self._limit

    def measured(self, lengths: Sequence[int], seconds: float) -> None:
        """Learn from a pass over texts of these lengths."""
        rate = seconds / _work(lengths)
        # At once if slower than thought: the limit is a promise.
        share = 1.0 if rate > self._rate else _NEW_SHARE
        self._rate += share * (rate - self._rate)


def _work(lengths: Sequence[int]) -> int:
    return len(lengths) * min(max(_SHORTEST, *lengths), _LONGEST)
