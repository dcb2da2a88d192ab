"""The file of corrections."""

import pytest

from vllm_semantic_sched.policy.config.overload import Events
from vllm_semantic_sched.predict import corrections
from vllm_semantic_sched.predict.corrections import (
    Correction,
    append,
    corrections_path,
    parse_corrections,
    read_corrections,
)


def test_corrections_are_private_bounded_and_come_back_in_order(tmp_path, monkeypatch) -> None:
    path = corrections_path(Events(path=str(tmp_path / "log" / "events.jsonl")))
    assert path is not None and corrections_path(Events()) is None
    monkeypatch.setattr(corrections, "_LARGEST", 300)
    made = [Correction(number, (0.25, 0.75), 1, number % 2, sampled=True) for number in range(9)]
    for one in made:
        append(path, one)
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    kept = read_corrections(path)
    assert 2 <= len(kept) < 9 and kept == made[-len(kept) :]
    assert sorted(part.name for part in path.parent.iterdir()) == [path.name, f"{path.name}.1"]


@pytest.mark.parametrize(
    "entry",
    [
        {"text": "help"},
        7,
        {"time": 0, "probabilities": [1.0], "level": 0, "corrected": 0},
        {"time": 0, "probabilities": [0.5, 0.5], "level": 0, "corrected": 2},
    ],
)
def test_what_is_no_correction_is_named(entry) -> None:
    with pytest.raises(ValueError, match="correction 1"):
        parse_corrections([entry])
