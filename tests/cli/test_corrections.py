"""`semsched corrections` on a file; `tests/engine/http` has the server's part."""

import json

import pytest
from predictor_examples import corrections

from vllm_semantic_sched.cli import main
from vllm_semantic_sched.policy.facts.decision import decision_of
from vllm_semantic_sched.predict import SHIPPED_WEIGHTS, weights_file
from vllm_semantic_sched.predict.corrections import append


def test_better_bounds_are_written_into_a_copy_of_the_model(tmp_path, capsys, monkeypatch) -> None:
    # The fit itself is tested elsewhere.
    monkeypatch.setattr("vllm_semantic_sched.lab.training.bounds._RESAMPLES", 5)
    path, output = tmp_path / "corrections.jsonl", tmp_path / "new"
    for number, one in enumerate(corrections(300, seed=1, shift=1.2)):
        append(path, one._replace(sampled=number % 2 == 0))
    arguments = ["corrections", str(path), "--output", str(output)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "300 corrections, 150 of requests drawn at random" in printed
    assert "better" in printed and "biased" in printed
    old, new = (
        json.loads((folder / "config.json").read_text()) for folder in (SHIPPED_WEIGHTS, output)
    )
    # They were read as too calm, so that less probability is enough for level 0.
    assert decision_of(new).bounds[0] < decision_of(old).bounds[0]
    assert {key for key in new if new[key] != old[key]} == {"decision"}
    assert weights_file(output) is not None


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["nowhere.jsonl"], 1, "nowhere.jsonl"),
        (["nowhere.jsonl", "--correct", "a=0"], 2, "for a server, not for a file"),
        (["--server", "http://127.0.0.1:1", "--correct", "a"], 2, "expected ID=LEVEL"),
        (["--server", "http://127.0.0.1:1", "--correct", "a=0"], 1, "http://127.0.0.1:1"),
        (["--server", "http://127.0.0.1:1"], 1, "http://127.0.0.1:1"),
    ],
)
def test_mistakes_are_named(arguments, status, message, capsys) -> None:
    assert main(["corrections", *arguments]) == status
    assert message in capsys.readouterr().err
