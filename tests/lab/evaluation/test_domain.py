"""Domains: the shipped ones, labels of CSV files, and the messages about bad files."""

import pytest
import yaml

from vllm_semantic_sched.lab.evaluation.domain import Domain, load_domain
from vllm_semantic_sched.policy.config.files import shipped_configs, shipped_names
from vllm_semantic_sched.policy.config.section import PolicyError, parse_section
from vllm_semantic_sched.predict import URGENCY_LEVELS

LEVELS = [{"name": "now", "meaning": "Stop."}, {"name": "later", "meaning": "All else."}]


def small(**changes):
    return {"levels": LEVELS, "labels": {"hot": 0, "cold": 1}} | changes


def test_two_domains_are_shipped_with_five_levels_each():
    assert shipped_names("domain") == ["emergency", "incident"]
    for name in shipped_names("domain"):
        domain = load_domain(name)
        assert len(domain.levels) == URGENCY_LEVELS
        assert set(domain.labels.values()) == set(range(5))
        assert [domain.level_of(str(level)) for level in range(5)] == list(range(5))


def test_incident_has_varied_sentences_of_every_level():
    domain = load_domain("incident")
    sentences = [sentence for level in range(5) for sentence in domain.examples[level]]
    assert all(len(domain.examples[level]) >= 60 for level in range(5))
    assert len(sentences) == len({sentence.lower() for sentence in sentences})
    assert all(any(f"{{{name}}}" in sentence for sentence in sentences) for name in domain.words)


@pytest.mark.parametrize(
    ("name", "label", "level"),
    [
        ("incident", "sev-1", 0),
        ("incident", "Sev 2", 1),
        ("incident", "CRITICAL", 0),
        ("incident", "Feature_Request", 4),
        ("incident", " p4 ", 3),
        ("emergency", "Red", 0),
        ("emergency", "esi-3", 2),
        ("emergency", "Non-Urgent", 4),
        ("emergency", "0", 0),
    ],
)
def test_labels_are_read_in_any_spelling(name, label, level):
    assert load_domain(name).level_of(label) == level


def test_unknown_label_fails_with_the_valid_ones():
    with pytest.raises(ValueError, match=r"'hott': unknown; did you mean 'hot'\?") as caught:
        parse_section(Domain, small(), "domain").level_of("hott")
    assert "0 = hot; 1 = cold" in str(caught.value)
    with pytest.raises(ValueError, match="unknown; valid labels"):
        parse_section(Domain, small(), "domain").level_of("")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"labls": {}}, r"labls: unknown key; did you mean 'labels'\?"),
        (
            {"levels": [{"name": "a", "meaning": "b", "nam": "c"}, LEVELS[1]]},
            r"levels\.0\.nam: unknown key; did you mean 'name'\?",
        ),
        ({"levels": [{"name": "a"}, LEVELS[1]]}, r"levels\.0\.meaning: field required"),
        ({"levels": ["now", "later"]}, r"levels\.0: .*, got 'now'"),
        ({"levels": LEVELS[:1]}, "levels: .*at least 2"),
        ({"levels": [LEVELS[0]] * 6}, "levels: .*at most 5"),
        ({"labels": {"hot": 2}}, r"labels\.hot: 2 is not a level; valid: 0 to 1"),
        ({"labels": {"hot": -1}}, r"labels\.hot: -1 is not a level"),
        ({"labels": {"hot": "0"}}, r"labels\.hot: .*valid integer, got '0'"),
        ({"labels": {}}, "labels: .*at least 1"),
        ({"labels": {"P-1": 0, "p1": 1}}, "'P-1' and 'p1' are read alike but .* levels 0 and 1"),
        ({"examples": {0: ["help"]}}, r"examples\.1: needs at least one sentence"),
        ({"examples": {0: ["a"], 1: ["b"], 2: ["c"]}}, r"examples\.2: not a level; valid: 0 to 1"),
        ({"examples": {0: ["a [b|c"], 1: ["d"]}}, r"examples\.0: brackets do not match in 'a \["),
        ({"examples": {0: ["a ]b["], 1: ["d"]}}, r"examples\.0: brackets do not match"),
        ({"examples": {0: ["a {b}"], 1: ["d"]}}, r"examples\.0: unknown word \{b\}.*there is no"),
        ({"words": {"host": []}}, r"words\.host: needs at least one word"),
        ({"wordings": "emergency"}, "wordings: 'emergency' has 5 levels, this domain 2"),
        (
            {"wordings": "emergency", "examples": {0: ["a"], 1: ["b"]}},
            "wordings: cannot stand beside examples",
        ),
        ({"wordings": "other"}, "wordings: .*got 'other'"),
    ],
)
def test_bad_file_fails_with_a_message(tmp_path, changes, said):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(small(**changes)))
    with pytest.raises(PolicyError, match=said) as caught:
        load_domain(path)
    assert f"domain {path}" in str(caught.value)


def test_missing_empty_or_broken_file_fails_with_a_message(tmp_path):
    with pytest.raises(PolicyError, match=r"Did you mean 'incident'\? Shipped: emergency"):
        load_domain("incidents")
    (tmp_path / "empty.yaml").touch()
    with pytest.raises(PolicyError, match=r"levels: field required[\s\S]*labels: field required"):
        load_domain(tmp_path / "empty.yaml")
    (tmp_path / "broken.yaml").write_text("levels: [")
    with pytest.raises(PolicyError, match="cannot be read as YAML"):
        load_domain(tmp_path / "broken.yaml")


def test_emergency_uses_the_wordings_of_the_package():
    domain = load_domain("emergency")
    assert domain.wordings == "emergency"
    assert not domain.examples
    assert (shipped_configs() / "domains" / "emergency.yaml").is_file()
