"""Makes texts in which a message is one part among others, in every language.

An emergency keeps its level before, after and between everyday tasks, in a pasted block, in the
middle of a long text about something else, and in any turn of a chat until it is over. A quoted,
invented or finished one is level 4, and what a text claims about its own urgency changes nothing.
texts/compositions and texts/long/ hold the parts of each language.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

from vllm_semantic_sched.lab.datasets import Split
from vllm_semantic_sched.lab.evaluation.examples import Example
from vllm_semantic_sched.lab.training import messages
from vllm_semantic_sched.lab.training.noise import hasty, without_marks
from vllm_semantic_sched.lab.training.wording import (
    Parts,
    composition_parts,
    fill,
    long_texts,
    surroundings,
)

# A message's level is drawn with these weights: emergencies are what compositions hide.
_LEVEL_WEIGHTS = (6, 4, 1.5, 1, 0)
_ENGLISH = 3  # times as often as another language
_OTHER_LANGUAGE = 0.3  # of the tasks beside a message
_PROMPT = 0.3  # of the English tasks: a prompt of the data folder
_LONGEST_TASK = 300  # characters; a longer one would push the message out of the window
_NATURAL = 0.35  # of the texts about an emergency that is not one: written as a whole
_TYPED = 0.25  # texts with hasty typing
# Of the first parts, those that `opened` changes.
_ENDED = 0.3
_OPENED = 0.35
_AROUND = ("records", "pastes")  # what surrounds a text, by name in `Parts`
_SURROUNDED = (5, 4, 1)  # weights of messages, tasks and invented emergencies there
# Of long texts: where somebody's message stands, and how many texts are one after the other.
_PLACES = ("middle", "start", "end")
_PLACE_WEIGHTS = (6, 1, 2)
_CARRIERS = (5, 3, 1)  # weights of one, two, three
_UNIT_END = re.compile(r"(?<=[.?!…])\s+|(?<=[。！？।۔])|\n+")
_ASKED = 0.5  # of the calm long texts: beside a task
_CLAIMED = 0.06  # compositions that claim an urgency, which says nothing about theirs
_ENDS = ".!?…。！？।؟ "
_Text = TypeVar("_Text")
Forms = Mapping[Callable[["Draft"], Example], float]  # of a composition; how often each is drawn


@dataclass(frozen=True)
class Composer:
    """Draws compositions from the parts and messages of one split."""

    parts: Mapping[str, Parts]  # by language
    written: Mapping[str, Sequence[Sequence[str]]]  # messages by language and level
    prompts: Sequence[str]  # everyday ones in English
    calm: Sequence[str] = ()  # long texts, see `LongTexts`
    carriers: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, split: Split, written: Mapping[str, Sequence[Example]], prompts: Sequence[str]
    ) -> Self:
        """The composer of a split; four fifths of the parts belong to the training split."""
        by_level: dict[str, list[list[str]]] = {}
        for language, examples in written.items():
            by_level[language] = [
                [example.text for example in examples if example.level == level]
                for level in range(5)
            ]
        parts = composition_parts().items()
        return cls(
            parts={language: _in_split(of_language, split) for language, of_language in parts},
            written=by_level,
            prompts=[prompt for prompt in prompts if len(prompt) <= _LONGEST_TASK],
            calm=_part_of(long_texts().calm, split),
            carriers={
                language: _part_of(texts, split)
                for language, texts in long_texts().carriers.items()
            },
        )

    def draw(self, count: int, rng: random.Random, forms: Forms | None = None) -> list[Example]:
        """`count` compositions (None: of all forms) in languages at random; none without parts."""
        weights = [_ENGLISH if language == "en" else 1 for language in self.parts]
        languages = rng.choices([*self.parts], weights, k=count) if weights else []
        forms = forms or _FORMS
        chosen = rng.choices([*forms], [*forms.values()], k=len(languages))
        return [
            _perhaps_claimed(form(Draft(self, language, rng)), rng)
            for form, language in zip(chosen, languages, strict=True)
        ]


@dataclass(frozen=True)
class Draft:
    """Draws compositions in one language."""

    composer: Composer
    language: str
    rng: random.Random

    def pick(self, name: str) -> str:
        """Draw one of the language's texts; `name` is a field of `Parts`."""
        texts: Sequence[str] = getattr(self.composer.parts[self.language], name)
        return self.rng.choice(texts)

    def message(self) -> tuple[str, int]:
        """A message of levels 0 to 3, and its level."""
        rng = self.rng
        level = rng.choices(range(5), _LEVEL_WEIGHTS)[0]
        written = self.composer.written[self.language][level]
        if not written or (self.language == "en" and rng.random() < 0.5):
            return messages.level_message(level, rng), level
        return rng.choice(written), level

    def task(self) -> str:
        """An everyday request or text, at times in another language."""
        rng = self.rng
        composer = self.composer
        language = self.language
        if rng.random() < _OTHER_LANGUAGE:
            language = rng.choice(("en", rng.choice([*composer.parts])))
        if language == "en" and rng.random() < _PROMPT:
            return rng.choice(composer.prompts or [messages.everyday_prompt(rng)])
        if language not in composer.parts:
            language = self.language
        parts = composer.parts[language]
        texts = rng.choices(
            (parts.tasks, parts.small_talk, composer.written[language][4]), (7, 1.5, 1.5)
        )[0]
        return rng.choice(texts or parts.tasks)

    def tasks(self, *weights: int) -> list[str]:
        """Tasks, their number drawn with these weights of none, one, two and so on."""
        (count,) = self.rng.choices(range(len(weights)), weights)
        return [self.task() for _ in range(count)]

    def framed(self) -> str:
        """An emergency that is not happening now, at times in a text of its own."""
        harmless = self.composer.written[self.language][4]
        if harmless and self.rng.random() < _NATURAL:
            return self.rng.choice(harmless)
        matter, _ = self.message()
        if self.rng.random() < 0.5:
            matter = matter.rstrip(_ENDS)
        return fill(self.pick("frames"), matter=matter)

    def typed(self, text: str) -> str:
        """`text`, at times without accents or as typed in a hurry."""
        text = without_marks(text, self.rng)
        return hasty(text, self.rng) if self.rng.random() < _TYPED else text

    def joined(self, texts: Sequence[str]) -> str:
        """The texts in this order, in half of the cases without ends of sentences between them."""
        rng = self.rng
        if rng.random() < 0.55:
            return self.apart(texts)
        text = texts[0]
        for following in texts[1:]:
            joiner = f" {self.pick('joiners')} " if rng.random() < 0.7 else " "
            text = text.rstrip(_ENDS) + joiner + following[:1].lower() + following[1:]
        return text.rstrip(_ENDS) if rng.random() < 0.7 else text

    def apart(self, texts: Sequence[str]) -> str:
        """The texts in this order, each with its end of a sentence."""
        return self.rng.choice((" ", " ", " ", "\n", "\n\n")).join(texts)

    def opened(self, text: str) -> str:
        """`text`, at times with another end, and in English after an opening."""
        rng = self.rng
        if rng.random() < _ENDED:
            text = text.rstrip(_ENDS) + rng.choice(("", "!", "...", " ...", "!!"))
        if self.language != "en" or rng.random() > _OPENED:
            return text
        return rng.choice(surroundings().openers_neutral + surroundings().openers_calm) + text

    def in_chat(self, turns: Sequence[str], level: int) -> Example:
        """The user's turns, oldest first, in a chat template with answers between them."""
        user, answer = self.rng.choice(surroundings().exchanges)
        *earlier, newest = map(self.typed, turns)
        said = [
            fill(user, text=turn) + fill(answer, text=self.pick("assistant")) for turn in earlier
        ]
        return Example("".join(said) + fill(user, text=newest), level)

    def beside_tasks(self) -> Example:
        """A message before, after or between tasks."""
        text, level = self.message()
        texts = self.tasks(0, 6, 3, 1)
        last = len(texts)
        texts.insert(self.rng.choice((0, 0, last, last, *range(1, last))), text)
        return Example(self.typed(self.joined(texts)), level)

    def before_tasks(self) -> Example:
        """A message as a sentence of its own before tasks: everyday stories that end with a request
        begin like that, too."""
        text, level = self.message()
        return Example(self.typed(self.apart([self.opened(text), *self.tasks(0, 7, 2, 1)])), level)

    def between_tasks(self) -> Example:
        """A message as a sentence of its own between tasks."""
        text, level = self.message()
        texts = [*self.tasks(0, 4, 1), text, *self.tasks(0, 4, 1)]
        return Example(self.typed(self.apart(texts)), level)

    def two_messages(self) -> Example:
        """Two people's problems: the more urgent one counts."""
        first, first_level = self.message()
        second, second_level = self.message()
        level = min(first_level, second_level)
        return Example(self.typed(self.joined([first, second])), level)

    def surrounded(self) -> Example:
        """A message, a task or an invented emergency in a record of other software, or beside a
        pasted text, a tool's result or a dispatcher's instructions: these change no level."""
        rng = self.rng
        drawn = (self.message(), (self.task(), 4), (self.framed(), 4))
        [(text, level)] = rng.choices(drawn, _SURROUNDED)
        block = " ".join(self.task() for _ in range(rng.randint(1, 3)))
        form = rng.choice((rng.choice(surroundings().blocks), *map(self.pick, _AROUND)))
        filled = fill(form, system=self.pick("systems"), block=block, text=self.typed(text))
        return Example(filled, level)

    def only_tasks(self) -> Example:
        """One to three tasks."""
        first, *others = self.tasks(0, 6, 3, 1)
        return Example(self.typed(self.joined([self.opened(first), *others])), 4)

    def only_framed(self) -> Example:
        """A quoted or invented emergency, alone or beside a task."""
        texts = [self.framed()]
        if self.rng.random() < 0.4:
            texts.insert(self.rng.randint(0, 1), self.task())
        return Example(self.typed(self.joined(texts)), 4)

    def framed_and_true(self) -> Example:
        """An invented emergency beside a message: the message counts."""
        text, level = self.message()
        texts = [self.framed(), text]
        self.rng.shuffle(texts)
        return Example(self.typed(self.rng.choice((" ", "\n")).join(texts)), level)

    def chat(self) -> Example:
        """A chat with a running emergency."""
        turns, level = self.running()
        return self.in_chat(turns, level)

    def running(self) -> tuple[list[str], int]:
        """User turns, oldest first, and the level of the message in one of them: later ones inherit
        it."""
        rng = self.rng
        turns = self.tasks(5, 3, 2, 1)
        text, level = self.message()
        if rng.random() < 0.25:
            texts = [text, self.task()]
            rng.shuffle(texts)
            text = self.joined(texts)
        words = text.split()
        if len(words) < 8 or rng.random() < 0.75:
            turns.append(text)
        else:  # in two turns
            cut = rng.randint(3, len(words) - 3)
            turns += [" ".join(words[:cut]), " ".join(words[cut:])]
        for _ in range(rng.choices(range(5), (2, 4, 3, 2, 1))[0]):
            answer = self.pick("answers")
            task = self.task()
            message, message_level = self.message()
            following = (
                (answer, level),
                (task, level),
                (self.joined([answer, task]), level),
                (message, min(level, message_level)),
            )
            turn, level = rng.choices(following, (12, 3, 3, 2))[0]
            turns.append(turn)
        return turns, level

    def ended(self) -> list[str]:
        """User turns of an emergency that is over, oldest first."""
        turns, _ = self.running()
        over = self.pick("over")
        if self.rng.random() < 0.4:
            over = self.joined([over, self.task()])
        return [*turns, over]

    def chat_that_is_over(self) -> Example:
        """A chat whose emergency is over, at times with everyday turns after it."""
        return self.in_chat([*self.ended(), *self.tasks(4, 3, 1)], 4)

    def chat_that_begins_again(self) -> Example:
        """A chat in which an emergency has ended or was invented, and a message follows."""
        before = self.ended() if self.rng.random() < 0.5 else [self.framed()]
        turns, level = self.running()
        return self.in_chat([*before, *turns], level)

    def chat_without_one(self) -> Example:
        """A chat about everyday things or an invented emergency."""
        turns = [self.task() for _ in range(self.rng.randint(1, 3))]
        if self.rng.random() < 0.6:
            turns.insert(self.rng.randint(0, len(turns)), self.framed())
        return self.in_chat(turns, 4)

    def written_chat(self) -> Example:
        """The first turns of a chat that was written as a whole, at times after everyday ones."""
        chat = self.rng.choice(self.composer.parts[self.language].chats)
        kept = chat[: self.rng.randint(1, len(chat))]
        turns = self.tasks(5, 2, 1)
        return self.in_chat([*turns, *(turn[2:] for turn in kept)], int(kept[-1][0]))

    def long_message(self) -> Example:
        """A message that somebody typed into a long text, mostly in its middle."""
        text, level = self.message()
        return Example(self.within_long(self.typed(text)), level)

    def long_framed(self) -> Example:
        """An emergency that is not happening now in a long text."""
        return Example(self.within_long(self.framed()), 4)

    def long_calm(self) -> Example:
        """A long text full of words of emergencies, or without any, at times beside a task."""
        rng = self.rng
        (count,) = rng.choices((1, 2, 3), _CARRIERS)
        texts = [
            self.calm() if rng.random() < 0.75 else "\n".join(self.carrier()) for _ in range(count)
        ]
        if rng.random() < _ASKED:
            texts.insert(rng.choice((0, len(texts))), self.task())
        return Example("\n\n".join(texts), 4)

    def within_long(self, text: str) -> str:
        """A long text with `text` between two of its sentences or lines, or at an end."""
        rng = self.rng
        if rng.random() < 0.3:
            units = [unit for unit in _UNIT_END.split(self.calm()) if unit]
        else:
            units = self.carrier()
        place = rng.choices(_PLACES, _PLACE_WEIGHTS)[0]
        at = 0 if place == "start" else len(units)
        if place == "middle" and len(units) > 2:
            at = rng.randint(1, len(units) - 1)
        units.insert(at, text)
        if rng.random() < _ASKED:
            units.insert(rng.choice((0, len(units))), self.task())
        return rng.choice(("\n", "\n", " ", "\n\n")).join(units)

    def calm(self) -> str:
        """A long text of no emergency that sounds like one."""
        return self.rng.choice(self.composer.calm or [self.framed()])

    def many_tasks(self) -> list[str]:
        """As many tasks as make a long text."""
        return [self.task() for _ in range(self.rng.randint(4, 12))]

    def carrier(self) -> list[str]:
        """Lines of one to three long texts without words of emergencies, or of tasks."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.2:
            return self.many_tasks()
        if kind < 0.3:
            return [messages.source_code(rng) for _ in range(rng.randint(2, 5))]
        language = self.language if rng.random() < 0.6 else "en"
        texts = self.composer.carriers.get(language) or self.composer.carriers.get("en")
        if not texts:
            return self.many_tasks()
        (count,) = rng.choices((1, 2, 3), _CARRIERS)
        chosen = rng.sample(texts, min(count, len(texts)))
        return [line for text in chosen for line in text.splitlines() if line.strip()]


def _perhaps_claimed(example: Example, rng: random.Random) -> Example:
    if rng.random() >= _CLAIMED:
        return example
    claim = rng.choice(surroundings().claims).strip()
    form = rng.choice(surroundings().claimed)
    return replace(example, text=fill(form, claim=claim, text=example.text))


_FORMS: Forms = {
    Draft.beside_tasks: 34,
    Draft.before_tasks: 20,
    Draft.between_tasks: 8,
    Draft.two_messages: 3,
    Draft.surrounded: 30,
    Draft.only_tasks: 15,
    Draft.only_framed: 20,
    Draft.framed_and_true: 4,
    Draft.chat: 22,
    Draft.written_chat: 36,
    Draft.chat_that_is_over: 15,
    Draft.chat_that_begins_again: 5,
    Draft.chat_without_one: 12,
    Draft.long_message: 34,
    Draft.long_framed: 16,
    Draft.long_calm: 22,
}


def _in_split(parts: Parts, split: Split) -> Parts:
    """The texts of each kind that belong to a split: every fifth to validation, all if too few."""
    kept = {}
    for name, texts in parts:
        kept[name] = _part_of(texts, split)
    return Parts(**kept)


def _part_of(texts: Sequence[_Text], split: Split) -> tuple[_Text, ...]:
    if split == "train":
        chosen = [text for place, text in enumerate(texts) if place % 5 != 4]
    else:
        chosen = [*texts[4::5]]
    return tuple(chosen or texts)
