"""Varies a text: adds background, a claim, a task, hasty typing or a chat template."""

import random
import unicodedata

from vllm_semantic_sched.lab.training.wording import choose, fill, surroundings

# Shares of messages and prompts
_LATE = 0.12  # late in a long text
_CLAIMS = 0.03  # after a claim about their urgency, whatever it is
_OPENED = 0.06  # after a neutral opening
_WITHOUT_MARKS = 0.15
_ACCENTS = range(0x300, 0x370)  # combining marks of Latin, Greek and Cyrillic letters


def noisy(text: str, rng: random.Random) -> str:
    """`text` unchanged, late in a longer one, after a claim or a neutral opening, or with noise."""
    if rng.random() < _LATE:
        text = after_background(text, rng)
    if rng.random() < _CLAIMS:
        text = rng.choice(surroundings().claims) + text
    if rng.random() < _OPENED:
        text = rng.choice(surroundings().openers_neutral) + text
    return with_noise(text, rng)


def after_background(message: str, rng: random.Random) -> str:
    """`message` after irrelevant sentences, and sometimes before one more."""
    # No more than four: within the predictor's window the message itself must stay readable.
    count = rng.choices((1, 2, 3, 4), (3, 4, 3, 2))[0]
    sentences = [
        choose(sentence, rng) for sentence in rng.sample(surroundings().background, count + 1)
    ]
    last = sentences.pop()
    sentences.append(rng.choice(surroundings().turns) + message)
    if rng.random() < 0.3:
        sentences.append(last)
    return rng.choice((" ", " ", "\n")).join(sentences)


def with_noise(text: str, rng: random.Random) -> str:
    """`text` with hasty typing or a chat template around it, often neither."""
    if rng.random() < 0.4:
        text = hasty(text, rng)
    if rng.random() < 0.3:
        text = in_chat_template(text, rng)
    return text


def without_marks(text: str, rng: random.Random) -> str:
    """`text`, now and then typed without accents."""
    if rng.random() > _WITHOUT_MARKS:
        return text
    bare = "".join(
        letter for letter in unicodedata.normalize("NFD", text) if ord(letter) not in _ACCENTS
    )
    return unicodedata.normalize("NFC", bare)


def with_task(message: str, task: str, rng: random.Random) -> str:
    """`message` with a short job to do about it, before or after."""
    forms = (
        f"{message} {task}",
        f"{message}\n\n{task}",
        f"{task}\n{message}",
        f'{task} "{message}"',
    )
    return rng.choices(forms, (7, 5, 5, 3))[0]


def with_question(message: str, question: str, rng: random.Random) -> str:
    """`message` with a separate prompt after it, seldom before it."""
    if rng.random() < 0.12:
        return f"{question}\n\n{message}"
    return message + rng.choice((" ", " ", "\n", "\n\n")) + question


def in_chat_template(text: str, rng: random.Random) -> str:
    """`text` inside a chat template, as a scheduler may see it."""
    form = rng.choice(surroundings().templates)
    system = rng.choice(surroundings().systems)
    wrapped = fill(form, system=system, text=text)
    return wrapped.lower() if rng.random() < 0.15 else wrapped


def hasty(text: str, rng: random.Random) -> str:
    """`text` as typed in a hurry: with wrong case, punctuation and letters."""
    style = rng.random()
    if style < 0.35:
        text = text.lower()
    elif style < 0.42:
        text = text.upper()
    if rng.random() < 0.3:
        text = text.replace(".", "").replace(",", "").replace("'", "")
    elif rng.random() < 0.15:
        text = text.rstrip(".") + rng.choice(("!!", "...", "??", "!!!", "?"))
    if rng.random() < 0.3:
        text = _with_typos(text, rng)
    if rng.random() < 0.1:
        for long, short in (("please", "pls"), ("you", "u"), (" are ", " r "), ("because", "bc")):
            text = text.replace(long, short)
    return text


def _with_typos(text: str, rng: random.Random) -> str:
    letters = list(text)
    for _ in range(max(1, len(letters) // 40)):
        place = rng.randrange(max(1, len(letters) - 1))
        if not letters or not letters[place].isalpha():
            continue
        kind = rng.random()
        if kind < 0.4 and place + 1 < len(letters):
            letters[place], letters[place + 1] = letters[place + 1], letters[place]
        elif kind < 0.75:
            letters[place] = ""
        else:
            letters[place] *= 2
    return "".join(letters)
