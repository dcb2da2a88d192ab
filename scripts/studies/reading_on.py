"""How well output lengths are ranked before an answer, and while it grows: by the shipped model, by
one that has learned from the same server's answers, by another answer of that server to the same
prompt, by a ridge regression, and by a regression that reads on, which sees the end of the answer
so far at every 32nd token.

Collects answers of a running server (resumable), holds a fifth of them out by a digest, and prints
Kendall's tau of the predicted with the true tokens left, for the held-out answers that ended, at
their start and after 25, 50 and 75 %, and for all of them, cut ones as they are, at the start.

    python scripts/studies/reading_on.py --url http://127.0.0.1:8000 --prompts prompts.txt \\
        --answers answers.jsonl --learned MODEL
"""

import argparse
import asyncio
import json
import math
from collections.abc import Callable, Sequence
from hashlib import md5
from pathlib import Path
from typing import Any

from common import main

from vllm_semantic_sched.cli.console import make_console
from vllm_semantic_sched.lab.evaluation.baselines import TFIDF_LENGTHS, tfidf_baselines
from vllm_semantic_sched.lab.evaluation.examples import Example, write_examples
from vllm_semantic_sched.lab.evaluation.metrics import kendall_tau
from vllm_semantic_sched.lab.report.tables import make_table
from vllm_semantic_sched.policy.estimates.length import expected_output_tokens
from vllm_semantic_sched.predict.model import TextPredictor

_EVERY = 32  # tokens between two readings of a growing answer
_SEEN = 300  # characters at the end of the answer so far
_PLACES = (0.0, 0.25, 0.5, 0.75)
_AT_ONCE = 24

Answer = dict[str, Any]
Left = Callable[[Answer, int], float]
"""Tokens left of an answer of which so many are there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--url", help="OpenAI-compatible server; default: only the stored answers")
    parser.add_argument("--prompts", type=Path, help="one per line")
    parser.add_argument("--answers", type=Path, required=True, help="JSON lines, kept and added to")
    parser.add_argument("--max-tokens", type=int, default=512, help="longest answer (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling (%(default)s)")
    parser.add_argument("--again", type=Path, help="compare other answers to the same prompts")
    parser.add_argument("--learned", help="model that `semsched train length` wrote")
    parser.add_argument("--training-csv", type=Path, help="write the training part and exit")


async def collect(
    url: str, prompts: Sequence[str], path: Path, max_tokens: int, temperature: float
) -> None:
    """Append the answers to prompts that have none yet."""
    import aiohttp

    known = {answer["text"] for answer in read(path)}
    seats = asyncio.Semaphore(_AT_ONCE)
    timeout = aiohttp.ClientTimeout(total=3600)
    async with aiohttp.ClientSession(url, timeout=timeout) as session:
        async with session.get("/v1/models") as reply:
            model = (await reply.json())["data"][0]["id"]

        async def ask(text: str) -> None:
            body = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
            body |= {"messages": [{"role": "user", "content": text}]}
            async with seats, session.post("/v1/chat/completions", json=body) as reply:
                reply.raise_for_status()
                answer = await reply.json()
            choice = answer["choices"][0]
            row = {
                "text": text,
                "answer": choice["message"]["content"],
                "tokens": answer["usage"]["completion_tokens"],
                "finish": choice["finish_reason"],
            }
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")

        await asyncio.gather(*(ask(text) for text in dict.fromkeys(prompts) if text not in known))


def read(path: Path) -> list[Answer]:
    """The stored answers."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def held_out(answer: Answer) -> bool:
    """Whether an answer is not trained on."""
    return md5(answer["text"].encode()).digest()[0] % 5 == 0


def by_buckets(predictor: TextPredictor, answers: Sequence[Answer]) -> Left:
    """The estimate that the scheduler uses: buckets that an answer has outlived drop out."""
    texts = [answer["text"] for answer in answers]
    predictions = dict(zip(texts, predictor.predict(texts), strict=True))
    buckets = predictor.length_buckets
    assert buckets is not None

    def left(answer: Answer, there: int) -> float:
        shares = predictions[answer["text"]].length
        assert shares is not None
        return expected_output_tokens(shares, buckets, there, "mean") - there

    return left


