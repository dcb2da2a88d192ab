"""Makes messages of an urgency level, and prompts that are not urgent, from the wordings."""

import functools
import random
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from vllm_semantic_sched.lab.training.wording import (
    Person,
    capital,
    choose,
    fill,
    harmless,
    person,
    surroundings,
    wordings,
)

_LINES_OF_CODE = 20
_ALARMED = (0.35, 0.3, 0.2, 0.12, 0.08)  # by level; alarm occurs at every one, so it proves nothing


def level_message(level: int, rng: random.Random) -> str:
    """A message of urgency level 0 to 4 in one of its registers."""
    wording = wordings()[level]
    register = rng.choices(
        ("third", "first", "scene", "clinical", "told", "handover"), (5, 3, 2, 1, 4.5, 1.3)
    )[0]
    someone = person(rng)
    sentence = someone.fill(choose(rng.choice(getattr(wording, register)), rng))
    match register:
        case "clinical":
            return _clinical_line(sentence, rng)
        case "handover":
            return f"{sentence}."
        case "told":
            return _told(sentence, rng)
    return _said(sentence, register, level, someone, rng)


def harmless_prompt(rng: random.Random) -> str:
    """A prompt of the least urgent level; half of them use an emergency's vocabulary."""
    source = harmless().distractors if rng.random() < 0.6 else harmless().everyday
    sentence = fill(rng.choice(source), noun=rng.choice(harmless().emergency_nouns))
    sentence = choose(sentence, rng)
    if rng.random() < 0.08:
        sentence = f"{sentence} {rng.choice(surroundings().questions)}"
    draw = rng.random()
    if draw < 0.12:
        sentence = rng.choice(surroundings().openers_calm) + sentence
    elif draw < 0.18:
        sentence = rng.choice(surroundings().openers_alarmed) + sentence
    return capital(sentence) if rng.random() < 0.6 else sentence


def framed_emergency(rng: random.Random) -> str:
    """A prompt of the least urgent level that tells, invents or teaches what an urgent message
    says."""
    level = rng.choice((0, 1))
    someone = person(rng)
    sentence = someone.fill(choose(rng.choice(wordings()[level].third), rng))
    sentence = f"{someone.name} {sentence}".rstrip(".! ")
    frame = rng.choice(harmless().frames)
    # The sentence keeps its own brackets: its alternatives have been chosen already.
    text = choose(frame.replace("{matter}", "\0"), rng).replace("\0", sentence)
    return capital(text) if rng.random() < 0.7 else text


def lookalike(rng: random.Random) -> str:
    """A prompt of the least urgent level that uses an emergency's words by accident."""
    texts = harmless()
    source = texts.broken_things if rng.random() < 0.5 else texts.figures_of_speech
    text = choose(rng.choice(source), rng)
    return capital(text) if rng.random() < 0.4 else text


def everyday_prompt(rng: random.Random) -> str:
    """A prompt that asks for no help in any domain."""
    sentence = choose(rng.choice(harmless().everyday), rng)
    return capital(sentence) if rng.random() < 0.6 else sentence


def source_code(rng: random.Random) -> str:
    """Some lines of Python's own library, at times with a request about them."""
    lines = rng.choice(_modules()).read_text(encoding="utf-8", errors="replace").splitlines()
    first = rng.randrange(max(1, len(lines) - _LINES_OF_CODE))
    code = "\n".join(lines[first : first + rng.randint(3, _LINES_OF_CODE)]).strip() or "pass"
    return f"{rng.choice(surroundings().tasks)}\n{code}" if rng.random() < 0.3 else code


@functools.cache
def _modules() -> tuple[Path, ...]:
    return tuple(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))


def _told(sentence: str, rng: random.Random) -> str:
    """A whole message, seldom with an alarmed opening."""
    sentence = _opened(sentence, 0.05, 0.25, rng)
    message = (capital(sentence) if rng.random() < 0.6 else sentence) + rng.choice(("", ".", "."))
    return f"{message} {rng.choice(surroundings().questions)}" if rng.random() < 0.2 else message


def _opened(sentence: str, alarmed: float, calm: float, rng: random.Random) -> str:
    """The sentence, in these shares of the cases with an alarmed or a calm opening."""
    draw = rng.random()
    texts = surroundings()
    if draw < alarmed + calm:
        openers = texts.openers_alarmed if draw < alarmed else texts.openers_calm
        sentence = rng.choice(openers) + sentence
    return sentence


def _said(sentence: str, register: str, level: int, someone: Person, rng: random.Random) -> str:
    """A sentence of a register with an opening, details and questions around it."""
    if register == "third":
        second = rng.random() < 0.12
        sentence = f"{someone.name} {sentence}"
        if second and level <= 1:
            more = someone.fill(choose(rng.choice(wordings()[level].third), rng))
            sentence = f"{sentence}, {someone.he} {more}"
    # A negated symptom must not read as that symptom; negations come where they are natural.
    if level >= 2 and register != "scene" and rng.random() < 0.12:
        negation = _unlike(surroundings().negations_first, sentence, rng)
        parts = [capital(negation + sentence) + rng.choice(("", "."))]
    else:
        sentence = _opened(sentence, _ALARMED[level], 0.2, rng)
        parts = [capital(sentence) + rng.choice(("", ".", ".", "!" if level < 2 else "."))]
    if register == "third" and level < 4 and rng.random() < 0.35:
        parts.append(capital(someone.fill(choose(rng.choice(surroundings().details), rng))))
    if register == "third" and level in (2, 3) and rng.random() < 0.35:
        parts.append(capital(someone.fill(_unlike(surroundings().negations, sentence, rng))))
    if rng.random() < 0.35:
        parts.append(rng.choice(surroundings().questions))
    if rng.random() < 0.1:
        rng.shuffle(parts)
    return " ".join(parts)


def _unlike(alternatives: Sequence[str], sentence: str, rng: random.Random) -> str:
    """One of the alternatives, if possible one that does not contradict the sentence."""
    said = set(re.findall(r"[a-z]{5,}", sentence.lower()))
    fitting = [
        alternative
        for alternative in alternatives
        if said.isdisjoint(re.findall("[a-z]+", alternative.lower()))
    ]
    # Contradictions between words of one stem ("fever", "feverish") are rare enough to accept.
    return rng.choice(fitting or alternatives)


def _clinical_line(sentence: str, rng: random.Random) -> str:
    age = rng.randint(18, 90)
    sex = rng.choice("MF")
    patient = (f"{age}{sex}, ", f"{age} yo {sex.lower()}: ")
    lead = rng.choice(("", "", *patient, "Pt: ", "Caller reports "))
    if any(word in sentence for word in ("neonate", "age ", "weeks")):
        lead = rng.choice(("", "Pt: "))
    line = f"{lead}{sentence}."
    return line.upper() if rng.random() < 0.1 else line
