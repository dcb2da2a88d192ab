"""`semsched evaluate` end to end on a small CSV."""

import argparse
import json

import pytest

from vllm_semantic_sched.predict import evaluate


@pytest.fixture(autouse=True)
def without_data_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SEMSCHED_DATA", str(tmp_path / "absent"))


def run(*arguments):
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    return evaluate.run(parser.parse_args([str(argument) for argument in arguments]))


def test_report_of_levels_and_lengths(tmp_path):
    table = tmp_path / "messages.csv"
    table.write_text(
        "text,level,output_tokens\n"
        "my dad is not breathing,0,\n"
        "write a poem about rain,4,120\n"
        "what is two plus two,4,5\n"
        '"heavy chest pain, sweating",1,\n'
    )
    assert run("--data", table, "--output", tmp_path / "out") == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    model = report["urgency"]["model"]
    assert model["n"] == 4 and sum(map(sum, model["confusion"])) == 4
    assert report["urgency"]["most frequent level"]["recall"] == [0.0, 0.0, None, None, 1.0]
    assert report["length"]["model"]["n"] == 2
    assert "| model |" in (tmp_path / "out" / "report.md").read_text()


def test_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    table = tmp_path / "messages.csv"
    table.write_text("text,level\nhello,4\nnot breathing,0\n")
    assert run("--data", table, "--output", tmp_path / "out") == 0
    assert (tmp_path / "out" / "confusion.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,level\nhello,7\n", "level must be 0 to 4, not 7"),
        ("text,level\nhello,soon\n", "level must be a whole number"),
        ("words,level\nhello,1\n", "needs the column text"),
        ("text,level\n", "has no rows"),
    ],
)
def test_a_bad_table_is_explained(tmp_path, capsys, content, message):
    table = tmp_path / "messages.csv"
    table.write_text(content)
    assert run("--data", table, "--output", tmp_path / "out") == 1
    assert message in capsys.readouterr().err


def test_missing_inputs_are_explained(tmp_path, capsys):
    assert run("--data", tmp_path / "none.csv", "--output", tmp_path / "out") == 1
    assert "none.csv" in capsys.readouterr().err
    assert run("--builtin", "nhamcs-test", "--output", tmp_path / "out") == 1
    assert "SEMSCHED_DATA" in capsys.readouterr().err
