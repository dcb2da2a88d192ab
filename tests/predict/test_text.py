"""What the predictor sees of a prompt."""

import pytest
from transformers import PreTrainedTokenizerFast

from vllm_semantic_sched.predict.instant import Glance
from vllm_semantic_sched.predict.model import SHIPPED_WEIGHTS, WindowTokenizer
from vllm_semantic_sched.predict.window import clean

START, PAD, END = 0, 1, 2


@pytest.fixture(scope="module")
def shipped():
    return PreTrainedTokenizerFast(
        tokenizer_file=str(SHIPPED_WEIGHTS / "tokenizer.json"), pad_token="<pad>"
    )


def test_template_markers_go_and_words_stay():
    text = "<|im_start|>user\nmy dad  fell<|im_end|>\n<s>[INST] now [/INST]"
    assert clean(text) == "user my dad fell now"


def test_comparison_signs_are_no_markers():
    assert clean("is a <b and c> d? <|") == "is a <b and c> d? <|"


def test_long_texts_keep_head_and_tail(shipped):
    tokenizer = WindowTokenizer(shipped, window=16)
    text = "first words here " + "filler " * 5000 + "last words there"
    (row,) = tokenizer.encode([text])
    assert len(row) == 16
    assert row[0] == START and row[-1] == END
    said = shipped.decode(row[1:-1])
    assert said.startswith("first words here") and said.endswith("last words there")


@pytest.mark.parametrize(
    "text",
    ["", " \n\t", "\x00\x01\ufffd", "\ud800 half a pair", "😀" * 4000, "a" * 100_000, "</s><pad>"],
)
def test_any_string_gives_a_framed_row(shipped, text):
    (row,) = WindowTokenizer(shipped, window=32).encode([text])
    assert 2 <= len(row) <= 32
    assert row[0] == START and row[-1] == END


def test_padding_is_masked(shipped):
    tokenizer = WindowTokenizer(shipped, window=32)
    ids, mask = tokenizer.pad(tokenizer.encode(["one", "one two three"]))
    assert ids.shape == mask.shape == (2, 5)
    assert mask.sum(1).tolist() == [3, 5]
    assert ids[0, 3:].tolist() == [PAD, PAD]


def test_a_window_without_room_is_refused(shipped):
    with pytest.raises(ValueError, match="window of 3"):
        WindowTokenizer(shipped, window=3)


def test_an_emergency_in_the_middle_of_a_long_text_is_seen(shipped) -> None:
    glance = Glance.load(SHIPPED_WEIGHTS)
    tokenizer = WindowTokenizer(shipped, glance=glance)
    calm = "the meeting of the garden club was moved to thursday and we need more chairs. " * 60
    emergency = "my father just collapsed and he is not breathing, what do i do."
    text = f"please shorten these minutes. {calm}{emergency} {calm}thank you very much."
    (row,) = tokenizer.encode([text])
    assert len(row) <= 128
    said = tokenizer.part_read(text)
    assert said.startswith("please shorten") and said.endswith("thank you very much.")
    assert emergency in said and " ... " in said
    assert emergency not in WindowTokenizer(shipped).part_read(text)
    assert tokenizer.part_read("he fell") == "he fell"
