"""The predictor process: reads batches of texts on stdin, answers on stdout, one JSON line each.

In its own process it cannot block the engine, which survives a crash of it. It ends when its stdin
closes, so it never outlives the engine. The first line out is {"ready": {...}} or
{"failed": "why"}. A text on which reading fails has `null` as its urgency.

    -> {"id": 7, "texts": ["..."]}
    <- {"id": 7, "urgency": [[...]], "length": [[...]] or [null], "unreadable": [null or "why"]}
    <- {"id": 7, "error": "..."}, if no text could be read
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch is loaded after the number of threads is set
    from vllm_semantic_sched.policy.facts.prediction import Prediction
    from vllm_semantic_sched.predict.model import TextPredictor

_NICENESS = 10


def main() -> int:
    """Serve until stdin closes."""
    parser = argparse.ArgumentParser(description="Predictor process; started by the scheduler.")
    parser.add_argument("--model", default=None)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    # Libraries may print to stdout: move the answers to a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    # A core dump would hold texts of requests.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The engine goes first if cores are short: a prediction may be late, a token may not.
    os.nice(_NICENESS)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the accelerator belongs to the engine
    # Where scikit-learn is installed, transformers imports it, with scipy: a sixth of the start,
    # and nothing here uses it.
    sys.modules.setdefault("sklearn", None)  # type: ignore[arg-type]
    try:
        from vllm_semantic_sched.predict.model import TextPredictor

        predictor = TextPredictor.load(args.model, threads=args.threads)
        predictor.predict(["warm up"])
    except Exception as error:
        send({"failed": f"{type(error).__name__}: {error}"})
        return 1
    buckets = predictor.length_buckets
    ready = {
        "length_buckets": None if buckets is None else dataclasses.asdict(buckets),
        "decision": dataclasses.asdict(predictor.decision),
    }
    send({"ready": ready})
    for line in sys.stdin:
        send(_answer(predictor, json.loads(line)))
    return 0


def _answer(predictor: TextPredictor, message: dict[str, Any]) -> dict[str, Any]:
    texts = message["texts"]
    try:
        predictions: list[Prediction | None] = [*predictor.predict(texts)]
    except Exception as error:
        predictions = []
        if len(texts) > 1:
            # One by one: a text that fails must not cost the others their reading.
            predictions = [_read(predictor, text) for text in texts]
        if not any(predictions):
            return {"id": message["id"], "error": f"{type(error).__name__}: {error}"}
    answer = {"id": message["id"]}
    for field in ("urgency", "length", "unreadable"):
        # A text that could not be read has no prediction.
        answer[field] = [getattr(prediction, field, None) for prediction in predictions]
    return answer


def _read(predictor: TextPredictor, text: str) -> Prediction | None:
    try:
        [prediction] = predictor.predict([text])
    except Exception:
        return None
    return prediction


if __name__ == "__main__":
    sys.exit(main())