def by_ridge(training: Sequence[Answer], answers: Sequence[Answer]) -> Left:
    """A ridge regression on the words of the prompt."""
    examples = [Example(answer["text"], None, answer["tokens"]) for answer in training]
    texts = [answer["text"] for answer in answers]
    tokens = tfidf_baselines(examples)[TFIDF_LENGTHS](texts).tokens
    assert tokens is not None
    guessed = dict(zip(texts, tokens, strict=True))
    return lambda answer, there: max(1.0, guessed[answer["text"]] - there)


def reading_on(training: Sequence[Answer], first: Left) -> Left:
    """A ridge regression on the end of the answer so far, its length and the first estimate, at
    every 32nd token of the training answers."""
    import numpy
    from scipy.sparse import csr_matrix, hstack
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import Ridge

    words = TfidfVectorizer(analyzer="char_wb", ngram_range=(1, 4), min_df=3, sublinear_tf=True)
    places = [
        (answer, there) for answer in training for there in range(_EVERY, answer["tokens"], _EVERY)
    ]
    words.fit([end(answer, there) for answer, there in places])

    def features(rows: Sequence[tuple[Answer, int]]) -> Any:
        numbers = [
            [math.log(there), math.log(first(answer, 0)), math.log(first(answer, there))]
            for answer, there in rows
        ]
        ends = words.transform([end(answer, there) for answer, there in rows])
        return hstack([ends, csr_matrix(numbers)])

    model = Ridge(alpha=3.0)
    tokens_left = [answer["tokens"] - there for answer, there in places]
    model.fit(features(places), numpy.log(tokens_left))

    def left(answer: Answer, there: int) -> float:
        read_at = there // _EVERY * _EVERY
        if not read_at:
            return first(answer, there)
        return float(numpy.exp(model.predict(features([(answer, read_at)]))[0])) - there + read_at

    return left


def end(answer: Answer, there: int) -> str:
    """The end of the first `there` tokens of an answer, about."""
    text: str = answer["answer"]
    return text[: round(len(text) * there / answer["tokens"])][-_SEEN:]


def agreement(answers: Sequence[Answer], left: Left, place: float) -> float:
    """Kendall's tau of the tokens left when so much of each answer is there."""
    pairs = [(answer, int(place * answer["tokens"])) for answer in answers]
    truth = [answer["tokens"] - there for answer, there in pairs]
    return kendall_tau(truth, [left(answer, there) for answer, there in pairs])


def run(args: argparse.Namespace) -> int:
    """Collect, train and print the table."""
    if args.url:
        prompts = [line.strip() for line in args.prompts.read_text("utf-8").splitlines()]
        wanted = [line for line in prompts if line]
        asyncio.run(collect(args.url, wanted, args.answers, args.max_tokens, args.temperature))
    answers = read(args.answers)
    training = [answer for answer in answers if not held_out(answer)]
    unseen = [answer for answer in answers if held_out(answer)]
    ended = [answer for answer in unseen if answer["finish"] == "stop"]
    if args.training_csv:
        rows = [Example(answer["text"], None, answer["tokens"]) for answer in training]
        write_examples(rows, args.training_csv)
        return 0
    ways: dict[str, Left] = {"shipped": by_buckets(TextPredictor.load(None, 2), answers)}
    if args.learned:
        ways["learned"] = by_buckets(TextPredictor.load(args.learned, 2), answers)
    if args.again:
        again = {answer["text"]: answer["tokens"] for answer in read(args.again)}
        ways["another answer"] = lambda answer, there: max(1, again[answer["text"]] - there)
    ways["ridge on the prompt"] = by_ridge(training, unseen)
    whole = [answer for answer in training if answer["finish"] == "stop"]
    ways["reading on"] = reading_on(whole, ways.get("learned", ways["shipped"]))
    title = f"Kendall's tau of {len(ended)} unseen answers ({len(training)} to learn from)"
    heads = (f"{len(unseen)} at start", *(f"{place:.0%} there" for place in _PLACES))
    table = make_table(title, "tokens left by", *heads)
    for name, left in ways.items():
        cells = [agreement(unseen, left, 0.0)]
        cells += [agreement(ended, left, place) for place in _PLACES]
        table.add_row(name, *(f"{cell:.3f}" for cell in cells))
    make_console().print(table)
    return 0


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
