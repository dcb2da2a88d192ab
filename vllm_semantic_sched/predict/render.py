"""Turns coded visits and level sentences into messages that people could have sent.

Everything is drawn from the random generator that is passed in; the level itself is never
written into a message.
"""

import random
import re

from vllm_semantic_sched.datasets import KtasVisit, TriageVisit
from vllm_semantic_sched.predict import voices
from vllm_semantic_sched.predict.chart_terms import chart_term
from vllm_semantic_sched.predict.lay_terms import lay_term
from vllm_semantic_sched.predict.voices import pick
from vllm_semantic_sched.predict.wording import Person, Wording, choose, person
from vllm_semantic_sched.predict.wording_distractors import (
    DISTRACTORS,
    EMERGENCY_NOUNS,
    EVERYDAY,
)
from vllm_semantic_sched.predict.wording_frames import BROKEN_THINGS, FIGURES_OF_SPEECH, FRAMES

_MALE = ("he", "him", "his")
_FEMALE = ("she", "her", "her")


def visit_message(visit: TriageVisit, rng: random.Random) -> str:
    """An NHAMCS visit in the words of a relative, the patient, a dispatcher or a nurse."""
    terms = [term for reason in visit.reasons if (term := lay_term(reason, rng))]
    if not terms:
        return visit.text
    if rng.random() < 0.3:
        terms = terms[:2]
    voice = rng.choice((_relative, _patient, _dispatcher, _nurse, _terse))
    return voice(visit, terms, rng)


def chart_note(visit: TriageVisit, rng: random.Random) -> str:
    """The complaint of an NHAMCS visit as a chart has it: a few words of shorthand."""
    terms = [term for reason in visit.reasons if (term := chart_term(reason, rng))]
    if not terms:
        return visit.text
    note = rng.choice((", ", ", ", " / ", "; ", " & ")).join(terms[: rng.choice((1, 1, 2, 3))])
    if visit.age is not None and rng.random() < 0.2:
        note = rng.choice(
            (f"{visit.age}{visit.sex[:1].upper()} {note}", f"{note}, {visit.age} yrs")
        )
    if visit.pain is not None and rng.random() < 0.15:
        note = f"{note}, NRS {visit.pain}"
    case = rng.random()
    return note.lower() if case < 0.3 else _capital(note) if case < 0.4 else note


def ktas_message(visit: KtasVisit, rng: random.Random) -> str:
    """A KTAS visit as a nurse would note it, from the complaint's own words."""
    parts = [visit.complaint]
    if visit.age is not None and rng.random() < 0.7:
        initial = visit.sex[0].upper()
        who = rng.choice((f"{visit.age}-year-old {visit.sex}", f"{visit.age}{initial}"))
        parts = [who, visit.complaint] if rng.random() < 0.6 else [visit.complaint, who]
    if visit.alertness != "alert":
        parts.append(visit.alertness)
    if visit.injury and rng.random() < 0.5:
        parts.append("injury")
    if visit.pain is not None and rng.random() < 0.5:
        parts.append(f"pain {visit.pain}/10")
    if visit.ambulance and rng.random() < 0.3:
        parts.append("by ambulance")
    return rng.choice((", ", ". ", "; ")).join(parts)


def level_message(wording: Wording, rng: random.Random) -> str:
    """A message of the wording's level in one of its registers."""
    register = rng.choices(
        ("third", "first", "scene", "clinical", "told", "handover"), (5, 3, 2, 1, 4.5, 1.3)
    )[0]
    someone = person(rng)
    sentence = someone.fill(choose(rng.choice(getattr(wording, register)), rng))
    if register == "clinical":
        return _clinical_line(sentence, rng)
    if register == "handover":
        return f"{sentence}."
    if register == "told":
        return _told(sentence, rng)
    return _said(sentence, register, wording, someone, rng)


def claiming(text: str, rng: random.Random) -> str:
    """`text` after a claim about its own urgency, whatever its urgency is."""
    return pick(voices.CLAIMS, rng) + text


def opened_neutrally(text: str, rng: random.Random) -> str:
    """`text` after words that say nothing about it but that it is a text."""
    return pick(voices.OPENERS_NEUTRAL, rng) + text


def after_background(message: str, rng: random.Random) -> str:
    """`message` after sentences that do not matter, and sometimes before one more."""
    # No more than four: within the predictor's window the message itself must stay readable.
    count = rng.choices((1, 2, 3, 4), (3, 4, 3, 2))[0]
    sentences = [choose(one, rng) for one in rng.sample(voices.BACKGROUND, count + 1)]
    last = [sentences.pop()]
    parts = [*sentences, pick(voices.TURNS, rng) + message, *(last if rng.random() < 0.3 else [])]
    return rng.choice((" ", " ", "\n")).join(parts)


