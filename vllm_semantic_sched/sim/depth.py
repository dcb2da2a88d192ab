"""Queue depth over time, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence

_BINS = 256


class DepthHistory:
    """Mean number of waiting requests per level in each of at most 256 equal stretches of time.

    Stretches start short; when time outgrows them, each two become one.

    Args:
        levels: how many.
        width: seconds of a stretch at first.
    """

    def __init__(self, levels: int, width: float = 0.01) -> None:
        self._width = width
        self._areas = [[0.0] * levels for _ in range(_BINS)]
        self._until = 0.0
        self._depths: list[int] = [0] * levels

    def record(self, now: float, depths: Sequence[int]) -> None:
        """So many wait, by level, from `now` on."""
        self._fill(now)
        self._depths = list(depths)

    def points(self) -> list[tuple[float, tuple[float, ...]]]:
        """Middle of each stretch in seconds, and the mean depths in it."""
        used = min(_BINS, int(self._until / self._width) + 1)
        return [
            ((index + 0.5) * self._width, tuple(area / self._width for area in areas))
            for index, areas in enumerate(self._areas[:used])
        ]

    def _fill(self, now: float) -> None:
        while now >= _BINS * self._width:
            merged = [
                [left + right for left, right in zip(*pair, strict=True)]
                for pair in zip(self._areas[::2], self._areas[1::2], strict=True)
            ]
            empty = [[0.0] * len(self._depths) for _ in range(_BINS // 2)]
            self._areas = merged + empty
            self._width *= 2
        index = int(self._until / self._width)
        while self._until < now:
            end = min(now, (index + 1) * self._width)
            if any(self._depths):
                area = self._areas[min(index, _BINS - 1)]
                for level, depth in enumerate(self._depths):
                    area[level] += depth * (end - self._until)
            self._until = end
            index += 1
