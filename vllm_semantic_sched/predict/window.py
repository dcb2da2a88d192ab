"""The part of a prompt that a reader sees, of a chat what the user says, the newest turn first. The
instant reader of the engine's process sees a clean head and tail of bounded length; the predictor
sees head, tail and the most suspicious parts between them (`chosen_places`)."""

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy
from numpy.typing import NDArray

DEFAULT_WINDOW = 128  # wordpieces read of a prompt, special tokens included
_CHARACTERS_PER_PIECE = 8
# Of a prompt that is longer, head and tail: the cost of a text must be bounded. The predictor takes
# about a millisecond to look through ten thousand characters.
_LONGEST_PROMPT = 16_000
LONGEST_SAID = 64_000
# Wordpieces of a long text that are read in any case, at its start and at its end: they say what
# the rest is for. A scene of a novel alone would be misread as an emergency.
_HEAD = 30
_TAIL = 30
PART = 24  # wordpieces of a part of a text that is judged by itself; best on validation messages
_AROUND_PART = 33  # wordpieces that are read where a part is chosen
_LEAD = 14  # wordpieces before a part among which its sentence may begin, or after it may end
_LEAST_PART = 4
# Between the turns of a chat: the newest comes first, which no other text does.
_TURN_MARK = " ■ "
_TEMPLATE_MARKER = re.compile(
    r"<[|｜][^|｜<>]{1,40}[|｜]>|</?s>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>"
    r"|\[(?:CLS|SEP|PAD)\]",
    re.IGNORECASE,
)
_LONGEST_MARKER = 44  # characters
# What begins a turn, and who speaks: chat templates with their markers, without them (a tokenizer
# may leave those out), and logs of a chat.
_SPEAKER = re.compile(
    r"<[|｜](?:im_start|start_header_id|start)[|｜]>\s*(\w+)(?:<[|｜](?:end_header_id|message)[|｜]>)?"
    r"|<start_of_turn>(\w+)"
    r"|<[|｜](user|assistant|system|tool)[|｜]>"
    r"|(\[/?INST\])"
    r"|(<</?SYS>>)"
    r"|(?:^|\n)(user|assistant|system|model)\n"
    r"|(?:^|\s)(user|human|assistant|ai|bot|system)\s*:(?=\s|$)",
    re.IGNORECASE,
)
# What `_SPEAKER` finds begins at one of these or, with a colon, ends at it. Each alternative starts
# with one character, for which `re` searches much faster than for all of `_SPEAKER`.
_ANCHOR = re.compile(
    r"<(?=[|｜]|start_of_turn>|</?SYS>>)|\[(?=/?INST\])|\n(?=(?:user|assistant|system|model)\n)"
    r"|:(?=\s|$)(?:(?<=user:)|(?<=human:)|(?<=assistant:)|(?<=ai:)|(?<=bot:)|(?<=system:)|(?<=\s:))",
    re.IGNORECASE,
)
_NAME_BEFORE_COLON = re.compile(
    r"(?:^|\s)(?:user|human|assistant|ai|bot|system)\Z",
    re.IGNORECASE,
)
_USER = "\n<|im_start|>user\n"  # begins a turn
# Characters of a request that its session remembers, half of them from each end.
_MOST_REMEMBERED = 200
_LONGEST_NAME = 10  # characters, with the white space before it
_USERS = frozenset({"user", "human", "[inst]", "<</sys>>"})

_Piece = TypeVar("_Piece", int, str)


def user_turns(text: str) -> list[str]:
    """What the user says in a chat, the newest turn first; the whole text if it is no chat. What
    stands before the first turn counts as the user's: instructions for a pasted chat."""
    turns: list[str] = []
    speaker, start = "user", 0
    for match in _speakers(text):
        if speaker in _USERS:
            turns.append(text[start : match.start()])
        speaker = next(name for name in match.groups() if name is not None).lower()
        start = match.end()
    if speaker in _USERS:
        turns.append(text[start:])
    return [turn for turn in reversed(turns) if not _is_blank(turn)] or [text]


