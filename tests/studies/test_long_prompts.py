"""Load and table of the study of long prompts."""

import argparse

import pytest
from long_prompts import make_load, schedulers, summarize

from vllm_semantic_sched.lab.bench.client import Record
from vllm_semantic_sched.policy.config import load_policy


def test_load_has_long_prompts_then_urgent_messages() -> None:
    args = argparse.Namespace(seed=0, tokens=16000, long=2, urgent=3, gap=1.5, answer=32)
    load = make_load(args)
    assert [one.level for one in load] == [4, 4, 0, 0, 0]
    assert [one.arrival for one in load] == [0.0, 0.0, 1.0, 2.5, 4.0]
    assert len(load[0].text.split()) > 5000 and load[0].text != load[1].text
    assert len(load[2].text.split()) < 50


def test_rows_differ_in_holds_alone(tmp_path) -> None:
    specs = {spec.name: spec for spec in schedulers(tmp_path)}
    ems = load_policy("ems")
    assert ems.protect.level == 0
    policy = load_policy(specs["no holds"].policy)
    assert policy.protect.level is None
    assert policy.model_copy(update={"protect": ems.protect}) == ems


def test_row_has_urgent_tpot_and_long_ttft() -> None:
    def record(level, arrival, first, finish, tokens) -> Record:
        return Record(
            index=0,
            level=level,
            text_hash="",
            wanted_tokens=tokens,
            arrival=arrival,
            first_token=first,
            finish=finish,
            prompt_tokens=100,
            output_tokens=tokens,
        )

    row = summarize([record(4, 0.0, 30.0, 31.0, 16), record(0, 1.0, 1.5, 2.5, 11)])
    assert row["ttft"] == pytest.approx((0.5, 0.5))
    assert row["tpot"] == pytest.approx((0.1, 0.1))
    assert row["long_ttft"] == [30.0] and row["failed"] == 0
