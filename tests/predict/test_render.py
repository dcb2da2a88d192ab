"""Rendered messages: repeatable, varied, and silent about the label."""

import random
import re

import pytest

from vllm_semantic_sched.datasets import KtasVisit, TextLength, TriageVisit
from vllm_semantic_sched.predict import render, voices
from vllm_semantic_sched.predict.data import WORDINGS, Sources, training_round
from vllm_semantic_sched.predict.lay_terms import lay_term
from vllm_semantic_sched.predict.wording import choose
from vllm_semantic_sched.predict.wording_distractors import DISTRACTORS, EVERYDAY

VISIT = TriageVisit(
    level=1,
    split="train",
    text="61-year-old male. Reason for visit: Chest pain; Nausea. Pain 8/10.",
    age=61,
    sex="male",
    ambulance=True,
    pain=8,
    injury="no",
    reasons=("Chest pain", "Nausea"),
    heart_rate=104,
    systolic=150,
    oxygen=95,
)
LABEL_WORDS = re.compile(
    r"\b(emergent|semi-?urgent|non-?urgent|triage level|esi|ktas|level [0-5])\b", re.IGNORECASE
)


@pytest.mark.parametrize("wording", WORDINGS, ids=lambda wording: f"level {wording.level}")
def test_messages_are_complete_and_silent_about_the_level(wording):
    rng = random.Random(3)
    messages = [render.level_message(wording, rng) for _ in range(500)]
    for message in messages:
        assert not LABEL_WORDS.search(message)
        assert not re.search(r"[\[\]{}|]", message), message
    assert len(set(messages)) > 300


def test_no_wording_occurs_twice_or_is_cut_short():
    wordings = [
        sentence
        for wording in WORDINGS
        for register in ("third", "first", "scene", "clinical", "told", "handover")
        for sentence in getattr(wording, register)
    ]
    wordings += [*DISTRACTORS, *EVERYDAY]
    assert len(wordings) == len({sentence.lower() for sentence in wordings})
    for sentence in wordings:
        assert sentence.count("[") == sentence.count("]"), sentence
        unnamed = re.sub(r"\{(who|he|him|his|noun)\}", "", sentence)
        assert "{" not in unnamed, sentence


def test_negations_come_first_only_where_the_matter_is_small():
    firsts = tuple(one.strip().lower() for one in voices.NEGATIONS_FIRST.split("|"))
    found = set()
    for wording in WORDINGS:
        rng = random.Random(7)
        messages = [render.level_message(wording, rng).lower() for _ in range(600)]
        if any(message.startswith(firsts) for message in messages):
            found.add(wording.level)
    assert found == {2, 3, 4}


def test_late_messages_keep_their_words_within_reach():
    rng = random.Random(2)
    texts = [render.after_background("He collapsed.", rng) for _ in range(300)]
    assert all("He collapsed." in text for text in texts)
    assert sum(text.index("He collapsed.") > 100 for text in texts) > 100
    assert max(len(text) for text in texts) < 600
    assert not any(re.search(r"[\[\]{}|]", text) for text in texts)


def test_a_round_holds_no_ktas_visit_and_keeps_visits_as_they_are_evaluated():
    ktas = KtasVisit(2, "train", "epigastric pain xqvw", 50, "female", True, False, 4, "alert")
    pair = TextLength("Count to ten.", 10)
    sources = Sources(visits=(VISIT,), ktas=(ktas,), prompts=(pair,), questions=(pair,))
    round_ = training_round(sources, seed=1, scale=0.2)
    assert not any("xqvw" in example.text.lower() for example in round_)
    plain = sum(example.text == VISIT.text for example in round_)
    assert plain >= 0.5 * 0.2 * 3300


def test_visits_are_rendered_in_many_voices():
    rng = random.Random(3)
    texts = {render.visit_message(VISIT, rng) for _ in range(300)}
    assert len(texts) > 80
    assert not any(LABEL_WORDS.search(text) for text in texts)
    assert any(text.startswith("I") for text in texts)
    assert any("c/o" in text for text in texts)


def test_same_generator_same_texts():
    def some():
        rng = random.Random(11)
        texts = [render.with_noise(render.visit_message(VISIT, rng), rng) for _ in range(30)]
        return texts + [render.harmless_prompt(rng) for _ in range(30)]

    assert some() == some()


def test_ktas_visit_keeps_the_complaint():
    visit = KtasVisit(2, "train", "epigastric pain", 50, "female", True, False, 4, "alert")
    rng = random.Random(0)
    assert all("epigastric pain" in render.ktas_message(visit, rng) for _ in range(20))


def test_harmless_prompts_are_complete():
    rng = random.Random(5)
    for _ in range(800):
        assert not re.search(r"\{noun\}|\[[^\]]*\|", render.harmless_prompt(rng))


def test_unknown_reasons_get_plain_words_and_vague_ones_none():
    rng = random.Random(0)
    assert lay_term("Hernia of abdominal cavity", rng) == "hernia of abdominal cavity"
    assert lay_term("Other and unspecified symptoms", rng) is None
    assert "knee" in lay_term("Knee pain, ache, soreness, discomfort", rng)


def test_nested_choices_are_resolved():
    texts = {choose("a [b|c[ d|]] e", random.Random(seed)) for seed in range(60)}
    assert texts == {"a b e", "a c e", "a c d e"}


def test_noise_survives_tiny_texts():
    rng = random.Random(0)
    for text in ("", "a", "."):
        for _ in range(100):
            voices.hasty(text, rng)
            voices.in_chat_template(text, rng)
