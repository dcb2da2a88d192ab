"""Which part of a prompt the readers see."""

import pytest

from vllm_semantic_sched.predict.window import cut_text, user_turns

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
