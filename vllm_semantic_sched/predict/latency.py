"""How long a prediction takes: `python -m vllm_semantic_sched.predict.latency [MODEL]`."""

import statistics
import sys
import time

from vllm_semantic_sched.predict.model import TextPredictor

_SENTENCE = (
    "Hello, my father is 71 and since this morning he has had a heavy feeling in his chest, he "
    "looks pale and says his left arm feels strange. It would take us twenty minutes to drive to "
    "the hospital. What should I do first?"
)
_BATCHES = (1, 4, 16)
_REPEATS = 30


def measure(predictor: TextPredictor, batch: int) -> tuple[float, float]:
    """Median and best milliseconds of predicting `batch` texts of about 60 wordpieces at once."""
    texts = [f"{_SENTENCE} {number}" for number in range(batch)]
    predictor.predict(texts)
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        predictor.predict(texts)
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times), min(times)


def main() -> int:
    """Print a table of latencies on one thread."""
    predictor = TextPredictor.load(sys.argv[1] if len(sys.argv) > 1 else None)
    print("texts  median ms  best ms")
    for batch in _BATCHES:
        median, best = measure(predictor, batch)
        print(f"{batch:5}  {median:9.1f}  {best:7.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
