"""Messages from the wordings: complete, varied, silent about the level; and noise around them."""

import random
import re
from pathlib import Path

import pytest
import yaml

from vllm_semantic_sched.lab.evaluation.domain import check_template
from vllm_semantic_sched.lab.training import messages, noise, wording
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.predict import URGENCY_LEVELS

LABEL_WORDS = re.compile(
    r"\b(emergent|semi-?urgent|non-?urgent|triage level|esi|ktas|level [0-5])\b", re.IGNORECASE
)


@pytest.mark.parametrize("level", range(URGENCY_LEVELS))
def test_messages_are_complete_and_silent_about_the_level(level):
    rng = random.Random(3)
    texts = [messages.level_message(level, rng) for _ in range(500)]
    for message in texts:
        assert not LABEL_WORDS.search(message)
        assert not re.search(r"[\[\]{}|]", message), message
    assert len(set(texts)) > 300


def test_no_wording_occurs_twice_or_is_cut_short():
    sentences = [
        sentence
        for level in wording.wordings()
        for register in ("third", "first", "scene", "clinical", "told", "handover")
        for sentence in getattr(level, register)
    ]
    sentences += [*wording.harmless().distractors, *wording.harmless().everyday]
    assert len(sentences) == len({sentence.lower() for sentence in sentences})
    for sentence in sentences:
        assert sentence.count("[") == sentence.count("]"), sentence
        unnamed = re.sub(r"\{(who|he|him|his|noun)\}", "", sentence)
        assert "{" not in unnamed, sentence


def test_negations_come_first_only_where_the_matter_is_small():
    firsts = tuple(one.strip().lower() for one in wording.surroundings().negations_first)
    found = set()
    for level in range(URGENCY_LEVELS):
        rng = random.Random(7)
        texts = [messages.level_message(level, rng).lower() for _ in range(600)]
        if any(text.startswith(firsts) for text in texts):
            found.add(level)
    assert found == {2, 3, 4}


def test_late_messages_keep_their_words_within_reach():
    rng = random.Random(2)
    texts = [noise.after_background("He collapsed.", rng) for _ in range(300)]
    assert all("He collapsed." in text for text in texts)
    assert sum(text.index("He collapsed.") > 100 for text in texts) > 100
    assert max(len(text) for text in texts) < 600
    assert not any(re.search(r"[\[\]{}|]", text) for text in texts)


def test_harmless_prompts_are_complete():
    rng = random.Random(5)
    for _ in range(800):
        assert not re.search(r"\{noun\}|\[[^\]]*\|", messages.harmless_prompt(rng))


def test_nested_choices_are_resolved():
    texts = {wording.choose("a [b|c[ d|]] e", random.Random(seed)) for seed in range(60)}
    assert texts == {"a b e", "a c e", "a c d e"}


def test_hasty_typing_of_tiny_texts_adds_only_punctuation():
    rng = random.Random(0)
    found = {text: {noise.hasty(text, rng) for _ in range(300)} for text in ("", "a", ".")}
    assert {"", "a", "A", "aa", "a!!"} <= found["a"]
    for text, results in found.items():
        allowed = set(text + text.upper() + ".!?")
        assert all(set(result) <= allowed and len(result) <= 6 for result in results)


@pytest.mark.parametrize("text", ["", "a", ".", "{text}"])
def test_chat_templates_keep_the_text(text):
    rng = random.Random(0)
    wrapped = [noise.in_chat_template(text, rng) for _ in range(300)]
    assert len(set(wrapped)) > 20
    assert all(text in one and len(one) > len(text) and "{system}" not in one for one in wrapped)


PERSON = ("who", "he", "him", "his")
VISIT = ("age", "sex", "terms", "pain", "place", "finding")
AROUND = ("age", "young", "old", "text", "system", "block", "claim")


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("emergency", PERSON),
        ("harmless", ("noun", "matter")),
        ("surroundings", PERSON + AROUND),
        ("visits", PERSON + VISIT),
    ],
)
def test_brackets_match_and_words_are_known(file, words):
    path = Path(wording.__file__).with_name("texts") / f"{file}.yaml"

    def check(data):
        if isinstance(data, str):
            check_template(data, words)
        else:
            for part in data.values() if isinstance(data, dict) else data:
                check(part)

    check(yaml.safe_load(path.read_text("utf-8")))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"third": []}, "immediate.third: .*at least 1"),
        ({"thrid": ["x"]}, "did you mean 'third'"),
    ],
)
def test_broken_file_of_texts_fails_with_its_name(monkeypatch, tmp_path, changes, said):
    registers = ("third", "first", "scene", "clinical", "told", "handover")
    level = {register: ["x"] for register in registers}
    levels = ("immediate", "high_risk", "several_resources", "one_resource", "no_resource")
    data = dict.fromkeys(levels, level) | {"immediate": level | changes}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(PolicyError, match=said) as caught:
        wording.read_texts(path, wording.EmergencyTexts)
    assert "mine.yaml" in str(caught.value)
