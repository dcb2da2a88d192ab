"""Collects the output lengths of a running server's answers to many prompts."""

import asyncio
import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from tqdm import tqdm

_ANSWER_SECONDS = 600.0


@dataclass
class Collected:
    """Prompts answered, answers that reached the limit on tokens, a message per failed prompt."""

    answered: int = 0
    cut: int = 0
    problems: list[str] = field(default_factory=list)


def collect_lengths(
    url: str, prompts: Path, table: Path, *, model: str | None, max_tokens: int, concurrency: int
) -> Collected:
    """Write `table`, a CSV with the columns text,output_tokens, a row as each answer arrives.

    Prompts that it already holds are not sent again: an interrupted collection resumes. Answers
    that `max_tokens` cut count as that long: without them, prompts for long answers would look like
    any others.

    Args:
        url: of an OpenAI-compatible server, with or without `/v1`.
        prompts: one prompt per line, or a CSV with the column text.
        model: its served name; None for the first that the server lists.

    Raises ValueError if there are no prompts, or the server answered none of them.
    """
    wanted = list(dict.fromkeys(_read_prompts(prompts)))
    if not wanted:
        raise ValueError(f"{prompts} holds no prompts")
    table.parent.mkdir(parents=True, exist_ok=True)
    known = set(_text_column(table)) if table.exists() and table.stat().st_size else set()
    texts = [text for text in wanted if text not in known]
    base = url.rstrip("/").removesuffix("/v1")
    body = {"model": model, "max_tokens": max_tokens}
    collected = asyncio.run(_collect(base, body, texts, table, concurrency))
    if texts and not collected.answered:
        raise ValueError(
            f"{url} answered none of {len(texts)} prompts; the first failed with "
            f"{collected.problems[0]}"
        )
    return collected


def _read_prompts(path: Path) -> list[str]:
    if path.suffix.lower() == ".csv":
        return list(filter(str.strip, _text_column(path)))
    return list(filter(None, map(str.strip, path.read_text("utf-8").splitlines())))


def _text_column(path: Path) -> list[str]:
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if "text" not in (reader.fieldnames or []):
            raise ValueError(f"{path} needs the column text; it has {reader.fieldnames}")
        return [row["text"] for row in reader]


async def _collect(
    url: str, body: dict[str, Any], texts: list[str], table: Path, concurrency: int
) -> Collected:
    collected = Collected()
    seats = asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        try:
            body["model"] = body["model"] or await _first_model(session, url)
        except (aiohttp.ClientError, TimeoutError, LookupError) as error:
            raise ValueError(f"{url} lists no models: {error!r}") from error
        bar = tqdm(total=len(texts), desc="prompts answered", mininterval=1)
        with bar, table.open("a", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            if not file.tell():
                rows.writerow(("text", "output_tokens"))

            async def send(text: str) -> None:
                async with seats:
                    try:
                        tokens, finish = await _length(session, url, body, text)
                    except (aiohttp.ClientError, TimeoutError, LookupError, TypeError) as error:
                        collected.problems.append(repr(error))
                    else:
                        collected.answered += 1
                        collected.cut += finish == "length"
                        rows.writerow((text, tokens))
                        file.flush()
                bar.update()

            await asyncio.gather(*(send(text) for text in texts))
    return collected


async def _first_model(session: Any, url: str) -> str:
    async with session.get(f"{url}/v1/models") as reply:
        reply.raise_for_status()
        return str((await reply.json())["data"][0]["id"])


async def _length(session: Any, url: str, body: dict[str, Any], text: str) -> tuple[int, str]:
    """Output tokens and finish reason of one answer, as a chat if the model has a template."""
    chat = body | {"messages": [{"role": "user", "content": text}]}
    async with session.post(f"{url}/v1/chat/completions", json=chat) as reply:
        answer = await reply.json() if reply.status == 200 else None
    if answer is None:
        async with session.post(f"{url}/v1/completions", json=body | {"prompt": text}) as reply:
            reply.raise_for_status()
            answer = await reply.json()
    return int(answer["usage"]["completion_tokens"]), str(answer["choices"][0]["finish_reason"])
