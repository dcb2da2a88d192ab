"""Which part of a prompt the readers see."""

from random import Random

import numpy
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_semantic_sched.predict import window
from vllm_semantic_sched.predict.window import (
    LONGEST_SAID,
    PART,
    chosen_places,
    clean,
    cut_text,
    said_text,
    user_turns,
)

CHATML = (
    "<|im_start|>system\nYou triage heart attacks.<|im_end|>\n"
    "<|im_start|>user\nmy mother fell<|im_end|>\n"
    "<|im_start|>assistant\nIs she awake?<|im_end|>\n"
    "<|im_start|>user\nno, she does not answer<|im_end|>\n<|im_start|>assistant\n"
)
LLAMA = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nmy mother fell<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nIs she awake?<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nno, she does not answer<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
GEMMA = (
    "<start_of_turn>user\nmy mother fell<end_of_turn>\n<start_of_turn>model\nIs she awake?"
    "<end_of_turn>\n<start_of_turn>user\nno, she does not answer<end_of_turn>\n"
    "<start_of_turn>model\n"
)
MISTRAL = (
    "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nmy mother fell [/INST] Is she awake?</s>"
    "[INST] no, she does not answer [/INST]"
)
PLAIN = (
    "system\nBe brief.\nuser\nmy mother fell\nassistant\nIs she awake?\n"
    "user\nno, she does not answer\nassistant\n"
)
LOG = "USER: my mother fell ASSISTANT: Is she awake? USER: no, she does not answer ASSISTANT:"
HARMONY = (
    "<|start|>system<|message|>Be brief.<|end|><|start|>user<|message|>my mother fell<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Is she awake?<|end|>"
    "<|start|>user<|message|>no, she does not answer<|end|><|start|>assistant"
)
DEEPSEEK = (
    "<｜begin▁of▁sentence｜>Be brief.<｜User｜>my mother fell<｜Assistant｜>Is she awake?"
    "<｜end▁of▁sentence｜><｜User｜>no, she does not answer<｜Assistant｜>"
)


@pytest.mark.parametrize(
    "prompt", [CHATML, LLAMA, GEMMA, MISTRAL, PLAIN, LOG, HARMONY],
    ids=["chatml", "llama", "gemma", "mistral", "plain", "log", "harmony"],
)  # fmt: skip
def test_the_newest_turn_of_the_user_comes_first(prompt) -> None:
    assert cut_text(prompt, 100) == "no, she does not answer ■ my mother fell"


def test_what_precedes_a_first_turn_is_read_last() -> None:
    assert cut_text(DEEPSEEK, 100) == "no, she does not answer ■ my mother fell ■ Be brief."
    pasted = "Summarize this chat.\nUser: he fell\nAssistant: who?"
    assert cut_text(pasted, 100) == "he fell ■ Summarize this chat."


@pytest.mark.parametrize("text", ["he fell", "the user: none", "a user\nwrote", "1: user", ""])
def test_other_texts_are_read_as_they_are(text) -> None:
    assert cut_text(text, 100) in (" ".join(text.split()), "none ■ the")


def test_chat_without_a_user_is_read_whole() -> None:
    assert user_turns("assistant: hello") == ["assistant: hello"]


def test_long_chat_keeps_the_newest_turn_and_the_oldest() -> None:
    middle = "".join(
        f"<|im_start|>user\nturn {number} {'x' * 90}<|im_end|>" for number in range(30)
    )
    text = cut_text(f"<|im_start|>user\nthe first<|im_end|>{middle}<|im_start|>user\nnewest", 40)
    assert text.startswith("newest") and text.endswith("the first") and len(text) <= 40 * 8 + 1


def test_cost_is_bounded() -> None:
    assert len(cut_text("<|im_start|>user\n" + "word " * 1_000_000, 126)) <= 126 * 8 + 1


