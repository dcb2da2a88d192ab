"""Turns coded emergency visits into messages that people could have sent, without their level."""

import random
import re

from vllm_semantic_sched.lab.training.wording import Person, capital, choose, reasons, surroundings
from vllm_semantic_sched.sim.datasets import TriageVisit

_VAGUE = re.compile(
    r"^(oth|other|illegible|inadequate|problems, complaints|symptoms, |pain, specified)", re.I
)
_RULES = {
    re.compile(pattern, re.I): form
    for pattern, form in (
        (r"^(.+) pain, ache.*$", r"\1 pain|an aching \1|pain in the \1"),
        (r"^Injury, other and unspecified, of (\w+)", r"an injured \1|a hurt \1|\1 injury"),
        (r"^Swelling of (.+)$", r"a swollen \1|swelling of the \1"),
        (r"^Weakness of (.+)$", r"weakness in the \1|a weak \1"),
        (r"^Fracture/dislocation of (.+)$", r"a broken \1|a fractured \1"),
        (r"^Sprain and strain of (.+)$", r"a sprained \1"),
        (r"^(.+) symptoms$", r"a problem with the \1"),
        (r"^Laceration/cut.*$", r"a cut|a laceration"),
        (r"^Contusion.*$", r"bruising"),
    )
}
_FINDINGS = {
    re.compile(r"^(.+?)(?: and \w+)? pain(?:, ache)?.*$", re.I): "pain",
    re.compile(
        r"^(?:Injury, other and unspecified, of|Sprain and strain of) (.+)$"
    ): "[injury|contusion|trauma]",
    re.compile(r"^Fracture/dislocation of (.+)$"): "[fx|r/o fx|fracture]",
}


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
    """The complaint of an NHAMCS visit as a chart note: a few words of shorthand."""
    terms = [term for reason in visit.reasons if (term := chart_term(reason, rng))]
    if not terms:
        return visit.text
    note = rng.choice((", ", ", ", " / ", "; ", " & ")).join(terms[: rng.choice((1, 1, 2, 3))])
    if visit.age is not None and rng.random() < 0.2:
        sex = visit.sex[:1].upper()
        note = rng.choice((f"{visit.age}{sex} {note}", f"{note}, {visit.age} yrs"))
    if visit.pain is not None and rng.random() < 0.15:
        note = f"{note}, NRS {visit.pain}"
    case = rng.random()
    return note.lower() if case < 0.3 else capital(note) if case < 0.4 else note


def lay_term(reason: str, rng: random.Random) -> str | None:
    """Words a person would use for `reason` after "has" or "with"; None for a vague reason."""
    everyday, _ = reasons().get(reason, ("", ""))
    if everyday:
        return rng.choice(everyday.split("|"))
    if _VAGUE.match(reason):
        return None
    for pattern, form in _RULES.items():
        if pattern.match(reason):
            chosen = rng.choice(form.split("|"))
            return pattern.sub(chosen, reason.lower())
    plain = re.sub(r"\(.*?\)", "", reason.lower()).replace(", nos", "").replace(", nec", "")
    return " ".join(plain.split(",")[0].split())


def chart_term(reason: str, rng: random.Random) -> str | None:
    """Words of a triage note for `reason`; None for a vague reason."""
    _, chart = reasons().get(reason, ("", ""))
    if chart:
        return choose(f"[{chart}]", rng)
    for pattern, finding in _FINDINGS.items():
        if match := pattern.match(reason):
            place = match.group(1).lower()
            form = f"[{place} {finding}|{finding}, {place}|{finding}, [Rt|Lt|both] {place}"
            form += f"|[Rt|Lt|right|left] {place} {finding}|{place} {finding}, [Rt|Lt]]"
            return choose(form, rng)
    term = lay_term(reason, rng)
    return term and _bare(term)


def _bare(term: str) -> str:
    return term.removeprefix("a ").removeprefix("an ")


def _listed(terms: list[str], rng: random.Random) -> str:
    if len(terms) == 1:
        return terms[0]
    return ", ".join(terms[:-1]) + rng.choice((" and ", " and also ", ", ")) + terms[-1]


def _subject(visit: TriageVisit, rng: random.Random) -> Person:
    male = visit.sex == "male"
    age = visit.age if visit.age is not None else 40
    if age < 13:
        child, small = ("son", "boy") if male else ("daughter", "girl")
        names = f"my {child}|my {age} year old|our little {small}"
    elif age > 59:
        names = "my dad|my grandfather|my husband" if male else "my mom|my grandmother|my wife"
    else:
        names = "my brother|my husband|my friend" if male else "my sister|my wife|my friend"
    return Person(rng.choice(f"{names}|a {age}-year-old {visit.sex}".split("|")), male)


def _extras(visit: TriageVisit, who: str, rng: random.Random) -> list[str]:
    """Facts beside the complaint, each left out at times; the age only after a `who`."""
    facts: list[str] = []
    if who and visit.age is not None and rng.random() < 0.5:
        facts.append(f"{who} {visit.age}.")
    for known, share, texts in (
        (
            visit.pain is not None,
            0.6,
            (f"Pain is {visit.pain} out of 10.", f"Pain {visit.pain}/10."),
        ),
        (visit.injury == "injury/trauma", 0.5, _INJURED),
        (visit.injury == "overdose/poisoning", 0.8, _POISONED),
        (visit.ambulance, 0.6, _BROUGHT),
    ):
        if known and rng.random() < share:
            facts.append(rng.choice(texts))
    rng.shuffle(facts)
    return facts


_INJURED = ("It's from an injury.", "After an accident.", "Got hurt.")
_POISONED = ("Possibly an overdose.", "Took something poisonous.")
_BROUGHT = ("An ambulance is bringing us in.", "Came by ambulance.")


def _relative(visit: TriageVisit, terms: list[str], rng: random.Random) -> str:
    who = _subject(visit, rng)
    verb = rng.choice(("has", "has", "is complaining of", "came down with", "is here with"))
    said = capital(f"{who.name} {verb} {_listed(terms, rng)}.")
    return _asking([said, *_extras(visit, capital(who.he) + " is", rng)], rng)


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
    age = f" {visit.age}{visit.sex[:1]}" if visit.age is not None and rng.random() < 0.5 else ""
    return (rng.choice((", ", " and ", " ")).join(map(_bare, terms)) + age).lower()


def _asking(sentences: list[str], rng: random.Random) -> str:
    if rng.random() < 0.3:
        sentences = [*sentences, rng.choice(surroundings().questions)]
    return " ".join(sentences)
