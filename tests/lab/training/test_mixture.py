"""The training mixture: visits stay out of it or in it as they should, domains give examples."""

import re
from collections import Counter

import pytest
from predictor_examples import VISIT

from vllm_semantic_sched.lab.datasets import TextLength
from vllm_semantic_sched.lab.evaluation.domain import Domain, load_domain
from vllm_semantic_sched.lab.training.mixture import (
    Sources,
    domain_examples,
    training_round,
)
from vllm_semantic_sched.policy.config.files import shipped_names
from vllm_semantic_sched.policy.config.section import parse_section

LEVELS = [{"name": "now", "meaning": "Stop."}, {"name": "later", "meaning": "All else."}]


def small(**changes):
    return {"levels": LEVELS, "labels": {"hot": 0, "cold": 1}} | changes


def test_round_holds_many_unchanged_visits():
    pair = TextLength("Count to ten.", 10)
    sources = Sources(visits=(VISIT,), prompts=(pair,), questions=(pair,))
    round_ = training_round(sources, seed=1, scale=0.2)
    plain = sum(example.text == VISIT.text for example in round_)
    assert plain >= 0.5 * 0.2 * 3300


@pytest.mark.parametrize("name", shipped_names("domain"))
def test_examples_are_balanced_varied_and_complete(name):
    domain = load_domain(name)
    examples = domain_examples(domain, 1502, seed=4)
    assert Counter(example.level for example in examples) == {
        0: 301,
        1: 301,
        2: 300,
        3: 300,
        4: 300,
    }
    assert len({example.text for example in examples}) > 1000
    assert all(example.output_tokens is None for example in examples)
    for example in examples:
        assert not re.search(r"\{\w*\}|\[[^\[\]<>]*\|[^\[\]]*\]", example.text), example.text


def test_examples_depend_on_the_seed_alone():
    domain = load_domain("incident")
    assert domain_examples(domain, 60, seed=1) == domain_examples(domain, 60, seed=1)
    assert domain_examples(domain, 60, seed=1) != domain_examples(domain, 60, seed=2)
    assert domain_examples(domain, 0, seed=1) == []


def test_alternatives_and_words_of_a_domain_are_filled_in():
    examples = {0: ["[stop|halt] {what}"], 1: ["never mind"]}
    content = small(examples=examples, words={"what": ["line 1", "line 2"]})
    domain = parse_section(Domain, content, "domain")
    texts = "\n".join(one.text for one in domain_examples(domain, 400, seed=1) if one.level == 0)
    for words in ("stop line 1", "stop line 2", "halt line 1", "halt line 2"):
        assert words in texts.lower()


def test_domain_without_sentences_raises():
    with pytest.raises(ValueError, match="no sentences to train from; give it `examples`"):
        domain_examples(parse_section(Domain, small(), "domain"), 10, seed=1)
