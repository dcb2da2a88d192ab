"""The shipped weights reach the bars of tests/data/predictor_bars.yaml, which lie a little under
what they reached when they were made: nobody ships worse ones unnoticed."""

from pathlib import Path

from vllm_semantic_sched.cli import main
from vllm_semantic_sched.predict import SHIPPED_WEIGHTS

DATA = Path(__file__).parents[1] / "data"


def test_shipped_weights_reach_their_bars(tmp_path, capsys):
    texts = ("--data", str(DATA / "urgency"), "--claims", "--output", str(tmp_path))
    bars = ("--no-baselines", "--bars", str(DATA / "predictor_bars.yaml"))
    status = main(["evaluate", *texts, *bars])
    assert status == 0, capsys.readouterr().err


def test_shipped_files_are_small():
    assert sum(path.stat().st_size for path in SHIPPED_WEIGHTS.iterdir()) <= 45e6
