"""Turns coded emergency visits into messages that people could have sent, without their level."""

import random
import re
from bisect import bisect_right

from vllm_semantic_sched.lab.datasets import TriageVisit
from vllm_semantic_sched.lab.training.wording import (
    Person,
    capital,
    choose,
    fill,
    reasons,
    surroundings,
    visit_texts,
)


def visit_message(visit: TriageVisit, rng: random.Random) -> str:
    """An NHAMCS visit in the words of a relative, the patient, a dispatcher or a nurse."""
    terms = [term for term in (lay_term(reason, rng) for reason in visit.reasons) if term]
    if not terms:
        return visit.text
    if rng.random() < 0.3:
        terms = terms[:2]
    tell = rng.choice((_relative, _patient, _dispatcher, _nurse, _terse))
    return tell(visit, terms, rng)


def chart_note(visit: TriageVisit, rng: random.Random) -> str:
    """The complaint of an NHAMCS visit as a chart note: a few words of shorthand."""
    terms = [term for term in (chart_term(reason, rng) for reason in visit.reasons) if term]
    if not terms:
        return visit.text
    separator = rng.choice((", ", ", ", " / ", "; ", " & "))
    note = separator.join(terms[: rng.choice((1, 1, 2, 3))])
    if visit.age is not None and rng.random() < 0.2:
        sex = visit.sex[:1].upper()
        note = rng.choice((f"{visit.age}{sex} {note}", f"{note}, {visit.age} yrs"))
    if visit.pain is not None and rng.random() < 0.15:
        note = f"{note}, NRS {visit.pain}"
    case = rng.random()
    if case < 0.3:
        return note.lower()
    return capital(note) if case < 0.4 else note


def lay_term(reason: str, rng: random.Random) -> str | None:
    """Words a person would use for `reason` after "has" or "with"; None for a vague reason."""
    everyday, _ = reasons().get(reason, ("", ""))
    if everyday:
        return rng.choice(everyday.split("|"))
    if re.match(visit_texts().vague, reason):
        return None
    for pattern, form in visit_texts().everyday.items():
        if re.match(pattern, reason):
            return re.sub(pattern, rng.choice(form.split("|")), reason.lower())
    plain = re.sub(r"\(.*?\)", "", reason.lower()).replace(", nos", "").replace(", nec", "")
    return " ".join(plain.split(",")[0].split())


def chart_term(reason: str, rng: random.Random) -> str | None:
    """Words of a triage note for `reason`; None for a vague reason."""
    _, chart = reasons().get(reason, ("", ""))
    if chart:
        return choose(f"[{chart}]", rng)
    for pattern, finding in visit_texts().findings.items():
        match = re.match(pattern, reason)
        if match:
            form = fill(visit_texts().finding_forms, place=match[1].lower(), finding=finding)
            return choose(form, rng)
    term = lay_term(reason, rng)
    return None if term is None else _bare(term)


def _bare(term: str) -> str:
    return term.removeprefix("a ").removeprefix("an ")


def _listed(terms: list[str], rng: random.Random) -> str:
    if len(terms) == 1:
        return terms[0]
    return ", ".join(terms[:-1]) + rng.choice((" and ", " and also ", ", ")) + terms[-1]


def _subject(visit: TriageVisit, rng: random.Random) -> Person:
    male = visit.sex == "male"
    age = 40 if visit.age is None else visit.age
    names = visit_texts().people[bisect_right((13, 60), age)][male]
    return Person(fill(rng.choice(names), age=str(age), sex=visit.sex), male)


def _extras(visit: TriageVisit, who: str, rng: random.Random) -> list[str]:
    """Facts beside the complaint, each left out at times; the age only after a `who`."""
    facts: list[str] = []
    words = visit_texts()
    if who and visit.age is not None and rng.random() < 0.5:
        facts.append(f"{who} {visit.age}.")
    for known, share, texts in (
        (visit.pain is not None, 0.6, words.pain),
        (visit.injury == "injury/trauma", 0.5, words.injured),
        (visit.injury == "overdose/poisoning", 0.8, words.poisoned),
        (visit.ambulance, 0.6, words.brought),
    ):
        if known and rng.random() < share:
            facts.append(fill(rng.choice(texts), pain=str(visit.pain)))
    rng.shuffle(facts)
    return facts


def _relative(visit: TriageVisit, terms: list[str], rng: random.Random) -> str:
    who = _subject(visit, rng)
    form = choose(visit_texts().relative, rng)
    said = fill(form, who=who.name, terms=_listed(terms, rng))
    return _asking([capital(said), *_extras(visit, capital(who.he) + " is", rng)], rng)


def _patient(visit: TriageVisit, terms: list[str], rng: random.Random) -> str:
    said = fill(choose(visit_texts().patient, rng), terms=_listed(terms, rng))
    return _asking([said, *_extras(visit, "I'm", rng)], rng)


def _dispatcher(visit: TriageVisit, terms: list[str], rng: random.Random) -> str:
    form = choose(visit_texts().dispatcher, rng)
    age = f"{visit.age} year old " if visit.age is not None and rng.random() < 0.85 else ""
    said = fill(form, age=age, sex=visit.sex, terms=_listed(terms, rng))
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
    asked = [rng.choice(surroundings().questions)] if rng.random() < 0.3 else []
    return " ".join(sentences + asked)
