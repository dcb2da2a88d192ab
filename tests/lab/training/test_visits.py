"""Messages made from coded visits: varied, and silent about the level."""

import random
import re

from predictor_examples import VISIT

from vllm_semantic_sched.lab.training import messages, noise, visits

LABEL_WORDS = re.compile(
    r"\b(emergent|semi-?urgent|non-?urgent|triage level|esi|ktas|level [0-5])\b", re.IGNORECASE
)


def test_visits_are_rendered_in_many_voices():
    rng = random.Random(3)
    texts = {visits.visit_message(VISIT, rng) for _ in range(300)}
    assert len(texts) > 80
    assert not any(LABEL_WORDS.search(text) for text in texts)
    assert any(text.startswith("I") for text in texts)
    assert any("c/o" in text for text in texts)


def test_same_generator_same_texts():
    def some():
        rng = random.Random(11)
        texts = [noise.with_noise(visits.visit_message(VISIT, rng), rng) for _ in range(30)]
        return texts + [messages.harmless_prompt(rng) for _ in range(30)]

    assert some() == some()


def test_unknown_reason_gets_plain_words_and_vague_one_none():
    rng = random.Random(0)
    assert visits.lay_term("Hernia of abdominal cavity", rng) == "hernia of abdominal cavity"
    assert visits.lay_term("Other and unspecified symptoms", rng) is None
    assert "knee" in visits.lay_term("Knee pain, ache, soreness, discomfort", rng)
