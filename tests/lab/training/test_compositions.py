"""Compositions: what a message's surroundings make of its level."""

import random
from collections import Counter

import pytest

from vllm_semantic_sched.lab.evaluation.examples import Example
from vllm_semantic_sched.lab.training.compositions import Composer, Draft
from vllm_semantic_sched.lab.training.wording import Parts, composition_parts, written_rows
from vllm_semantic_sched.predict.window import cut_text, user_turns

PARTS = Parts(
    tasks=("Write a poem.",),
    joiners=("and also",),
    frames=('In my novel: "{matter}"',),
    over=("the medics took over",),
    answers=("no",),
    assistant=("Is he awake?",),
    small_talk=("how are you",),
    systems=("You are a dispatcher.",),
    records=("Ticket 7: {text}",),
    pastes=("--- minutes ---\n{text}",),
    chats=(("4 hello", "0 my father fell down", "0 no", "4 he is fine again"),),
)
WRITTEN = {"xx": [Example(f"m{level} he fell.", level) for level in range(5)]}
EMERGENCIES = ("m0", "m1", "m2", "m3")


@pytest.fixture
def composer():
    return Composer({"xx": PARTS}, Composer.of("train", WRITTEN, ()).written, ())


def drawn(composer, form):
    rng = random.Random(1)
    return [form(Draft(composer, "xx", rng)) for _ in range(200)]


@pytest.mark.parametrize(
    "form",
    [
        Draft.beside_tasks,
        Draft.before_tasks,
        Draft.between_tasks,
        Draft.two_messages,
        Draft.chat,
        Draft.framed_and_true,
    ],
)
def test_most_urgent_message_decides(composer, form) -> None:
    for one in drawn(composer, form):
        levels = [int(text[1]) for text in EMERGENCIES if text in one.text.lower()]
        # Hasty typing may change the letters of a message; a frame holds another message.
        assert not levels or one.level >= min(levels)
    assert {one.level for one in drawn(composer, form)} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "form",
    [
        Draft.only_tasks,
        Draft.only_framed,
        Draft.chat_that_is_over,
        Draft.chat_without_one,
    ],
)
def test_ended_and_invented_emergencies_are_not_urgent(composer, form) -> None:
    assert {one.level for one in drawn(composer, form)} == {4}


def test_surroundings_change_no_level(composer) -> None:
    texts = drawn(composer, Draft.surrounded)
    for form in ("Ticket 7: ", "--- minutes ---\n", "You are a dispatcher. "):
        inside = [one for one in texts if one.text.startswith(form)]
        assert {0, 1, 4} <= {one.level for one in inside}, form
        for one in inside:
            # Typing in a hurry may move or double the first letter of a message.
            levels = [int(sign) for sign in one.text.removeprefix(form)[:3] if sign.isdigit()]
            assert [one.level] == (levels or [4])


def test_emergency_is_in_any_turn_of_a_chat(composer) -> None:
    turns = Counter()
    for one in drawn(composer, Draft.chat):
        said = user_turns(one.text)
        turns.update(at for at, turn in enumerate(said) if "m0" in turn.lower())
        assert "awake" not in cut_text(one.text, 1000)
    assert {0, 1, 2, 3} <= turns.keys()


def test_written_chat_has_the_level_of_its_last_turn(composer) -> None:
    levels = dict(turn.split(" ", 1)[::-1] for turn in PARTS.chats[0])
    for one in drawn(composer, Draft.written_chat):
        newest = user_turns(one.text)[0].strip().lower()
        assert one.level == int(levels.get(newest, one.level)), one.text
    assert {one.level for one in drawn(composer, Draft.written_chat)} == {0, 4}


def test_some_compositions_claim_another_urgency() -> None:
    composer = Composer({"xx": PARTS}, Composer.of("train", WRITTEN, ()).written, ())
    claimed = [one for one in composer.draw(2000, random.Random(1)) if "priority" in one.text]
    assert {one.level for one in claimed} >= {0, 4} and len(claimed) < 200


def test_some_texts_have_no_end_of_sentence_before_the_message(composer) -> None:
    texts = [one.text for one in drawn(composer, Draft.beside_tasks)]
    assert any("poem and also m" in text for text in texts)
    assert any("poem. m" in text for text in texts)


def test_message_before_tasks_comes_first_and_ends_its_sentence(composer) -> None:
    texts = [one.text.lower() for one in drawn(composer, Draft.before_tasks)]
    assert sum(text.startswith(EMERGENCIES) for text in texts) > 100
    assert sum("he fell. " in text or "he fell.\n" in text for text in texts) > 100


def test_every_language_has_parts_and_messages() -> None:
    assert composition_parts().keys() == written_rows().keys()
    for parts in composition_parts().values():
        assert all(frame.count("{matter}") == 1 for frame in parts.frames)


def test_splits_share_no_part() -> None:
    training, validation = (Composer.of(split, {}, ()) for split in ("train", "validation"))
    for language in training.parts:
        for name in ("tasks", "frames"):
            both = (getattr(one.parts[language], name) for one in (training, validation))
            assert not set.intersection(*map(set, both)), language


def test_nothing_is_drawn_without_parts() -> None:
    assert Composer({}, {}, ()).draw(3, random.Random(1)) == []


def test_only_the_forms_that_are_asked_for_are_drawn(composer) -> None:
    alone = {one.level for one in composer.draw(200, random.Random(1), {Draft.only_tasks: 1})}
    assert alone == {4}
    assert len({one.level for one in composer.draw(200, random.Random(1))}) == 5
