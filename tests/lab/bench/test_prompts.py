"""Lengths of prompts and answers at the scale of a GPU, and traces."""

import json

import pytest

from vllm_semantic_sched.lab.bench.prompts import (
    PROMPTS,
    TRACE,
    draw_sizes,
    longest_prompt,
    read_trace,
    trace_file,
)

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def mooncake(path, *rows: tuple[int, int, int, list[int]]):
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = (json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)
    path.write_text("".join(lines))
    return path


@pytest.mark.parametrize("name", PROMPTS)
def test_named_prompts_are_drawn_by_seed(name):
    sizes = draw_sizes(name, 200, 1)
    assert sizes == draw_sizes(name, 200, 1) != draw_sizes(name, 200, 2)
    median = sorted(size.prompt for size in sizes)[100]
    assert median == pytest.approx({"chat": 1500, "short": 200, "long": 6000}[name], rel=0.25)
    assert max(size.prompt for size in sizes) <= longest_prompt(name)


def test_trace_in_either_form(tmp_path):
    rows = (0, 1100, 40, [7, 8, 9]), (500, 20_000, 5, []), (3000, 600, 9000, [7, 4])
    path = mooncake(tmp_path / "some.jsonl", *rows)
    first, second = read_trace(path)  # the one between is too long
    assert (first.prompt, first.answer, first.blocks) == (1100, 40, (7, 8, 9))
    assert (second.arrival - first.arrival, second.answer) == (3.0, 1500)
    path = tmp_path / "some.csv"
    path.write_text(f"{AZURE}2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:47.6805900,9,1\n")
    first, second = read_trace(path)
    assert (first.prompt, first.answer, first.blocks) == (374, 44, ())
    assert second.arrival - first.arrival == pytest.approx(1.0)


def test_trace_keeps_mean_distance_and_must_be_long_enough(tmp_path):
    times = (1000, 1100, 4000)
    path = mooncake(tmp_path / "t.jsonl", *((time, 100, 5, [1]) for time in times))
    assert [size.arrival for size in draw_sizes(str(path), 3, 0)] == pytest.approx([0, 1 / 15, 2])
    with pytest.raises(ValueError, match="only 3 requests"):
        draw_sizes(str(path), 4, 0)


def test_what_is_no_trace_is_refused(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="chat, short, long, trace nor a file"):
        trace_file("chatty")
    monkeypatch.setenv("SEMSCHED_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"conversation_trace.jsonl .*SEMSCHED_DATA"):
        trace_file(TRACE)
    (tmp_path / "mooncake").mkdir()
    path = mooncake(tmp_path / "mooncake" / "conversation_trace.jsonl", (0, 100, 5, [1]))
    assert trace_file(TRACE) == path
    path.write_text('{"hash_ids": [1], "input_length": 5}\n')
    with pytest.raises(ValueError, match="request 1 of the trace"):
        list(read_trace(path))
