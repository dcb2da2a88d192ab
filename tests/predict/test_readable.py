"""Texts that a reader cannot judge."""

import base64
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.predict.window import unreadable

BYTES = random.Random(0).randbytes(600)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        (" \n ", "empty"),
        ("?!... -- ,", "empty"),
        ("\U0001f600\U0001f600", "empty"),
        (BYTES.decode("utf-8", "replace"), "broken"),
        (BYTES.decode("latin-1"), "broken"),
        (base64.b64encode(BYTES).decode(), "encoded"),
        ("3f786850e387550fdab836ed7e6dc881de23001b" * 3, "encoded"),
        ("ሰላም ነው እንዴት ነህ ወንድሜ", "script"),
        ("ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ", "script"),
        ("help " * 10_000, "repetitive"),
        ("no " * 100, "repetitive"),
    ],
)
def test_reason(text, reason) -> None:
    assert unreadable(text) == reason


@pytest.mark.parametrize(
    "text",
    [
        "my father is not breathing",
        "911",
        "help help help help",
        "мой отец не дышит",
        "爸爸没有呼吸了",
        "お父さんが息をしていない",
        "아버지가 숨을 안 쉬어요",
        "أبي لا يتنفس",
        "मेरे पिता सांस नहीं ले रहे",
        "พ่อไม่หายใจ",
        "def f(x):\n    return x * 2\n",
        "see https://example.org/a-long-path/that-goes-on-and-on/index.html please",
        "SOS \U0001f198 he is bleeding \U0001fa78",
        "the amount is 12,345.67 and the account is DE89370400440532013000",
    ],
)
def test_people_are_read(text) -> None:
    assert unreadable(text) is None


@given(st.text())
def test_any_text_has_an_answer(text: str) -> None:
    assert unreadable(text) in (None, "empty", "broken", "script", "encoded", "repetitive")
