"""When the study of a long run says that something grows."""

import pytest
from soak import growth


def grown(name: str, values: list[float]) -> bool:
    (found,) = growth([{name: value} for value in values])
    return found.grows


@pytest.mark.parametrize(
    ("name", "values", "grows"),
    [
        ("EngineCore: memory, MiB", [500.0 + index for index in range(40)], False),
        ("EngineCore: memory, MiB", [500.0 + 4 * index for index in range(40)], True),
        ("EngineCore: memory, MiB", [100.0, 600.0] + [1000.0] * 38, False),  # warm-up
        ("API server: file descriptors", [60.0 + index % 3 for index in range(40)], False),
        ("API server: file descriptors", [60.0 + index / 4 for index in range(40)], True),
        ("jobs", [0.0] * 40, False),
        ("jobs", [0.0] * 30 + [5.0] * 10, True),
        ("threads", [30.0] * 39 + [90.0], False),  # a single sample is noise
    ],
)
def test_growth_is_told_from_noise_and_warm_up(name, values, grows) -> None:
    assert grown(name, values) == grows


def test_figure_that_appears_later_grows() -> None:
    samples = [{"jobs": 0.0}] * 20 + [{"jobs": 0.0, "metric series": 400.0}] * 20
    assert [one.name for one in growth(samples) if one.grows] == ["metric series"]


def test_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 8"):
        growth([{"jobs": 0.0}] * 7)
