"""How urgent the turns of written chats are read: each alone, as a request of a session, and with
the whole chat before it; and what a floor would do that no text ends.

A turn is what the user says. The first one has nothing before it and does not count.

    python scripts/studies/sessions.py --chats tests/data/sessions
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import yaml
from common import main, write_json

from vllm_semantic_sched.cli.console import make_console
from vllm_semantic_sched.lab.report.tables import make_table
from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.config.reference import PolicyRef
from vllm_semantic_sched.policy.estimates.decision import predicted_level
from vllm_semantic_sched.policy.sessions import Sessions
from vllm_semantic_sched.predict.model import TextPredictor
from vllm_semantic_sched.predict.window import continued, newest_words

URGENT = 1  # the last level that counts as urgent
LAST_TURN = 6  # that counts
_POLICY = parse_policy({"sessions": {"memory": 600.0}})


class Chat(NamedTuple):
    """A chat: its language, what happens in it, and the true level and the text of each turn."""

    language: str
    kind: str
    turns: tuple[tuple[int, str], ...]


def read_chats(folder: Path) -> list[Chat]:
    """All chats of a folder, one file for each language."""
    chats = []
    for path in sorted(folder.glob("*.yaml")):
        for entry in yaml.safe_load(path.read_text("utf-8")):
            turns = tuple((int(level), str(text)) for level, text in entry["turns"])
            chats.append(Chat(path.stem, entry["kind"], turns))
    return chats


def read_levels(predictor: TextPredictor, texts: Sequence[str]) -> list[int]:
    """The level of each text, as a server decides; the default level of one that is not judged."""
    return [
        _POLICY.default_level if reading.unreadable else predicted_level(_POLICY, reading)
        for reading in predictor.predict(texts)
    ]


def texts_alone(chats: Sequence[Chat]) -> Iterator[list[str]]:
    """What is read of the turns of each chat, if each comes alone."""
    for chat in chats:
        yield [text for _, text in chat.turns]


def texts_of_whole_chats(chats: Sequence[Chat]) -> Iterator[list[str]]:
    """The same, if a client sends the chat up to then each time."""
    for chat in chats:
        texts = []
        for end in range(1, len(chat.turns) + 1):
            earlier = tuple(text for _, text in reversed(chat.turns[: end - 1]))
            texts.append(continued(chat.turns[end - 1][1], earlier))
        yield texts


def texts_in_sessions(chats: Sequence[Chat]) -> Iterator[list[str]]:
    """The same, in sessions as a server keeps them; ten seconds between turns."""
    sessions = Sessions(PolicyRef(_POLICY))
    for number, chat in enumerate(chats):
        texts = []
        for place, (_, text) in enumerate(chat.turns):
            now = 10.0 * place
            turn = sessions.begin(str(number), "chat", now)
            turn.words = newest_words(text)
            texts.append(continued(text, turn.earlier))
            sessions.arrived(turn, now)
        sessions.clear()
        yield texts


def floors(levels: Sequence[int]) -> list[int]:
    """Levels of turns that inherit the most urgent one before, if it is urgent."""
    inherited = []
    floor = _POLICY.levels
    for level in levels:
        if level <= URGENT:
            floor = min(floor, level)
        inherited.append(min(level, floor))
    return inherited


@dataclass
class Figures:
    """Numbers of turns, and of those that are read as urgent."""

    level_0: list[int] = field(default_factory=lambda: [0, 0])
    level_1: list[int] = field(default_factory=lambda: [0, 0])
    level_4: list[int] = field(default_factory=lambda: [0, 0])
    over: list[int] = field(default_factory=lambda: [0, 0])  # of level 4 after an urgent one

    def add(self, chat: Chat, levels: Sequence[int]) -> None:
        """Count the turns of a chat that was read at these levels."""
        was_urgent = chat.turns[0][0] <= URGENT
        for (true, _), level in list(zip(chat.turns, levels, strict=True))[1:LAST_TURN]:
            counts = {0: [self.level_0], 1: [self.level_1], 4: [self.level_4]}.get(true, [])
            if true == 4 and was_urgent:
                counts.append(self.over)
            for count in counts:
                count[0] += 1
                count[1] += level <= URGENT
            was_urgent = was_urgent or true <= URGENT

    def row(self) -> dict[str, str]:
        """Shares, with the numbers behind them."""
        return {
            name: f"{100 * urgent / count:.1f} % ({urgent}/{count})" if count else "-"
            for name, (count, urgent) in vars(self).items()
        }


def measure(predictor: TextPredictor, chats: Sequence[Chat]) -> dict[str, list[list[int]]]:
    """The levels at which the turns of each chat are read, by the way in which they come."""
    ways = {
        "each turn alone": texts_alone,
        "session": texts_in_sessions,
        "whole chat": texts_of_whole_chats,
    }
    read = {}
    for way, texts_of in ways.items():
        texts = list(texts_of(chats))
        levels = iter(read_levels(predictor, [text for chat in texts for text in chat]))
        read[way] = [[next(levels) for _ in chat] for chat in texts]
    read["alone, with a floor"] = list(map(floors, read["each turn alone"]))
    return read


def figures_of(
    chats: Sequence[Chat], levels: Sequence[Sequence[int]], by: str
) -> dict[str, Figures]:
    """The figures of all chats and, under `by`, of each language or kind."""
    groups: defaultdict[str, Figures] = defaultdict(Figures)
    for chat, read in zip(chats, levels, strict=True):
        groups["all"].add(chat, read)
        groups[getattr(chat, by)].add(chat, read)
    return dict(groups)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--chats", type=Path, default=Path("tests/data/sessions"), metavar="DIR")
    parser.add_argument("--predictor", help="folder (default: the shipped one)")
    parser.add_argument("--output", type=Path, default=Path("bench-output"), metavar="DIR")


def run(args: argparse.Namespace) -> int:
    """Read all turns, print tables and write `sessions.json`."""
    chats = read_chats(args.chats)
    read = measure(TextPredictor.load(args.predictor), chats)
    console = make_console()
    found: dict[str, dict[str, dict[str, str]]] = {}
    for by in ("kind", "language"):
        found[by] = {}
        for way, levels in read.items():
            for group, figures in figures_of(chats, levels, by).items():
                if by == "kind" or way == "session":
                    found[by][f"{way}: {group}"] = figures.row()
    columns = ("level 0 read as 0 or 1", "level 1", "level 4 read as 0 or 1", "after an emergency")
    for by, rows in found.items():
        table = make_table(f"by {by}", "turns 2 to 6", *columns)
        for name, row in rows.items():
            table.add_row(name, *row.values())
        console.print(table)
    write_json(args.output / "sessions.json", found)
    return 0


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