def _speakers(text: str) -> Iterator[re.Match[str]]:
    """The same as `_SPEAKER.finditer(text)`, in a tenth of the time."""
    end = 0
    first = _SPEAKER.match(text)
    if first is not None:
        yield first
        end = first.end()
    for anchor in _ANCHOR.finditer(text):
        start = anchor.start()
        if text[start] == ":":
            start = _start_of_name(text, start, end)
        if start < end:
            continue
        match = _SPEAKER.match(text, start)
        if match is not None:
            yield match
            end = match.end()


def _start_of_name(text: str, colon: int, least: int) -> int:
    """Where `_SPEAKER` would match the name of a speaker before a colon; -1 if there is none, or it
    ends before `least`."""
    name_end = colon
    while name_end > least and text[name_end - 1].isspace():
        name_end -= 1
    before = text[max(0, name_end - _LONGEST_NAME) : name_end]
    name = _NAME_BEFORE_COLON.search(before)
    return -1 if name is None else name_end - len(before) + name.start()


def clean(text: str) -> str:
    """`text` without chat-template markers and runs of white space."""
    return " ".join(_TEMPLATE_MARKER.sub(" ", text).split())


def _is_blank(text: str) -> bool:
    """Whether nothing of a text is left when it is clean."""
    # A fast answer for nearly all texts: a marker begins with a bracket.
    first = text.lstrip()[:1]
    return not first or (first in "<[" and not clean(text))


