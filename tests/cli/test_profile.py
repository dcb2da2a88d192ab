"""`semsched profile`: options that are rejected before an engine starts."""

from vllm_semantic_sched import cli


def test_options_are_checked_before_the_engine_starts(capsys) -> None:
    assert cli.main(["profile", "--", "model"]) == 2
    assert "--output or --check" in capsys.readouterr().err
    assert cli.main(["profile", "--check", "no-such", "--", "model"]) == 2
    assert "no-such" in capsys.readouterr().err
