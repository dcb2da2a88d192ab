"""Test sets of texts with parts: an emergency beside other things, and chats turn by turn.

A folder of YAML files, one for each language. A file with a mapping holds the parts that texts are
composed of (`CompositionParts`); a file with a list holds chats (`Conversation`).
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field

from vllm_semantic_sched.lab.evaluation.examples import Example, LabeledSet
from vllm_semantic_sched.policy.config.section import Section, parse_section

_Texts = Annotated[tuple[str, ...], Field(min_length=1)]
_ENDS = ".!?…。！？।؟۔ "
_URGENT = 1  # levels up to this one
_CALM = 3  # levels from this one on


class CompositionParts(Section):
    """Parts of compositions in one language."""

    emergencies: _Texts  # messages of level 0
    tasks: _Texts  # everyday requests, level 4
    joiners: _Texts  # phrases that run on from one topic to the next
    framed: _Texts  # texts with an emergency that is not happening now, level 4
    surroundings: tuple[Annotated[str, Field(pattern=r"\{text\}")], ...] = ()  # of a typed {text}


class Conversation(Section):
    """A chat: (`user`, text, level of the chat at this turn) and (`assistant`, text)."""

    kind: Literal["running", "resolved", "never"]
    turns: tuple[
        tuple[Literal["user"], str, Annotated[int, Field(ge=0, le=4)]]
        | tuple[Literal["assistant"], str],
        ...,
    ] = Field(min_length=1)


def read_composed_set(path: Path) -> LabeledSet:
    """The compositions or the chats of a folder, with the groups `place` and `language`; ValueError
    with the name of an invalid file, or if there is none."""
    files = sorted(path.glob("*.yaml"))
    data = {file.stem: yaml.safe_load(file.read_text("utf-8")) for file in files}
    if not data:
        raise ValueError(f"{path}: a folder without CSV or YAML files")
    rows: list[tuple[str, str, Example]] = []
    composed = [language for language, content in data.items() if isinstance(content, dict)]
    after = dict(zip(composed, [*composed[1:], *composed[:1]], strict=True))
    for language, content in data.items():
        name = f"{path / language}.yaml"
        composed_texts: Iterator[tuple[str, Example]]
        if isinstance(content, list):
            chats = [parse_section(Conversation, chat, name) for chat in content]
            composed_texts = itertools.chain.from_iterable(map(_turns, chats))
        else:
            parts = parse_section(CompositionParts, content, name)
            composed_texts = _compositions(parts, data[after[language]].get("tasks", ()))
        rows += [(place, language, example) for place, example in composed_texts]
    places, languages, examples = zip(*rows, strict=True)
    return LabeledSet(path.name, examples, {"place": places, "language": languages})


def _compositions(parts: CompositionParts, foreign: Sequence[str]) -> Iterator[tuple[str, Example]]:
    """Every emergency in every place, what is not urgent, and both surrounded; with the place."""
    tasks = parts.tasks

    def unpunctuated(*texts: str, joiner: str) -> str:
        return f" {joiner} ".join(text.rstrip(_ENDS) for text in texts)

    for index, message in enumerate(parts.emergencies):
        task = tasks[index % len(tasks)]
        another = tasks[(index + 1) % len(tasks)]
        joiner = parts.joiners[index % len(parts.joiners)]
        for place, text in (
            ("alone", message),
            ("before", f"{message} {task}"),
            ("after", f"{task} {message}"),
            ("between", f"{task} {message} {another}"),
            ("foreign task", f"{foreign[index % len(foreign)]} {message}"),
            ("unpunctuated, before", unpunctuated(message, task, joiner=joiner)),
            ("unpunctuated, after", unpunctuated(task, message, joiner=joiner)),
        ):
            yield place, Example(text, 0)
    for index, task in enumerate(tasks):
        yield "two tasks", Example(f"{task} {tasks[(index + 3) % len(tasks)]}", 4)
    for index, text in enumerate(parts.framed):
        yield "framed", Example(text, 4)
        yield "framed and task", Example(f"{text} {tasks[index % len(tasks)]}", 4)
    # Longer than what is read at once: all tasks, twice, around a text.
    around = [*tasks, *tasks]
    for place, texts, level in (
        ("within a long text", parts.emergencies, 0),
        ("framed within a long text", parts.framed, 4),
    ):
        for index, text in enumerate(texts):
            middle = len(around) // 4 + index % (1 + len(around) // 2)
            long = " ".join([*around[:middle], text, *around[middle:]])
            yield place, Example(long, level)
    typed = [("surrounded", text, 0) for text in parts.emergencies]
    typed += [("surrounded task", text, 4) for text in tasks]
    for (place, text, level), form in zip(typed, itertools.cycle(parts.surroundings), strict=False):
        yield place, Example(form.replace("{text}", text), level)


def _turns(chat: Conversation) -> Iterator[tuple[str, Example]]:
    """The chat as it is at each user turn, with what this turn is."""
    text = ""
    started = False
    for role, words, *level_of_turn in chat.turns:
        text += f"<|im_start|>{role}\n{words}<|im_end|>\n"
        if role == "assistant":
            continue
        [level] = level_of_turn
        if chat.kind != "never" and level <= _URGENT:
            started = True
        part = "no emergency"
        if started:
            part = "over" if level >= _CALM else "emergency"
        yield part, Example(f"{text}<|im_start|>assistant\n", level)
