"""What a second look at long prompts finds, and how many false alarms it raises.

Long prompts with an emergency in the middle, and long prompts without one: written ones, answers of
models, tasks and framed emergencies (novels, lessons, news) of the evaluation's compositions. Reads
each as a server does, then its parts, with the start and the end of the prompt around them and
alone; and for comparison the sentences that the first reading saw. Half of the texts, by a digest,
served to choose the rule.

    SEMSCHED_DATA=DIR python scripts/studies/second_look.py --texts tests/data
"""

import argparse
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from hashlib import md5
from pathlib import Path
from typing import NamedTuple

import yaml
from common import main, write_json

from vllm_semantic_sched.cli.console import make_console
from vllm_semantic_sched.lab.report.tables import make_table
from vllm_semantic_sched.policy.estimates.decision import CERTAIN_PART, decide_level
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.predict.model import TextPredictor
from vllm_semantic_sched.predict.second_look import MOST_PARTS, parts_of
from vllm_semantic_sched.predict.window import DEFAULT_WINDOW, cut_text
from vllm_semantic_sched.sim.data_folder import data_root

_SENTENCE_END = re.compile(r"(?<=[.?!…])\s+|(?<=[。！？।۔])|\n+")
_URGENT = 1
_PASTED = 60  # answers of models without anything else
_LANGUAGE = 4  # texts of each kind for each language but English
_FRAMING = 64  # characters, about what `parts_of` puts around a part


class Text(NamedTuple):
    """A prompt of a kind; urgent if it is level 0, else level 4."""

    kind: str
    urgent: bool
    text: str

    @property
    def chosen_by(self) -> bool:
        """Whether it served to choose the rule."""
        return md5(self.text.encode()).digest()[0] % 2 == 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--texts", type=Path, default=Path("tests/data"), metavar="DIR")
    parser.add_argument("--model", help="folder (default: the shipped model)")
    parser.add_argument("--output", type=Path, default=Path("bench-output"), metavar="DIR")


def run(args: argparse.Namespace) -> int:
    """Read everything, print a table and write `second_look.json`."""
    predictor = TextPredictor.load(args.model)
    texts = [*written(args.texts / "long_prompts.yaml"), *composed(args.texts / "compositions")]
    first = predictor.predict([text.text for text in texts])
    console = make_console()
    rows = []
    for name, certain in (
        ("parts", 0.9),
        ("parts", 0.95),
        ("parts", CERTAIN_PART),
        ("parts", 0.995),
        ("parts alone", CERTAIN_PART),
        ("sentences seen before", CERTAIN_PART),
    ):
        readings = _readings(name, texts, predictor)
        rows += _figures(name, certain, texts, first, readings)
    table = make_table(
        "", "read again", "certain", "half", "texts", "n", "first", "second", words=1
    )
    for row in rows:
        table.add_row(*map(str, row.values()))
    console.print(table)
    write_json(args.output / "second_look.json", rows)
    return 0


_known: dict[str, list[list[Prediction]]] = {}


def _readings(name: str, texts: list[Text], predictor: TextPredictor) -> list[list[Prediction]]:
    """Of each text, what the second look reads in it."""
    if name not in _known:
        asked = [_segments(name, text.text) for text in texts]
        flat = iter(predictor.predict([part for parts in asked for part in parts]))
        _known[name] = [[next(flat) for _ in parts] for parts in asked]
    return _known[name]


def _segments(name: str, text: str) -> list[str]:
    if name == "parts":
        return parts_of(text)
    if name == "parts alone":
        return [part[_FRAMING:-_FRAMING] for part in parts_of(text)]
    sentences = _SENTENCE_END.split(cut_text(text, DEFAULT_WINDOW))
    return [sentence for sentence in sentences if len(sentence) > 12][:MOST_PARTS]


def _figures(
    name: str,
    certain: float,
    texts: list[Text],
    first: list[Prediction],
    readings: list[list[Prediction]],
) -> Iterator[dict[str, object]]:
    """Numbers of texts read as level 0 or 1, by kind, without and with the second look."""
    counts: defaultdict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for text, whole, parts in zip(texts, first, readings, strict=True):
        level = decide_level(whole.urgency, whole.decision)
        read_urgent = level <= _URGENT and not whole.unreadable
        raised = read_urgent or any(
            sum(part.urgency[: _URGENT + 1]) >= certain and not part.unreadable for part in parts
        )
        half = "tuning" if text.chosen_by else "test"
        group = counts["urgent" if text.urgent else "calm", half, text.kind]
        group[0] += 1
        group[1] += read_urgent
        group[2] += raised
    for (urgent, half, kind), (count, first_count, second_count) in sorted(
        counts.items(), reverse=True
    ):
        yield {
            "read": name,
            "certain": certain,
            "half": half,
            "texts": f"{urgent}: {kind}",
            "n": count,
            "first": first_count,
            "second": second_count,
        }


# Texts


def written(path: Path) -> Iterator[Text]:
    """Long prompts that were written for this study."""
    for kind, texts in yaml.safe_load(path.read_text("utf-8")).items():
        for text in texts:
            yield Text("written", kind == "urgent", text)


def composed(folder: Path) -> Iterator[Text]:
    """An emergency, a framed one or none in the middle of something long, in each language."""
    answers = _answers()
    rng = random.Random(5)
    for path in sorted(folder.glob("*.yaml")):
        parts = yaml.safe_load(path.read_text("utf-8"))
        english = path.stem == "en"
        many = None if english else _LANGUAGE
        for kind, urgent in (("emergencies", True), ("framed", False)):
            for message in parts[kind][:many]:
                around = _SENTENCE_END.split(next(answers)) if english else parts["tasks"] * 2
                middle = len(around) // 2 if english else rng.randint(6, len(around) - 6)
                text = " ".join([*around[:middle], message, *around[middle:]])
                yield Text(kind, urgent, f"{rng.choice(parts['tasks'])} {text}")
    for _ in range(_PASTED):
        yield Text("pasted answers", False, f"Please improve this text.\n\n{next(answers)}")


def _answers() -> Iterator[str]:
    """Long answers of models in English."""
    root = data_root()
    if root is None:
        raise SystemExit("set SEMSCHED_DATA to the data folder")
    path = root / "alpaca_eval_outputs" / "alpaca_eval_outputs.jsonl"
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            answer = max(json.loads(line)["outputs"].values(), key=len)
            if len(answer) > 1500:
                yield answer[:2500]


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
