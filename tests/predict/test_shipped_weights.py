"""The shipped weights reach the bars of tests/data/predictor_bars.yaml, which lie a little under
what they reached when they were made: nobody ships worse ones unnoticed."""

import base64
import inspect
import random
from pathlib import Path

import pytest
import yaml

from vllm_semantic_sched.cli import main
from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.estimates.decision import predicted_level
from vllm_semantic_sched.predict import SHIPPED_WEIGHTS
from vllm_semantic_sched.predict.instant import InstantReader
from vllm_semantic_sched.predict.model import TextPredictor

DATA = Path(__file__).parents[1] / "data"
BYTES = random.Random(0).randbytes(2000)
NO_MESSAGES = {
    "random bytes": BYTES.decode("utf-8", "replace"),
    "random bytes as Latin-1": BYTES.decode("latin-1"),
    "base64": base64.b64encode(BYTES).decode(),
    "base64 in lines": base64.encodebytes(BYTES).decode(),
    "Python": inspect.getsource(random.Random.sample),
    "C": "static int run(struct job *j) { if (!j->ready) return -1; kill(j->pid, 9); return 0; }",
    "SQL": "SELECT name, MAX(level) FROM calls WHERE ended IS NULL GROUP BY name HAVING n > 3;",
    "a traceback": "Traceback (most recent call last):\n  File 'a.py', line 3\nRuntimeError: dead",
    "JSON": '{"id": 17, "status": "fatal", "children": [{"id": 18}, {"id": 19}]}',
    "empty": "",
    "blanks": " \n\t ",
    "one word": "help " * 10_000,
    "another word": "fire" * 10_000,
    "Amharic": "ሰላም ነው እንዴት ነህ ወንድሜ",
    "Cherokee": "ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ",
    "emoji": "\U0001f600" * 40,
}


def every_other(name: str, folder: Path) -> Path:
    """A copy of a test set with half of the emergencies, framed texts and chats: `semsched evaluate
    --all` reads all of them."""
    (folder / name).mkdir()
    for path in (DATA / name).glob("*.yaml"):
        texts = yaml.safe_load(path.read_text("utf-8"))
        if isinstance(texts, list):
            texts = texts[::2]
        else:
            texts = {key: rows if key == "joiners" else rows[::2] for key, rows in texts.items()}
        (folder / name / path.name).write_text(yaml.safe_dump(texts), "utf-8")
    return folder / name


def test_shipped_weights_reach_their_bars(tmp_path, capsys):
    composed = (every_other(name, tmp_path) for name in ("compositions", "conversations"))
    read = (DATA / "urgency", DATA / "everyday", DATA / "long_prompts.csv", *composed)
    texts = ("--data", *map(str, read), "--output", str(tmp_path / "out"))
    bars = ("--no-baselines", "--bars", str(DATA / "predictor_bars.yaml"))
    status = main(["evaluate", *texts, *bars])
    assert status == 0, capsys.readouterr().err


def test_shipped_files_are_small():
    assert sum(path.stat().st_size for path in SHIPPED_WEIGHTS.iterdir()) <= 45e6


@pytest.fixture(scope="module")
def readers():
    instant = InstantReader.load()
    assert instant is not None
    return TextPredictor.load(), instant


@pytest.mark.parametrize("name", NO_MESSAGES)
def test_what_is_no_message_is_never_urgent(readers, name):
    network, instant = readers
    for prediction in (*network.predict([NO_MESSAGES[name]]), instant.read(NO_MESSAGES[name])):
        assert prediction.unreadable or predicted_level(Policy(), prediction) >= 3, prediction