def cut_text(text: str, room: int) -> str:
    """The head and the tail of what the user says, clean, enough for `room` wordpieces."""
    said = _said(text, _LONGEST_PROMPT)
    return _clean_ends(said, half=room * _CHARACTERS_PER_PIECE // 2)


def said_text(text: str) -> str:
    """All that the user says, clean; of more than `LONGEST_SAID` characters the head and the
    tail."""
    return clean(_said(text, LONGEST_SAID))


def _said(text: str, most: int) -> str:
    text = ends(text, most)
    # Lone surrogates, which come from broken decoding, cannot be encoded.
    text = text.encode("utf-8", "replace").decode("utf-8")
    return _TURN_MARK.join(user_turns(text))


def _clean_ends(text: str, half: int) -> str:
    """The first and the last `half` characters of a clean text; all of it if it has no more."""
    sure = half + _LONGEST_MARKER + 1
    most = 2 * sure
    if len(text) > 2 * most:
        # Mostly they come from a small part of a long text. Where that was cut, `clean` may have
        # missed a marker or found a wrong one, and may have left out white space.
        head, tail = clean(text[:most]), clean(text[-most:])
        if min(len(head), len(tail)) > sure:
            return f"{head[:half]} {tail[-half:]}"
    return ends(clean(text), 2 * half)


def ends(text: str, most: int) -> str:
    """The first and the last of more than `most` characters."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} {text[-half:]}"


def newest_words(text: str) -> str:
    """What a request says, for its session's next one: clean, at most 200 characters."""
    return ends(clean(user_turns(text)[0]), _MOST_REMEMBERED)


def continued(text: str, earlier: Sequence[str]) -> str:
    """The text of a session's next request after the session's last words (the newest first), as
    the chat that a client would send which sends all of it; unchanged if it is such a chat."""
    newest, *before = user_turns(text)
    if before or not earlier:
        return text
    return as_chat([*reversed(earlier), newest])


def as_chat(said: Sequence[str]) -> str:
    """What a user has said, the newest last, as the text of a chat."""
    return "".join(f"{_USER}{text}" for text in said)


def cut_pieces(pieces: list[_Piece], room: int) -> list[_Piece]:
    """The first and the last of more than `room` wordpieces, `room` in all."""
    if len(pieces) <= room:
        return pieces
    tail = room // 2
    return pieces[: room - tail] + pieces[-tail:]


def chosen_places(
    suspicion: NDArray[numpy.float32], is_end: NDArray[numpy.bool_], room: int
) -> list[int]:
    """Places of the wordpieces of a long text that are read, ascending, at most `room`: its head,
    its tail, and between them the most suspicious parts, each from the start of a sentence to
    an end if these are near.

    Args:
        suspicion: of each part of `PART` neighboring wordpieces, by the place of its first one.
        is_end: of each wordpiece, whether a sentence ends with it. There are more than `room`.
    """
    count = len(is_end)
    kept = numpy.zeros(count, dtype=bool)
    kept[:_HEAD] = True
    kept[count - _TAIL :] = True
    left = room - _HEAD - _TAIL
    suspicion = suspicion.copy()
    while left >= _LEAST_PART:
        part = int(suspicion.argmax())
        if suspicion[part] == -numpy.inf:
            break
        ends = numpy.flatnonzero(is_end[max(0, part - _LEAD) : part])
        start = max(0, part - _LEAD) + int(ends[-1]) + 1 if len(ends) else max(0, part - 3)
        stop = min(count, start + _AROUND_PART)
        rest = numpy.flatnonzero(is_end[stop - 1 : stop - 1 + _LEAD])
        if len(rest):
            stop += int(rest[0])
        new = numpy.flatnonzero(~kept[start:stop])[:left] + start
        kept[new] = True
        left -= len(new)
        # Parts that overlap what is read now by more than a few wordpieces.
        suspicion[max(0, start - PART + _LEAST_PART) : stop - _LEAST_PART + 1] = -numpy.inf
    return [int(place) for place in numpy.flatnonzero(kept)]


# Scripts of the languages that the reader was trained on, by the first word of a letter's name.
_SCRIPTS = frozenset(
    {
        "LATIN",
        "CYRILLIC",
        "GREEK",
        "ARABIC",
        "HEBREW",
        "DEVANAGARI",
        "BENGALI",
        "TAMIL",
        "THAI",
        "CJK",
        "HIRAGANA",
        "KATAKANA",
        "KATAKANA-HIRAGANA",
        "HANGUL",
        "FULLWIDTH",
        "HALFWIDTH",
        "IDEOGRAPHIC",
    }
)
REASONS = ("empty", "broken", "script", "encoded", "repetitive")  # answers of `unreadable`
_SAMPLE = 400  # characters, half of them from the end
_MOST_BROKEN = 0.1  # share of control, private and replacement characters
_MOST_FOREIGN = 0.5  # share of letters of other scripts
_MOST_ENCODED = 0.6  # share of characters in words that no language has
_ENCODED_WORD = re.compile(r"[A-Za-z0-9+/=_-]{32,}")
_LEAST_WORDS = 40
_LEAST_DISTINCT = 0.05


def unreadable(text: str) -> str | None:
    """Why a clean text cannot be judged, which does not mean that it is not urgent; None if it can.
    `empty`: no letter and no digit. `broken`: control or replacement characters, as of binary data.
    `script`: letters that no language of the reader uses. `encoded`: base64, hashes. `repetitive`:
    the same few words over and over. Cost bounded, whatever its length."""
    text = text.strip()
    if len(text) > _SAMPLE:
        words = text[: 8 * _SAMPLE].split()
        text = ends(text, _SAMPLE)
    else:
        words = text.split()
    if _broken(text):
        return "broken"
    if not any(map(str.isalpha, text)) and not any(map(str.isdigit, text)):
        return "empty"
    if not text.isascii():  # ASCII letters are Latin
        letters = [letter for letter in text if letter.isalpha()]
        known = sum(_script(letter) in _SCRIPTS for letter in letters)
        if letters and known < (1 - _MOST_FOREIGN) * len(letters):
            return "script"
    if sum(map(len, _ENCODED_WORD.findall(text))) > _MOST_ENCODED * len(text):
        return "encoded"
    if len(words) >= _LEAST_WORDS and len(Counter(words)) < _LEAST_DISTINCT * len(words):
        return "repetitive"
    return None


def _broken(text: str) -> bool:
    # A fast answer for nearly all texts.
    if "\ufffd" not in text and text.replace("\n", " ").isprintable():
        return False
    control = ("Cc", "Co", "Cn")
    bad = sum(
        character == "\ufffd"
        or (not character.isspace() and unicodedata.category(character) in control)
        for character in text
    )
    return bad > _MOST_BROKEN * len(text)


@functools.lru_cache(maxsize=4096)
def _script(letter: str) -> str:
    return unicodedata.name(letter, "").split(" ", 1)[0]
