"""The script that completes commands in a shell."""

import subprocess

import pytest

from vllm_semantic_sched.cli import main


def test_script_completes_commands_and_options(capsys, tmp_path) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--print-completion", "bash"])
    assert not done.value.code
    script = tmp_path / "semsched"
    script.write_text(capsys.readouterr().out)
    words = "COMP_WORDS=(semsched {}); COMP_CWORD=1; _shtab_semsched; echo ${{COMPREPLY[@]}}"
    for typed, wanted in (("do", "doctor"), ("se", "serve")):
        command = f"source {script}; {words.format(typed)}"
        found = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        assert found.stdout.split() == [wanted], found.stderr
