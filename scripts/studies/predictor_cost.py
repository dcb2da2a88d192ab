"""What a prediction costs on this machine's processor: latency, throughput, size of the weights."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_semantic_sched.predict.model import SHIPPED_WEIGHTS, TextPredictor

BATCH = 16
"""Texts in one batch of the throughput measurement, the policy's default `max_batch`."""
BATCH_WORDPIECES = 64
"""Wordpieces of each of its texts."""

# Words that are one wordpiece each, so that a text of a wanted length can be made of them.
_SENTENCE = (
    "my father is old and since this morning he has had a heavy feeling in his chest he looks "
    "very white and says his left arm feels strange it would take us an hour to drive to the "
    "hospital what should i do first"
)
_FRAME = 2  # [CLS] and [SEP]
_WARM_UP = 5


@dataclass(frozen=True)
class Latency:
    """Seconds from text to prediction, one text at a time on one thread."""

    wordpieces: int
    p50: float
    p99: float


@dataclass(frozen=True)
class Throughput:
    """Predictions per second in batches of `BATCH`, in one process of so many threads."""

    threads: int
    requests_per_second: float


def text_of(wordpieces: int) -> str:
    """A text that the shipped predictor reads as so many wordpieces, frame included; about as
    many for another one."""
    return " ".join(itertools.islice(itertools.cycle(_SENTENCE.split()), wordpieces - _FRAME))


def measure_latency(predictor: TextPredictor, wordpieces: int, repeats: int) -> Latency:
    """Predict one text `repeats` times."""
    text = text_of(wordpieces)
    seconds = []
    for repeat in range(_WARM_UP + repeats):
        started = time.perf_counter()
        predictor.predict([text])
        if repeat >= _WARM_UP:
            seconds.append(time.perf_counter() - started)
    p50, p99 = np.percentile(seconds, [50, 99])
    return Latency(wordpieces, float(p50), float(p99))


def measure_throughput(path: str | None, threads: int, seconds: float) -> Throughput:
    """Predict full batches one after the other for at least `seconds`.

    Args:
        path: as for `TextPredictor.load`, which also sets the thread count of this process.
    """
    predictor = TextPredictor.load(path, threads=threads)
    texts = [text_of(BATCH_WORDPIECES)] * BATCH
    predictor.predict(texts)
    batches = 0
    started = time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        predictor.predict(texts)
        batches += 1
    return Throughput(threads, batches * BATCH / elapsed)


def thread_counts() -> list[int]:
    """One, two, and all cores that this process may use, as far as there are so many."""
    cores = len(os.sched_getaffinity(0))
    return sorted({1, min(2, cores), cores})


def weights_bytes(path: str | None) -> int | None:
    """Size of all files in the predictor's folder; None for a hub id."""
    folder = SHIPPED_WEIGHTS if path is None else Path(path)
    if not folder.is_dir():
        return None
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