def harmless_prompt(rng: random.Random) -> str:
    """A prompt of the least urgent level; half of them use an emergency's vocabulary."""
    source = DISTRACTORS if rng.random() < 0.6 else EVERYDAY
    sentence = rng.choice(source).replace("{noun}", pick(EMERGENCY_NOUNS, rng))
    sentence = choose(sentence, rng)
    if rng.random() < 0.08:
        sentence = f"{sentence} {pick(voices.ASKS, rng)}"
    draw = rng.random()
    if draw < 0.12:
        sentence = pick(voices.OPENERS_CALM, rng) + sentence
    elif draw < 0.18:
        sentence = pick(voices.OPENERS_ALARMED, rng) + sentence
    return _capital(sentence) if rng.random() < 0.6 else sentence


def framed_emergency(matter: Wording, rng: random.Random) -> str:
    """A prompt of the least urgent level that tells, invents or teaches what `matter` says."""
    someone = person(rng)
    sentence = someone.fill(choose(rng.choice(matter.third), rng))
    sentence = f"{someone.name} {sentence}".rstrip(".! ")
    frame = rng.choice(FRAMES)
    # The matter keeps its own brackets: it has been chosen already.
    text = choose(frame.replace("{matter}", "\0"), rng).replace("\0", sentence)
    return _capital(text) if rng.random() < 0.7 else text


def lookalike(rng: random.Random) -> str:
    """A prompt of the least urgent level whose words are an emergency's by accident."""
    source = BROKEN_THINGS if rng.random() < 0.5 else FIGURES_OF_SPEECH
    text = choose(rng.choice(source), rng)
    return _capital(text) if rng.random() < 0.4 else text


def everyday_prompt(rng: random.Random) -> str:
    """A prompt that asks for no help in any domain."""
    sentence = choose(rng.choice(EVERYDAY), rng)
    return _capital(sentence) if rng.random() < 0.6 else sentence


def with_noise(text: str, rng: random.Random) -> str:
    """`text` with hasty typing or a chat template around it, often neither."""
    if rng.random() < 0.4:
        text = voices.hasty(text, rng)
    if rng.random() < 0.3:
        text = voices.in_chat_template(text, rng)
    return text


def _told(sentence: str, rng: random.Random) -> str:
    """A whole message, without the alarm that others come with."""
    draw = rng.random()
    if draw < 0.05:
        sentence = pick(voices.OPENERS_ALARMED, rng) + sentence
    elif draw < 0.3:
        sentence = pick(voices.OPENERS_CALM, rng) + sentence
    message = (_capital(sentence) if rng.random() < 0.6 else sentence) + rng.choice(("", ".", "."))
    return f"{message} {pick(voices.ASKS, rng)}" if rng.random() < 0.2 else message


def _said(
    sentence: str, register: str, wording: Wording, someone: Person, rng: random.Random
) -> str:
    """A sentence of a register with what people say around it."""
    if register == "third":
        second = rng.random() < 0.12
        sentence = f"{someone.name} {sentence}"
        if second and wording.level <= 1:
            more = someone.fill(choose(rng.choice(wording.third), rng))
            sentence = f"{sentence}, {someone.he} {more}"
    # A negated symptom must not read as that symptom; said where it is natural.
    mild = wording.level >= 2 and register != "scene"
    if mild and rng.random() < 0.12:
        parts = [_capital(_negated_first(sentence, rng)) + rng.choice(("", "."))]
    else:
        parts = [_opened(sentence, wording.level, rng)]
    if register == "third" and wording.level < 4 and rng.random() < 0.35:
        parts.append(_capital(someone.fill(choose(rng.choice(voices.DETAILS), rng))))
    if register == "third" and wording.level in (2, 3) and rng.random() < 0.35:
        parts.append(_capital(someone.fill(_unlike(voices.NEGATIONS, sentence, rng))))
    if rng.random() < 0.35:
        parts.append(pick(voices.ASKS, rng))
    if rng.random() < 0.1:
        rng.shuffle(parts)
    return " ".join(parts)


def _opened(sentence: str, level: int, rng: random.Random) -> str:
    """The sentence with an opening; alarm occurs at every level, so it proves nothing."""
    alarmed = (0.35, 0.3, 0.2, 0.12, 0.08)[level]
    draw = rng.random()
    if draw < alarmed:
        sentence = pick(voices.OPENERS_ALARMED, rng) + sentence
    elif draw < alarmed + 0.2:
        sentence = pick(voices.OPENERS_CALM, rng) + sentence
    end = rng.choice(("", ".", ".", "!" if level < 2 else "."))
    return _capital(sentence) + end


def _negated_first(sentence: str, rng: random.Random) -> str:
    return _unlike(voices.NEGATIONS_FIRST, sentence, rng) + sentence


def _unlike(alternatives: str, sentence: str, rng: random.Random) -> str:
    """One of the alternatives, if possible one that does not contradict the sentence."""
    said = set(re.findall(r"[a-z]{5,}", sentence.lower()))
    fitting = [
        one for one in alternatives.split("|") if not said & set(re.findall("[a-z]+", one.lower()))
    ]
    # Contradictions between words of one stem ("fever", "feverish") are rare enough to let be.
    return rng.choice(fitting or alternatives.split("|"))


