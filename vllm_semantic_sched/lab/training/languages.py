"""Text of many languages without labels, on which the student learns what the teacher computes.

Word frequencies come from PyPI's `wordfreq` (Speer, 2022; Apache-2.0, its data CC BY-SA 4.0), whole
sentences from the translations of Django's interface (BSD-3). None of it is stored in the package.
"""

import gettext
import importlib.util
import itertools
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

LANGUAGES = (
    "ar", "bg", "bn", "ca", "cs", "da", "de", "el", "en", "es", "fa", "fi", "fr", "he", "hi",
    "hr", "hu", "id", "it", "ja", "ko", "lt", "lv", "mk", "ms", "nb", "nl", "pl", "pt", "ro",
    "ru", "sk", "sl", "sr", "sv", "sw", "ta", "th", "tl", "tr", "uk", "ur", "vi", "zh",
)  # fmt: skip
"""ISO 639-1 codes of the languages whose words and sentences are used where there are any."""

# Written without spaces between words.
_UNSPACED = frozenset({"ja", "zh", "th"})
_MOST_WORDS = 20_000
_LONGEST_TEXT = 24  # words
_PLACEHOLDER = re.compile(r"%\(\w+\)[sd]|%[sd]|\{\w*\}|<[^>]+>|&\w+;")


def word_texts(language: str, count: int, rng: random.Random) -> list[str]:
    """`count` texts of the language's most frequent words, drawn by frequency: no sentences, but
    every word among others. Empty without word frequencies; ImportError without `wordfreq`."""
    try:
        import wordfreq
    except ImportError as error:
        raise ImportError(
            'the words of other languages are not installed: pip install ".[lab]" in a checkout'
        ) from error
    if language not in wordfreq.available_languages("best"):
        return []
    known = wordfreq.get_frequency_dict(language, "best")
    words, weights = zip(*itertools.islice(known.items(), _MOST_WORDS), strict=True)
    joint = "" if language in _UNSPACED else " "
    return [
        joint.join(rng.choices(words, weights, k=rng.randint(2, _LONGEST_TEXT)))
        for _ in range(count)
    ]


def interface_sentences(language: str) -> list[str]:
    """Sentences of Django's interface in a language, if it has any; ImportError without Django."""
    package = importlib.util.find_spec("django")
    if package is None or not package.submodule_search_locations:
        raise ImportError(
            'sentences of other languages are not installed: pip install ".[lab]" in a checkout'
        )
    name = {"zh": "zh_Hans"}.get(language, language)
    sentences = []
    for path in sorted(
        Path(package.submodule_search_locations[0]).rglob(f"{name}/LC_MESSAGES/*.mo")
    ):
        with path.open("rb") as file:
            catalog = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
        sentences += [" ".join(_PLACEHOLDER.sub(" ", text).split()) for text in catalog.values()]
    kept = (
        sentence
        for sentence in sentences
        if len(sentence) > 3 and "Project-Id-Version" not in sentence
    )
    return list(dict.fromkeys(kept))


def unlabeled_texts(
    written: Mapping[str, Sequence[str]], per_language: int, rng: random.Random
) -> dict[str, list[str]]:
    """About `per_language` texts of each language, shuffled; `written` messages, by language, count
    as text here."""
    texts = {}
    for language in LANGUAGES:
        own = [*written.get(language, ()), *interface_sentences(language)]
        rest = max(0, per_language - len(own))
        drawn = word_texts(language, rest, rng)
        if not drawn and own:
            drawn = rng.choices(own, k=rest)
        texts[language] = rng.sample([*own, *drawn], min(per_language, len(own) + len(drawn)))
    return texts
