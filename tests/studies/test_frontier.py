"""The study of what urgency costs, on a few requests."""

import frontier


def test_every_policy_is_measured_and_drawn(tmp_path) -> None:
    figures = frontier.measure(requests=60, workers=1)
    assert set(figures) == set(frontier.schedulers())
    assert figures["fcfs"]["tokens"] == 1.0
    assert all(one["level 0"] > 0 for one in figures.values())
    frontier.draw(figures, tmp_path / "frontier.png")
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