def _clinical_line(sentence: str, rng: random.Random) -> str:
    age, sex = rng.randint(18, 90), rng.choice("MF")
    patient = (f"{age}{sex}, ", f"{age} yo {sex.lower()}: ")
    lead = rng.choice(("", "", *patient, "Pt: ", "Caller reports "))
    if any(word in sentence for word in ("neonate", "age ", "weeks")):
        lead = rng.choice(("", "Pt: "))
    line = f"{lead}{sentence}."
    return line.upper() if rng.random() < 0.1 else line


def _listed(terms: list[str], rng: random.Random) -> str:
    if len(terms) == 1:
        return terms[0]
    return ", ".join(terms[:-1]) + rng.choice((" and ", " and also ", ", ")) + terms[-1]


def _subject(visit: TriageVisit, rng: random.Random) -> Person:
    male = visit.sex == "male"
    pronouns = _MALE if male else _FEMALE
    age = visit.age if visit.age is not None else 40
    if age < 13:
        child, small = ("son", "boy") if male else ("daughter", "girl")
        names = f"my {child}|my {age} year old|our little {small}"
    elif age > 59:
        names = "my dad|my grandfather|my husband" if male else "my mom|my grandmother|my wife"
    else:
        names = "my brother|my husband|my friend" if male else "my sister|my wife|my friend"
    return Person(pick(names + f"|a {age}-year-old {visit.sex}", rng), *pronouns)


def _extras(visit: TriageVisit, who: str, rng: random.Random) -> list[str]:
    """Facts beside the complaint, each left out at times; the age only after a `who`."""
    facts: list[str] = []
    if who and visit.age is not None and rng.random() < 0.5:
        facts.append(f"{who} {visit.age}.")
    if visit.pain is not None and rng.random() < 0.6:
        facts.append(rng.choice((f"Pain is {visit.pain} out of 10.", f"Pain {visit.pain}/10.")))
    if visit.injury == "injury/trauma" and rng.random() < 0.5:
        facts.append(rng.choice(("It's from an injury.", "After an accident.", "Got hurt.")))
    if visit.injury == "overdose/poisoning" and rng.random() < 0.8:
        facts.append(rng.choice(("Possibly an overdose.", "Took something poisonous.")))
    if visit.ambulance and rng.random() < 0.6:
        facts.append(rng.choice(("An ambulance is bringing us in.", "Came by ambulance.")))
    rng.shuffle(facts)
    return facts


def _relative(visit: TriageVisit, terms: list[str], rng: random.Random) -> str:
    who = _subject(visit, rng)
    verb = rng.choice(("has", "has", "is complaining of", "came down with", "is here with"))
    said = _capital(f"{who.name} {verb} {_listed(terms, rng)}.")
    return _asking([said, *_extras(visit, _capital(who.he) + " is", rng)], rng)


def _patient(visit: TriageVisit, terms: list[str], rng: random.Random) -> str:
    said = rng.choice(("I have", "I've got", "I'm having", "I came in for")) + " "
    return _asking([f"{said}{_listed(terms, rng)}.", *_extras(visit, "I'm", rng)], rng)


def _dispatcher(visit: TriageVisit, terms: list[str], rng: random.Random) -> str:
    lead = rng.choice(("Caller reports", "Incoming:", "Reported:", "Unit advises"))
    age = f"{visit.age} year old " if visit.age is not None and rng.random() < 0.85 else ""
    said = f"{lead} {age}{visit.sex} with {_listed(terms, rng)}."
    return " ".join([said, *_extras(visit, "", rng)[:2]])


def _nurse(visit: TriageVisit, terms: list[str], rng: random.Random) -> str:
    age = "" if visit.age is None else str(visit.age)
    parts = [f"{age}{visit.sex[:1].upper()} c/o {', '.join(terms)}"]
    if visit.pain is not None and rng.random() < 0.6:
        parts.append(f"pain {visit.pain}/10")
    vitals = (("hr", visit.heart_rate), ("sbp", visit.systolic), ("spo2", visit.oxygen))
    parts += [f"{name} {value}" for name, value in vitals if value and rng.random() < 0.3]
    if visit.ambulance:
        parts.append("via ems")
    return ", ".join(parts) + "."


def _terse(visit: TriageVisit, terms: list[str], rng: random.Random) -> str:
    bare = [term.removeprefix("a ").removeprefix("an ") for term in terms]
    age = f" {visit.age}{visit.sex[:1]}" if visit.age is not None and rng.random() < 0.5 else ""
    return (rng.choice((", ", " and ", " ")).join(bare) + age).lower()


def _asking(sentences: list[str], rng: random.Random) -> str:
    if rng.random() < 0.3:
        sentences = [*sentences, pick(voices.ASKS, rng)]
    return " ".join(sentences)


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
