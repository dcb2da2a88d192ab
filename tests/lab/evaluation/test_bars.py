"""Bars for figures of a report: what misses is named, what cannot be checked is an error."""

import pytest

from vllm_semantic_sched.lab.evaluation.bars import bars_missed, read_bars

REPORTS = {
    "urgency": {
        "accuracy": 0.8,
        "recall": [1.0, None],
        "ece": 0.04,
        "groups": {"language": {"es": {"recall_of_0": 0.7}, "de": {"recall_of_0": None}}},
    }
}


def missed(tmp_path, text):
    path = tmp_path / "bars.yaml"
    path.write_text(text)
    return bars_missed(read_bars(path), REPORTS)


def test_a_figure_at_its_bar_passes(tmp_path):
    bars = "urgency: {at_least: {accuracy: 0.8, recall.0: 1.0}, at_most: {ece: 0.04}}"
    assert missed(tmp_path, bars) == []


def test_every_missed_bar_is_named(tmp_path):
    bars = "urgency: {at_least: {accuracy: 0.81}, at_most: {ece: 0.03}}"
    assert missed(tmp_path, bars) == [
        "urgency: accuracy is 0.800, at least 0.81 is demanded",
        "urgency: ece is 0.040, at most 0.03 is demanded",
    ]


def test_a_star_stands_for_every_group_that_has_the_figure(tmp_path):
    bars = "urgency: {at_least: {groups.language.*.recall_of_0: 0.8}}"
    (line,) = missed(tmp_path, bars)
    assert line.startswith("urgency: groups.language.es.recall_of_0 is 0.700")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("urgency: {at_least: {accurracy: 0.8}}", "no figure accurracy"),
        ("urgency: {at_least: {recall.1: 0.8}}", "no figure recall.1"),
        ("others: {at_least: {accuracy: 0.8}}", "others, which is not measured"),
        ("urgency: {above: {accuracy: 0.8}}", "above: unknown key; valid keys: at_least, at_most"),
        ("urgency: {at_least: {accuracy: high}}", "at_least.accuracy: .*valid number, got 'high'"),
        ("urgency: {at_least: 0.8}", "at_least: .*, got 0.8"),
        ("urgency", "expected a mapping of test sets"),
        ("urgency: [", "not YAML"),
    ],
)
def test_a_bar_that_cannot_be_checked_is_an_error(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        missed(tmp_path, text)
