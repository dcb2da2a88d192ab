"""A coded visit and a predictor of two levels, for tests of training and evaluation."""

from vllm_semantic_sched.policy.facts.prediction import LengthBuckets, Prediction
from vllm_semantic_sched.sim.datasets import TriageVisit

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

    def predict(self, texts):
        return [
            Prediction(
                (0.99, 0.01) if "breathing" in text else (0.01, 0.99),
                (0.0, 1.0) if "poem" in text else (1.0, 0.0),
            )
            for text in texts
        ]
