"""A coded visit, a predictor of two levels and corrections, for tests of training and
evaluation."""

import random

from vllm_semantic_sched.lab.datasets import TriageVisit
from vllm_semantic_sched.policy.estimates.decision import decide_level
from vllm_semantic_sched.policy.facts.decision import Decision
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets, Prediction
from vllm_semantic_sched.predict.corrections import Correction

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


class TwoLevels:
    """Knows levels 0 and 1 by a word, and that poems are long."""

    levels = 2
    length_buckets = LengthBuckets((50,), (10.0, 200.0))
    decision = Decision()

    def predict(self, texts):
        return [
            Prediction(
                (0.99, 0.01) if "breathing" in text else (0.01, 0.99),
                (0.0, 1.0) if "poem" in text else (1.0, 0.0),
            )
            for text in texts
        ]


def corrections(count: int, seed: int, shift: float) -> list[Correction]:
    """Requests whose expected level is that of their true level, and `shift` more."""
    rng, made = random.Random(seed), []
    for _ in range(count):
        true = rng.randrange(5)
        center = min(4.0, max(0.0, true * 0.6 + shift + rng.gauss(0, 0.25)))
        weights = [2.0 ** -(abs(level - center) ** 2) for level in range(5)]
        row = tuple(weight / sum(weights) for weight in weights)
        made.append(Correction(0.0, row, decide_level(row, Decision()), true, True))
    return made
