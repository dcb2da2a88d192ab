"""The baseline that a neural predictor has to beat: word counts and logistic regression."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_semantic_sched.predict.buckets import bucket_of, expected_tokens, length_buckets
from vllm_semantic_sched.predict.data import Example
from vllm_semantic_sched.predict.network import URGENCY_LEVELS
from vllm_semantic_sched.predict.text import clean

_BUCKETS = 9


@dataclass(frozen=True, slots=True)
class Guess:
    """Level probabilities per text, and expected output tokens if they are predicted."""

    urgency: Sequence[Sequence[float]]
    tokens: Sequence[float] | None


class TfidfBaseline:
    """TF-IDF of words and word pairs into two logistic regressions (levels and buckets)."""

    def __init__(self, examples: Sequence[Example]) -> None:
        """Fit on `examples`; raises ImportError if scikit-learn is not installed."""
        try:
            from sklearn.feature_extraction.text import TfidfVectorizer
        except ImportError as error:
            raise ImportError(
                "the TF-IDF baseline needs scikit-learn (pip install "
                '"vllm-semantic-sched[train]"), or pass --no-baselines'
            ) from error
        self._words = TfidfVectorizer(ngram_range=(1, 2), min_df=3, sublinear_tf=True)
        features = self._words.fit_transform([clean(example.text) for example in examples])
        levels = [-1 if example.level is None else example.level for example in examples]
        lengths = [-1 if one.output_tokens is None else one.output_tokens for one in examples]
        self._buckets = length_buckets([length for length in lengths if length > 0], _BUCKETS)
        members = [
            -1 if length < 0 else bucket_of(length, self._buckets.edges) for length in lengths
        ]
        self._urgency = _fitted(features, levels)
        self._length = _fitted(features, members)

    def guess(self, texts: Sequence[str]) -> Guess:
        """Probabilities and expected lengths of `texts`."""
        features = self._words.transform([clean(text) for text in texts])
        levels = _probabilities(self._urgency, features, URGENCY_LEVELS)
        buckets = _probabilities(self._length, features, len(self._buckets.means))
        return Guess(levels, [expected_tokens(row, self._buckets) for row in buckets])


def _fitted(features: Any, labels: Sequence[int]) -> Any:
    """A logistic regression on the rows whose label is not negative."""
    from sklearn.linear_model import LogisticRegression

    rows = [place for place, label in enumerate(labels) if label >= 0]
    model = LogisticRegression(C=4.0, max_iter=600)
    return model.fit(features[rows], [labels[place] for place in rows])


def _probabilities(model: Any, features: Any, count: int) -> list[list[float]]:
    rows = []
    for shares in model.predict_proba(features):
        row = [0.0] * count
        for label, share in zip(model.classes_, shares, strict=True):
            row[int(label)] = float(share)
        rows.append(row)
    return rows
