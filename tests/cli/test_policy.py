"""`semsched policy keys`, and what `semsched policy` refuses."""

import pytest

from vllm_semantic_sched.cli import arguments, main, top
from vllm_semantic_sched.cli.console import describe_keys
from vllm_semantic_sched.operate.client import AdminClient
from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.config.files import shipped_names
from vllm_semantic_sched.policy.config.section import keys_of
from vllm_semantic_sched.sim.sections import Settings


def test_every_key_is_described_with_its_meaning() -> None:
    for model in (Policy, Settings):
        lines = describe_keys(model).splitlines()
        for key in keys_of(model):
            place = next(n for n, line in enumerate(lines) if line.startswith(f"{key.name}:"))
            if key.meaning:
                assert lines[place + 1].strip().split()[0] == key.meaning.split()[0]


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("policy check no-such-policy", 1),
        ("policy reload", 2),
        ("policy reload --server http://127.0.0.1:1", 1),
        ("maintenance resume --server http://127.0.0.1:1", 1),
    ],
)
def test_errors_begin_with_the_command(words, status, capsys) -> None:
    assert main(words.split()) == status
    assert capsys.readouterr().err.startswith(f"semsched {words.split()[0]}: ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the file is empty"),
        ("# a template that failed\n", "`{}` stands for all defaults"),
        ("base: sjf\nlevels: 5\nbase: priority\n", "the key 'base' occurs twice (line 3)"),
        ("aging:\n  enabled: true\n  enabled: false\n", "'enabled' occurs twice (line 3)"),
        ("hints: {urgency: cap}\n", "hints.urgency: cap has no effect"),
    ],
)
def test_check_refuses_files_that_do_not_say_what_they_seem_to(
    tmp_path, capsys, text, words
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    assert main(["policy", "check", str(path)]) == 1
    assert words in capsys.readouterr().err


def test_list_says_in_a_line_what_each_policy_is_for(capsys) -> None:
    assert main(["policy", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        "sjf         Shortest job first: least remaining time by predicted output length." in lines
    )
    assert lines[-1].startswith("profiles: auto ")
    for name, line in zip(shipped_names("policy"), lines[:-1], strict=True):
        assert line.startswith(f"{name} ") and line.endswith(".") and len(line.split()) > 4


def test_canary_status_says_that_nothing_is_counted_yet(capsys, monkeypatch) -> None:
    tally = {"new": [], "current": []}
    engine = {
        "running": True,
        "role": "turns",
        "arm": "new",
        "end": "",
        "tiers": [],
        "tallies": tally,
    }
    monkeypatch.setattr(AdminClient, "call", lambda *_: {"engines": [engine]})
    assert main(["canary", "status"]) == 0
    out = capsys.readouterr().out
    assert "now the new policy" in out and "nothing counted yet" in out
    assert "mean now" not in out


def test_check_says_that_a_folder_is_one(tmp_path, capsys) -> None:
    assert main(["policy", "check", str(tmp_path)]) == 1
    assert "is a folder" in capsys.readouterr().err


def test_server_is_this_machines_unless_one_is_named(capsys, monkeypatch) -> None:
    for module in (arguments, top):
        monkeypatch.setattr(module, "LOCAL_SERVER", "127.0.0.1:1")  # http is understood
    actions = (["top", "--once"], ["maintenance", "resume"], ["canary", "status"], ["corrections"])
    for words in actions:
        assert main(words) == 1
        printed = capsys.readouterr()
        assert "http://127.0.0.1:1" in printed.out + printed.err
        assert "unknown url" not in printed.out + printed.err


def test_check_names_keys_without_effect(tmp_path, capsys) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("base: fcfs\nlevels: 3\ndefault_level: 1\nprotect: {level: 0}\naging: {}\n")
    assert main(["policy", "check", str(path)]) == 0
    assert "no effect: aging, protect\n" in capsys.readouterr().out
    path.write_text("aging: {}\n")
    assert main(["policy", "check", str(path)]) == 0
    assert "no effect" not in capsys.readouterr().out
