"""Baselines for a neural predictor: constants, and linear models of word counts."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import Pipeline, make_pipeline

from vllm_semantic_sched.lab.evaluation.examples import Example
from vllm_semantic_sched.predict import URGENCY_LEVELS
from vllm_semantic_sched.predict.window import clean

MAJORITY = "majority class"
MEDIAN = "median length"
TFIDF_LEVELS = "TF-IDF + logistic regression"
TFIDF_LENGTHS = "TF-IDF + ridge"

# From this many texts on, words of fewer than three of them are noise; a tiny corpus has no others.
_RARE_FROM = 1000


class Guess(NamedTuple):
    """A predictor's output for n texts: n rows of level probabilities and n expected output lengths
    in tokens; None for what it does not predict."""

    urgency: Sequence[Sequence[float]] | None = None
    tokens: Sequence[float] | None = None


Guesser = Callable[[Sequence[str]], Guess]


def constant_baselines(levels: Sequence[int], lengths: Sequence[int]) -> dict[str, Guesser]:
    """Guessers that always say the most frequent of `levels`, or the median of `lengths`: the best
    constants, because they know the labels that they are measured on."""
    guessers: dict[str, Guesser] = {}
    if levels:
        frequent = max(range(URGENCY_LEVELS), key=levels.count)
        row = tuple(float(level == frequent) for level in range(URGENCY_LEVELS))
        guessers[MAJORITY] = lambda texts: Guess(urgency=[row] * len(texts))
    if lengths:
        middle = float(statistics.median(lengths))
        guessers[MEDIAN] = lambda texts: Guess(tokens=[middle] * len(texts))
    return guessers


def tfidf_baselines(examples: Sequence[Example]) -> dict[str, Guesser]:
    """Linear models of TF-IDF of words and word pairs: logistic regression for the levels and ridge
    regression on the logarithm of the tokens, each fitted to the examples with that label.

    A baseline is left out without two different levels, or two lengths. ValueError if the texts
    hold no words.
    """
    leveled = [example for example in examples if example.level is not None]
    sized = [example for example in examples if example.output_tokens is not None]
    guessers: dict[str, Guesser] = {}
    if len({example.level for example in leveled}) > 1:
        guessers[TFIDF_LEVELS] = _levels_guesser(leveled)
    if len(sized) > 1:
        guessers[TFIDF_LENGTHS] = _lengths_guesser(sized)
    return guessers


def _levels_guesser(examples: Sequence[Example]) -> Guesser:
    regression = LogisticRegression(C=4.0, max_iter=600)
    model = _fitted(regression, examples, [example.level for example in examples])

    def guess(texts: Sequence[str]) -> Guess:
        shares = numpy.zeros((len(texts), URGENCY_LEVELS))
        shares[:, model.classes_] = model.predict_proba(texts)
        return Guess(urgency=shares.tolist())

    return guess


def _lengths_guesser(examples: Sequence[Example]) -> Guesser:
    # Lengths span three orders of magnitude, and errors are relative.
    lengths = [example.output_tokens or 1 for example in examples]
    model = _fitted(Ridge(), examples, numpy.log(lengths))
    return lambda texts: Guess(tokens=numpy.maximum(1.0, numpy.exp(model.predict(texts))).tolist())


def _fitted(
    regression: LogisticRegression | Ridge, examples: Sequence[Example], labels: Any
) -> Pipeline:
    words = TfidfVectorizer(
        preprocessor=lambda text: clean(text).lower(),
        ngram_range=(1, 2),
        min_df=3 if len(examples) >= _RARE_FROM else 1,
        sublinear_tf=True,
    )
    return make_pipeline(words, regression).fit([example.text for example in examples], labels)
