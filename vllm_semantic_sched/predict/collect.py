"""Asks a running server many prompts and notes how long its answers are."""

from __future__ import annotations

import asyncio
import csv
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

_ANSWER_SECONDS = 600.0


def collect_lengths(
    url: str,
    prompts: Path,
    table: Path,
    *,
    model: str | None = None,
    max_tokens: int,
    concurrency: int,
) -> None:
    """Write `table`, a CSV with the columns text,output_tokens, one row per answered prompt.

    Each row is written when its answer is there, and prompts that the table already holds are
    not asked again: an interrupted collection goes on where it stopped. Answers that
    `max_tokens` cut are left out, since how long they would have become is unknown.

    Args:
        url: of an OpenAI-compatible server, with or without `/v1`.
        prompts: one prompt per line, or a CSV with the column text.
        model: its served name; None for the first that the server lists.

    Raises:
        ValueError: there are no prompts, or the server answered none of them.
    """
    wanted = list(dict.fromkeys(_read_prompts(prompts)))
    if not wanted:
        raise ValueError(f"{prompts} holds no prompts")
    table.parent.mkdir(parents=True, exist_ok=True)
    known = _known(table)
    asyncio.run(
        _collect(
            url.rstrip("/").removesuffix("/v1"),
            [text for text in wanted if text not in known],
            table,
            model,
            max_tokens,
            concurrency,
        )
    )


def _read_prompts(path: Path) -> list[str]:
    if path.suffix.lower() != ".csv":
        return [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if "text" not in (reader.fieldnames or []):
            raise ValueError(f"{path} needs the column text; it has {reader.fieldnames}")
        return [row["text"] for row in reader if row["text"].strip()]


def _known(table: Path) -> set[str]:
    if not table.exists():
        with table.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerow(("text", "output_tokens"))
        return set()
    with table.open(encoding="utf-8", newline="") as file:
        return {row["text"] for row in csv.DictReader(file)}


async def _collect(
    url: str, texts: list[str], table: Path, model: str | None, max_tokens: int, concurrency: int
) -> None:
    import aiohttp

    problems: list[str] = []
    cut = answered = 0
    seats = asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
    with table.open("a", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            try:
                model = model or await _first_model(session, url)
            except (aiohttp.ClientError, TimeoutError, LookupError) as error:
                raise ValueError(f"{url} lists no models: {error!r}") from error
            bar = tqdm(total=len(texts), desc=f"asking {model}", mininterval=1)

            async def ask(text: str) -> None:
                nonlocal answered, cut
                async with seats:
                    try:
                        tokens, finish = await _length(session, url, model, text, max_tokens)
                    except (aiohttp.ClientError, TimeoutError, LookupError, TypeError) as error:
                        problems.append(repr(error))
                    else:
                        answered += 1
                        if finish == "length":
                            cut += 1
                        else:
                            rows.writerow((text, tokens))
                            file.flush()
                bar.update()

            await asyncio.gather(*(ask(text) for text in texts))
            bar.close()
    if problems:
        print(f"{len(problems)} prompts failed, the first with {problems[0]}", file=sys.stderr)
    if cut:
        print(f"{cut} answers reached --max-tokens and are left out", file=sys.stderr)
    if texts and not answered:
        raise ValueError(f"{url} answered none of {len(texts)} prompts")


async def _first_model(session: Any, url: str) -> str:
    async with session.get(f"{url}/v1/models") as reply:
        reply.raise_for_status()
        return str((await reply.json())["data"][0]["id"])


async def _length(
    session: Any, url: str, model: str, text: str, max_tokens: int
) -> tuple[int, str]:
    """Output tokens and finish reason of one answer, as a chat where the model has a template."""
    body: dict[str, Any] = {"model": model, "max_tokens": max_tokens}
    chat = body | {"messages": [{"role": "user", "content": text}]}
    async with session.post(f"{url}/v1/chat/completions", json=chat) as reply:
        answer = await reply.json() if reply.status == 200 else None
    if answer is None:
        plain = body | {"prompt": text}
        async with session.post(f"{url}/v1/completions", json=plain) as reply:
            reply.raise_for_status()
            answer = await reply.json()
    return int(answer["usage"]["completion_tokens"]), str(answer["choices"][0]["finish_reason"])
