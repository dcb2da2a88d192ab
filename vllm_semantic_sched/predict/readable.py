"""Tells texts that a reader cannot judge: not recognized is not the same as not urgent."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter

# Scripts of the languages that the reader was trained on, by the first word of a letter's name.
_SCRIPTS = frozenset(
    {
        *("LATIN", "CYRILLIC", "GREEK", "ARABIC", "HEBREW", "DEVANAGARI", "BENGALI", "TAMIL"),
        *("THAI", "CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "HANGUL", "FULLWIDTH"),
        *("HALFWIDTH", "IDEOGRAPHIC"),
    }
)
REASONS = ("empty", "broken", "script", "encoded", "repetitive")
"""What `unreadable` answers."""

_SAMPLE = 400  # characters, half of them from the end
_MOST_BROKEN = 0.1  # share of control, private and replacement characters
_MOST_FOREIGN = 0.5  # share of letters of other scripts
_MOST_ENCODED = 0.6  # share of characters in words that no language has
_ENCODED_WORD = re.compile(r"[A-Za-z0-9+/=_-]{32,}")
_LEAST_WORDS = 40
_LEAST_DISTINCT = 0.05


def unreadable(text: str) -> str | None:
    """Why a clean text cannot be judged; None if it can. Cost bounded, whatever its length.

    Returns:
        `empty`: no letter and no digit. `broken`: control or replacement characters, as of binary
        data. `script`: letters that no language of the reader uses. `encoded`: base64, hashes.
        `repetitive`: the same few words over and over.
    """
    text = text.strip()
    if len(text) > _SAMPLE:
        words = text[: 8 * _SAMPLE].split()
        text = f"{text[: _SAMPLE // 2]} {text[-_SAMPLE // 2 :]}"
    else:
        words = text.split()
    letters = [one for one in text if one.isalpha()]
    if not letters and not any(one.isdigit() for one in text):
        return "broken" if _broken(text) else "empty"
    if _broken(text):
        return "broken"
    known = sum(_script(one) in _SCRIPTS for one in letters)
    if letters and known < (1 - _MOST_FOREIGN) * len(letters):
        return "script"
    if sum(map(len, _ENCODED_WORD.findall(text))) > _MOST_ENCODED * len(text):
        return "encoded"
    if len(words) >= _LEAST_WORDS and len(Counter(words)) < _LEAST_DISTINCT * len(words):
        return "repetitive"
    return None


def _broken(text: str) -> bool:
    bad = sum(one == "\ufffd" or _is_control(one) for one in text)
    return bad > _MOST_BROKEN * len(text)


def _is_control(one: str) -> bool:
    return not one.isspace() and unicodedata.category(one) in ("Cc", "Co", "Cn")


@functools.lru_cache(maxsize=4096)
def _script(letter: str) -> str:
    return unicodedata.name(letter, "").split(" ", 1)[0]
