"""The study of schedulers on the emulated device, on a small load."""

import argparse
import json

import pytest
from device_load import add_arguments, run

pytestmark = pytest.mark.engine


def test_table_has_a_row_for_each_run(tmp_path, capsys) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = "--requests 40 --seats 16 --prompts short --warm 1 --scheduler fcfs ems --swap 0 1"
    assert run(parser.parse_args([*words.split(), "--output", str(tmp_path)])) == 0
    printed = capsys.readouterr().out
    assert "capacity:" in printed and "emulated device: real vLLM" in printed
    for name in ("fcfs, 1.75x", "ems, 1.75x", "ems, swap 1 GiB, 1.75x"):
        assert name.split(",")[0] in printed
    rows = json.loads((tmp_path / "figures.json").read_text())
    assert rows["ems, 1.75x"]["levels"][4]["requests"] > 0
    assert set(rows) == {"fcfs, 1.75x", "ems, 1.75x", "ems, swap 1 GiB, 1.75x"}
