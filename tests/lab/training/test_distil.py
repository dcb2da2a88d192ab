"""Training of the instant reader from a network's probabilities."""

import numpy
import pytest

from vllm_semantic_sched.lab.training import distil
from vllm_semantic_sched.lab.training.distil import fit_table, renewed
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets, Prediction
from vllm_semantic_sched.predict import SHIPPED_WEIGHTS
from vllm_semantic_sched.predict.instant import FeatureReader, InstantReader, InstantTable

TEXTS = [f"{word} number {n}" for n in range(30) for word in ("fire", "poem")]
URGENT, CALM = Prediction((0.8, 0.2), (0.9, 0.1)), Prediction((0.1, 0.9), (0.3, 0.7))
TARGETS = [URGENT if text.startswith("fire") else CALM for text in TEXTS]


@pytest.fixture(scope="module")
def features() -> FeatureReader:
    return FeatureReader.load(SHIPPED_WEIGHTS)


@pytest.fixture(scope="module")
def table(features) -> InstantTable:
    return fit_table(features, TEXTS, TARGETS, seed=1)


def test_probabilities_become_those_of_the_network(features, table) -> None:
    reader = InstantReader(features, table, LengthBuckets((50,), (10.0, 100.0)))
    for text, target in (("fire number 77", URGENT), ("poem number 77", CALM)):
        prediction = reader.read(text)
        assert prediction.urgency == pytest.approx(target.urgency, abs=0.1)
        assert prediction.length == pytest.approx(target.length, abs=0.1)


def test_same_seed_gives_the_same_table(features, monkeypatch) -> None:
    monkeypatch.setattr(distil, "_LEAST_STEPS", 20)
    one, other, third = (fit_table(features, TEXTS, TARGETS, seed=seed) for seed in (1, 1, 2))
    assert numpy.array_equal(one.rows, other.rows) and numpy.array_equal(one.bias, other.bias)
    assert not numpy.array_equal(one.rows, third.rows)


def test_head_that_begins_anew_is_zero_and_the_other_stays(table) -> None:
    changed = renewed(table, None, 3)
    assert changed.levels == 2 and changed.rows.shape == (len(table.rows), 5)
    assert numpy.array_equal(changed.rows[:, :2], table.rows[:, :2])
    assert not changed.rows[:, 2:].any() and not changed.bias[2:].any()
    other = renewed(table, 4, None)
    assert other.levels == 4 and not other.rows[:, :4].any()
    assert numpy.array_equal(other.rows[:, 4:], table.rows[:, 2:])
