"""Cost of predictions: texts of known length, targets, the study and its file."""

import argparse
import json

import predictor_cost
import pytest
from common import missed
from predictor_cost import (
    Latency,
    Throughput,
    measure_latency,
    text_of,
    thread_counts,
    weights_bytes,
)
from step_time import CONDITIONS, Phase, StepTimePlan, StepTimes, pool_phases

from vllm_semantic_sched.lab.bench.server import ServerConfig
from vllm_semantic_sched.predict.model import SHIPPED_WEIGHTS


class Reader:
    """A predictor that records its texts."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def predict(self, texts):
        self.texts += texts
        return [None] * len(texts)


@pytest.mark.parametrize("wordpieces", [16, 64, 128])
def test_texts_have_the_wanted_number_of_wordpieces(wordpieces):
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(SHIPPED_WEIGHTS / "tokenizer.json"))
    assert len(tokenizer(text_of(wordpieces)).input_ids) == wordpieces


def test_latency_is_measured_on_one_text_after_a_warm_up():
    reader = Reader()
    latency = measure_latency(reader, 16, repeats=10)
    assert set(reader.texts) == {text_of(16)}
    assert len(reader.texts) > 10
    assert 0 < latency.p50 <= latency.p99


def test_thread_counts_and_size_of_weights(tmp_path):
    assert thread_counts()[0] == 1
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_bytes(b"12345")
    assert weights_bytes(str(tmp_path)) == 5
    assert weights_bytes("someone/on-the-hub") is None


def test_cost_targets_have_upper_and_lower_limits():
    def lines(milliseconds, rate, megabytes):
        targets = predictor_cost.cost_targets(
            [Latency(16, 1.0, 1.0), Latency(64, milliseconds / 1e3, 1.0)],
            [Throughput(1, 0.0), Throughput(2, rate)],
            int(megabytes * 1e6),
        )
        assert len(targets) == 3
        return [line.split(": ")[1] for line in missed(targets)]

    assert lines(7.9, 251.0, 59.9) == []
    assert [line.split()[0] for line in lines(8.1, 249.0, 60.1)] == [
        "one",
        "predictions",
        "weights",
    ]


def test_slow_predictor_reads_too_late_at_a_gpus_pace():
    slow, fast = (predictor_cost.simulate_pace(speed, 300) for speed in (5.0, 500.0))
    assert slow.in_time < 0.5 and fast.in_time > 0.95


def test_step_times_are_pooled_and_compared_with_known_prompts():
    slow = [
        Phase("new", 0.0, 10.0, 5, 4.0, [0.010] * 50),
        Phase("new", 20.0, 30.0, 0, 2.0, [0.020] * 50),
    ]
    new = pool_phases(slow)
    assert (new.tokens, new.p50, new.predictor_share, new.served) == (
        100,
        pytest.approx(0.015),
        0.3,
        5,
    )
    known = StepTimes(100, 0.010, new.p99 / 1.2, 0.0, 0)
    target = predictor_cost.step_target({"none": known, "known": known, "new": new}, 50)
    assert target.measured == pytest.approx(1.2)
    assert not target.met
    with pytest.raises(RuntimeError, match="no token"):
        pool_phases([Phase("none", 0.0, 1.0)])


def test_every_second_cycle_is_reversed(tmp_path):
    plan = StepTimePlan(ServerConfig(tmp_path, tmp_path / "log"), cycles=2)
    assert list(plan.phases()) == [*CONDITIONS, *reversed(CONDITIONS)]


def test_study_prints_and_writes_its_figures(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    predictor_cost.add_arguments(parser)
    command = ["--output", str(tmp_path), "--repeats", "2", "--seconds", "0.01", "--requests", "60"]
    assert predictor_cost.run(parser.parse_args(command)) == 0
    document = json.loads((tmp_path / "predictor.json").read_text())
    assert [item["wordpieces"] for item in document["latency_seconds"]] == [16, 64, 128]
    assert [item["threads"] for item in document["throughput"]] == thread_counts()
    assert [pace["texts_per_second"] is None for pace in document["pace"]] == [
        True,
        *(False for _ in thread_counts()),
    ]
    assert 0 < document["weights_bytes"] <= 60e6
    assert {target["met"] for target in document["targets"]} <= {True, False}
    assert "at most 8" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--repeats"):
        predictor_cost.run(parser.parse_args([*command, "--repeats", "0"]))
