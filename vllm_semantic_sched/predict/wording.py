"""The form of a level's sentences, and how one of their alternatives is chosen."""

import random
import re
from dataclasses import dataclass

_CHOICE = re.compile(r"\[([^\[\]]*)\]")


@dataclass(frozen=True, slots=True)
class Wording:
    """Sentences of one urgency level, by who says them.

    `third` continues a subject ("my dad ..."), `first` is said by the patient, `scene` needs
    no person, and `clinical` is the shorthand of a dispatcher or a nurse. `told` and `handover`
    are whole messages, of people and of professionals.
    """

    level: int
    third: tuple[str, ...]
    first: tuple[str, ...]
    scene: tuple[str, ...]
    clinical: tuple[str, ...]
    told: tuple[str, ...]
    handover: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Person:
    """Someone a message is about: how the speaker calls them, and their pronouns."""

    name: str
    he: str
    him: str
    his: str

    def fill(self, sentence: str) -> str:
        """`sentence` with {who}, {he}, {him} and {his} filled in."""
        filled = sentence.replace("{who}", self.name)
        filled = filled.replace("{his}self", {"his": "himself", "her": "herself"}[self.his])
        return filled.replace("{he}", self.he).replace("{him}", self.him).replace("{his}", self.his)


def choose(sentence: str, rng: random.Random) -> str:
    """`sentence` with each `[a|b]` replaced by one of its alternatives, innermost first."""
    while match := _CHOICE.search(sentence):
        picked = rng.choice(match.group(1).split("|"))
        sentence = sentence[: match.start()] + picked + sentence[match.end() :]
    return " ".join(sentence.split())


_MEN = (
    "my dad|my father|my husband|my son|my brother|my grandpa|my grandfather|my uncle|my boyfriend"
    "|a man|this guy|the old man next door|my neighbor|my coworker|a student|my friend|my boss"
    "|a guy at the gym|the man in front of me|my {age}-year-old son|my {young} year old boy"
    "|my {old} year old dad|a {age} year old man|the driver|one of the workers|my roommate|he"
)
_WOMEN = (
    "my mom|my mother|my wife|my daughter|my sister|my grandma|my grandmother|my aunt"
    "|my girlfriend|a woman|this lady|the lady next door|my neighbour|my colleague|a classmate"
    "|my friend|a passenger|my teacher|my {age}-year-old daughter|my {young} year old girl"
    "|my {old} year old mother|a {age} year old woman|a customer|my flatmate|my kid|my baby|she"
)


def person(rng: random.Random) -> Person:
    """Someone at random, with an age in some cases."""
    male = rng.random() < 0.5
    name = rng.choice((_MEN if male else _WOMEN).split("|"))
    name = name.replace("{age}", str(rng.randint(3, 90)))
    name = name.replace("{young}", str(rng.randint(1, 12)))
    name = name.replace("{old}", str(rng.randint(55, 92)))
    return Person(name, "he", "him", "his") if male else Person(name, "she", "her", "her")
