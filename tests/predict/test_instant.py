"""The instant reader: its quality and cost as shipped, and what it stores."""

import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from vllm_semantic_sched.lab.evaluation.examples import read_examples
from vllm_semantic_sched.lab.evaluation.metrics import level_figures
from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.estimates.decision import decide_level, preempting_level
from vllm_semantic_sched.predict import SHIPPED_WEIGHTS
from vllm_semantic_sched.predict.instant import (
    INSTANT_FILE,
    FeatureReader,
    InstantReader,
    InstantTable,
)
from vllm_semantic_sched.predict.window import DEFAULT_WINDOW, cut_pieces

# Written by hand, and never trained on.
MESSAGES = read_examples(Path(__file__).parents[1] / "data" / "urgency" / "en.csv")
LEVELS = [one.level or 0 for one in MESSAGES]


@pytest.fixture(scope="module")
def reader() -> InstantReader:
    shipped = InstantReader.load()
    assert shipped is not None
    return shipped


@pytest.fixture(scope="module")
def rows(reader):
    return [reader.read(one.text).urgency for one in MESSAGES]


def test_shipped_reader_tells_urgent_messages_from_others(reader, rows) -> None:
    figures = level_figures(LEVELS, rows, reader.decision)
    assert figures["auc"] >= 0.96
    assert figures["urgent_recall"] >= 0.92
    assert figures["quadratic_weighted_kappa"] >= 0.85
    assert figures["ece"] <= 0.1  # usable as probabilities


def test_unread_messages_that_may_preempt_are_urgent(reader, rows) -> None:
    rights = [preempting_level(Policy(), row, decide_level(row, reader.decision)) for row in rows]
    sure = [level for level, at in zip(LEVELS, rights, strict=True) if at is not None and at <= 1]
    assert sum(level <= 1 for level in sure) >= 0.93 * len(sure)
    assert len(sure) >= 0.6 * sum(level <= 1 for level in LEVELS)


@pytest.mark.parametrize(
    "word",
    [
        "urgent ",
        "a ",
        "well, it's 'so-so': ",
        "İstanbul'da ",
        "x" * 20 + " ",
        "e\u0301 \u200b ",
        "¨ ½ ",
    ],
)
def test_pieces_are_the_first_and_the_last_of_the_text(word) -> None:
    features = FeatureReader.load(SHIPPED_WEIGHTS)
    cut = features.cut("My father has collapsed. " + word * 2000 + "Is he breathing?")
    whole = features._tokenizer.encode(cut, add_special_tokens=False)
    _, pieces, _ = features.read(cut)
    assert len(whole.ids) > DEFAULT_WINDOW
    assert pieces.tolist() == cut_pieces(whole.ids, DEFAULT_WINDOW - 2)


def test_work_for_a_text_is_bounded() -> None:
    features = FeatureReader.load(SHIPPED_WEIGHTS)
    cut = features.cut("my dad collapsed and is not breathing " * 10_000)
    assert len(cut) <= 1100
    _, pieces, pairs = features.read(cut)
    assert len(pieces) == len(pairs) + 1 <= DEFAULT_WINDOW


EMERGENCY = "My father has collapsed and is not breathing."
TASK = "Please write a short poem about spring in the Black Forest, four verses of four lines."


@pytest.mark.parametrize("text", [f"{EMERGENCY} {TASK * 3}", f"{TASK * 2} {EMERGENCY} {TASK}"])
def test_part_of_a_text_that_holds_an_emergency_is_found(reader, text) -> None:
    whole, calm = reader.read(text), reader.read(TASK * 4)
    assert whole.part[0] > whole.urgency[0] + 0.1 and sum(whole.part) == pytest.approx(1, abs=1e-5)
    assert calm.part[0] < 0.1
    assert reader.read(EMERGENCY).part is None  # it is no longer than a part


def test_weights_are_small() -> None:
    assert (SHIPPED_WEIGHTS / INSTANT_FILE).stat().st_size < 1_150_000


@pytest.mark.parametrize("text", ["", " ", "\x00", "\ud83d \udc00", "\u202e", "a" * 100_000, "1"])
def test_any_string_is_read(reader, text) -> None:
    prediction = reader.read(text)
    assert sum(prediction.urgency) == pytest.approx(1, abs=1e-5)
    assert sum(prediction.length) == pytest.approx(1, abs=1e-5)
    assert len(prediction.length) == len(reader.length_buckets.means)


def test_strongest_pieces_are_the_words_that_decide(reader) -> None:
    pieces = reader.strongest("write a poem about my dad who is not breathing", 0, 5)
    assert len(pieces) == 5
    weights = [abs(weight) for _, weight in pieces]
    assert weights == sorted(weights, reverse=True)
    assert any("breath" in name and weight > 0 for name, weight in pieces)


def test_serving_needs_no_torch() -> None:
    code = (
        "import sys; from vllm_semantic_sched.predict.instant import InstantReader; "
        "InstantReader.load().read('help'); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_folder_without_a_table_has_no_reader(tmp_path) -> None:
    assert InstantReader.load(str(tmp_path)) is None
    assert InstantReader.load("some/hub-id") is None


def test_stored_table_is_close_to_the_given_one(tmp_path) -> None:
    rng = numpy.random.default_rng(0)
    rows, bias = rng.normal(size=(50, 7)), rng.normal(size=7)
    InstantTable(rows.astype("f4"), bias.astype("f4"), 5).save(tmp_path)
    loaded = InstantTable.load(tmp_path)
    assert loaded is not None and loaded.levels == 5
    assert numpy.abs(loaded.rows - rows).max() <= numpy.abs(rows).max() / 127
    assert loaded.bias == pytest.approx(bias, abs=1e-6)


def test_table_that_does_not_fit_is_refused(tmp_path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((SHIPPED_WEIGHTS / name).read_bytes())
    features = FeatureReader.load(tmp_path)
    for shape, message in (((10, 14), "10 rows"), ((features.rows, 9), "9 outputs")):
        rows = numpy.zeros(shape, "f4")
        InstantTable(rows, rows[0], 5).save(tmp_path)
        with pytest.raises(ValueError, match=message):
            InstantReader.load(str(tmp_path))
    (tmp_path / INSTANT_FILE).write_bytes(b"broken")
    with pytest.raises(ValueError, match="not a table"):
        InstantReader.load(str(tmp_path))
