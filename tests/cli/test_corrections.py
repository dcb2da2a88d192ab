"""`semsched corrections` on a file; `tests/engine/http` has the server's part."""

import pytest
import yaml
from predictor_examples import corrections

from vllm_semantic_sched.cli import main
from vllm_semantic_sched.policy.config import load_policy
from vllm_semantic_sched.predict.corrections import append


def test_better_thresholds_are_written_as_a_policy(tmp_path, capsys, monkeypatch) -> None:
    # The fit itself is tested elsewhere.
    monkeypatch.setattr("vllm_semantic_sched.lab.training.thresholds._RESAMPLES", 5)
    path, output = tmp_path / "corrections.jsonl", tmp_path / "new.yaml"
    for number, one in enumerate(corrections(300, seed=1, shift=1.2)):
        append(path, one._replace(sampled=number % 2 == 0))
    arguments = ["corrections", str(path), "--output", str(output)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "300 corrections, 150 of requests drawn at random" in printed
    assert "better" in printed and "biased" in printed
    assert load_policy(str(output)).decision.thresholds > load_policy("ems").decision.thresholds
    assert list(yaml.safe_load(output.read_text())) == ["decision"]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["nowhere.jsonl"], 1, "nowhere.jsonl"),
        (["nowhere.jsonl", "--correct", "a=0"], 2, "needs a server's address"),
        (["http://127.0.0.1:1", "--correct", "a"], 2, "expected ID=LEVEL"),
        (["http://127.0.0.1:1", "--correct", "a=0"], 1, "http://127.0.0.1:1"),
    ],
)
def test_mistakes_are_named(arguments, status, message, capsys) -> None:
    assert main(["corrections", *arguments]) == status
    assert message in capsys.readouterr().err