# What chats are made of, and what looks like it.
PARTS = (
    "user", "User", "human", "assistant", "ai", "bot", "system", "model", ":", " :", ": ", "x",
    "\n", " ", "  ", "\t", "\u00a0", "\x1c", "word ", "hello there ", "a whole sentence, no less. ",
    "<|im_start|>", "<|im_end|>", "<|start|>", "<|message|>", "<|user|>", "<｜User｜>", "<|", "|>",
    "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[CLS]", "<<SYS>>", "<</SYS>>", "</s>",
    "<", ">", "[", "]", "|", "\u017fystem:", "a\u0130:", "a\u0131:", "[/IN\u017fT]", "\u0301", "中",
)  # fmt: skip


def text_of(seed: int) -> str:
    """A text of few different parts, so that pairs which begin a turn are frequent."""
    random = Random(seed)
    parts = random.sample(PARTS, random.randint(2, 6))
    return "".join(random.choices(parts, k=random.choice((5, 50, 400))))


TEXTS = st.integers(0, 2**32).map(text_of)


@settings(max_examples=500)
@given(TEXTS)
@example("he said: a user : b")
def test_fast_search_finds_the_same_speakers(text) -> None:
    expected = [(match.span(), match.groups()) for match in window._SPEAKER.finditer(text)]
    assert [(match.span(), match.groups()) for match in window._speakers(text)] == expected


@settings(max_examples=500)
@given(TEXTS, st.integers(1, 60))
@example("<|im_end|>" * 400, 10)
@example("word <|im_end|> " * 100, 10)
def test_ends_of_a_long_text_are_those_of_the_clean_text(text, room) -> None:
    said = clean(" ■ ".join(user_turns(text)))
    half = 4 * room
    expected = said if len(said) <= 2 * half else f"{said[:half]} {said[-half:]}"
    assert cut_text(text, room) == expected


@given(TEXTS)
def test_turns_without_words_are_left_out(text) -> None:
    turns = user_turns(text)
    assert turns == [text] or all(map(clean, turns))


def suspicion(count: int, *peaks: int) -> numpy.ndarray:
    """Of a text of `count` wordpieces: parts that begin at `peaks` are suspicious, most the first
    one."""
    values = numpy.zeros(count - PART + 1, dtype=numpy.float32)
    for rank, peak in enumerate(peaks):
        values[peak] = 9 - rank
    return values


def test_head_tail_and_the_most_suspicious_parts_are_read() -> None:
    is_end = numpy.zeros(1000, dtype=bool)
    is_end[[495, 699]] = True
    places = chosen_places(suspicion(1000, 500, 700, 300), is_end, room=126)
    assert len(places) == 126 and places == sorted(set(places))
    assert places[:30] == [*range(30)] and places[-30:] == [*range(970, 1000)]
    middle = places[30:-30]
    # Each from the start of its sentence, if that is near; there is room for two.
    assert middle == [*range(496, 529), *range(700, 733)]


def test_part_beside_the_head_leaves_room_for_another() -> None:
    is_end = numpy.zeros(1000, dtype=bool)
    places = chosen_places(suspicion(1000, 10, 500, 700), is_end, room=126)
    assert {*range(500, 524)} <= set(places) and 700 in places and len(places) == 126


@given(
    st.integers(127, 600),
    st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=9),
    st.lists(st.integers(0, 599), max_size=40),
)
def test_no_more_is_read_than_there_is_room(count, values, ends) -> None:
    is_end = numpy.zeros(600, dtype=bool)
    is_end[ends] = True
    drawn = numpy.resize(numpy.array(values, dtype=numpy.float32), count - PART + 1)
    places = chosen_places(drawn, is_end[:count], room=126)
    assert places == sorted(set(places)) and 60 <= len(places) <= 126
    assert places[0] == 0 and places[-1] == count - 1


def test_everything_the_user_says_is_looked_through() -> None:
    long = "word " * 5000
    text = f"<|im_start|>user\n{long}<|im_end|>\n<|im_start|>assistant\nno<|im_end|>"
    assert said_text(text) == long.strip()
    assert len(said_text("x " * 100_000)) <= LONGEST_SAID + 1
