"""The workload: reproducible, in bursts, with the shares of the mix and lengths from the texts."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from vllm_semantic_sched.lab.bench import workload
from vllm_semantic_sched.lab.bench.prompts import Size, draw_sizes
from vllm_semantic_sched.lab.bench.workload import (
    MIXES,
    WorkloadConfig,
    make_workload,
    parse_mix,
    parse_tenants,
    question_source,
    tables,
    write_message,
)
from vllm_semantic_sched.lab.datasets import TextLength
from vllm_semantic_sched.predict.window import user_turns

BUILTIN, _ = question_source(None)
CONFIG = WorkloadConfig(requests=200, gap=0.5, max_burst=20, seed=3)


def test_seed_determines_workload():
    first = make_workload(CONFIG, BUILTIN)
    assert make_workload(CONFIG, BUILTIN).requests == first.requests
    assert make_workload(replace(CONFIG, seed=4), BUILTIN).requests != first.requests


def test_gap_changes_only_arrivals():
    slow = make_workload(replace(CONFIG, gap=2.0), BUILTIN).requests
    fast = make_workload(CONFIG, BUILTIN).requests
    assert [replace(r, arrival=0.0) for r in slow] == [replace(r, arrival=0.0) for r in fast]
    assert slow[-1].arrival == 4 * fast[-1].arrival


@pytest.mark.parametrize("mix", MIXES)
def test_levels_have_the_shares_of_the_mix(mix):
    requests = make_workload(replace(CONFIG, mix=mix), BUILTIN).requests
    counts = Counter(request.level for request in requests)
    assert [counts[level] for level in range(5)] == [round(200 * s) for s in MIXES[mix]]


def test_mixes_have_different_prompts():
    texts = [
        [r.text for r in make_workload(replace(CONFIG, mix=mix), BUILTIN).requests] for mix in MIXES
    ]
    assert texts[0][:20] != texts[1][:20]


def test_bursts_arrive_every_gap_with_at_most_max_burst():
    requests = make_workload(CONFIG, BUILTIN).requests
    bursts = Counter(request.arrival for request in requests)
    assert max(bursts.values()) <= CONFIG.max_burst
    assert len(bursts) > 5
    assert all(arrival % CONFIG.gap == 0 for arrival in bursts)


def test_output_lengths_follow_the_question_within_bounds():
    requests = make_workload(replace(CONFIG, max_output_tokens=100), BUILTIN).requests
    assert all(8 <= request.output_tokens <= 100 for request in requests)
    questions = tables()["questions"]
    for request in requests:
        asked = next(one for one in questions if request.text.endswith(one["text"]))
        assert min(asked["low"], 100) <= request.output_tokens <= min(asked["high"], 100)


def test_long_prompts_are_less_urgent_and_change_no_other():
    short = make_workload(CONFIG, BUILTIN).requests
    long = make_workload(replace(CONFIG, long_prompts=0.25), BUILTIN).requests
    assert [replace(r, text="") for r in long] == [replace(r, text="") for r in short]
    changed = [pair for pair in zip(short, long, strict=True) if pair[0] != pair[1]]
    assert 0.15 < len(changed) / sum(request.level > 0 for request in short) < 0.35
    for before, after in changed:
        assert after.level > 0
        assert len(after.text) - len(before.text) > 2000
        assert after.text[:20] == before.text[:20] and after.text[-20:] == before.text[-20:]
    with pytest.raises(ValueError, match="long_prompts"):
        make_workload(replace(CONFIG, long_prompts=1.5), BUILTIN)


def test_tenants_have_their_shares_and_change_nothing_else():
    alone = make_workload(CONFIG, BUILTIN).requests
    shared = make_workload(replace(CONFIG, tenants=parse_tenants("2:1:1")), BUILTIN).requests
    assert tuple(replace(request, tenant="") for request in shared) == alone
    counts = Counter(request.tenant for request in shared)
    assert set(counts) == {"tenant 0", "tenant 1", "tenant 2"}
    assert 80 < counts["tenant 0"] < 120


@pytest.mark.parametrize("text", ["a:1", "1:-1", "0:0", ":"])
def test_tenants_must_be_weights(text):
    with pytest.raises(ValueError, match="weights like 4:1:1"):
        parse_tenants(text)


def test_message_stands_alone_before_a_question_or_between_two():
    texts = {
        place: [r.text for r in make_workload(replace(CONFIG, place=place), _question).requests]
        for place in ("alone", "before", "inside")
    }
    assert not any("Why?" in text for text in texts["alone"])
    assert all(text.endswith(" Why?") and text.count("Why?") == 1 for text in texts["before"])
    inside = [text.split("Why?") for text in texts["inside"]]
    assert all(first == last == "" and len(message) > 2 for first, message, last in inside)
    with pytest.raises(ValueError, match="alone, before, inside"):
        make_workload(replace(CONFIG, place="after"), _question)


def _question(rng):
    return TextLength("Why?", 20)


def test_chats_end_with_text_and_have_drawn_lengths():
    config = replace(CONFIG, prompts="chat", max_output_tokens=1500)
    requests = make_workload(config, BUILTIN).requests
    sizes = draw_sizes("chat", config.requests, config.seed)
    assert [request.output_tokens for request in requests] == [size.answer for size in sizes]
    assert [r.text for r in requests] == [r.text for r in make_workload(CONFIG, BUILTIN).requests]
    for request, size in zip(requests, sizes, strict=True):
        assert user_turns(request.prompt)[0].strip() == request.text
        assert len(request.prompt) == pytest.approx(2.2 * size.prompt, rel=0.25, abs=250)
    assert len({request.history for request in requests}) > 150


def test_trace_prompts_share_prefixes_and_keep_distances(monkeypatch):
    sizes = [Size(1200, 9, 0.0, (5, 6)), Size(1300, 9, 0.5, (5, 7)), Size(60, 9, 2.0, (5,))]
    monkeypatch.setattr(workload, "draw_sizes", lambda *given: sizes)
    config = replace(CONFIG, requests=3, prompts="some.jsonl", gap=3.0, max_burst=4)
    first, second, short = make_workload(config, BUILTIN).requests
    pairs = zip(first.prompt, second.prompt, strict=False)
    shared = next(place for place, (one, other) in enumerate(pairs) if one != other)
    assert 900 < shared < 1500 and short.history == ""
    assert [one.arrival for one in (first, second, short)] == [0.0, 0.75, 3.0]


def test_custom_mix_is_parsed_and_invalid_mix_raises():
    assert parse_mix("1:0:0:0:1") == (0.5, 0.0, 0.0, 0.0, 0.5)
    for bad in ("odd", "1:2", "1:1:1:1:-1", "0:0:0:0:0", ""):
        with pytest.raises(ValueError, match="even, rare"):
            parse_mix(bad)


def test_invalid_sizes_raise():
    with pytest.raises(ValueError):
        make_workload(replace(CONFIG, requests=0), BUILTIN)


@pytest.mark.parametrize("level", range(5))
def test_messages_vary_and_have_no_empty_slot(level):
    rng = np.random.default_rng(0)
    messages = {write_message(level, rng) for _ in range(500)}
    assert len(messages) > 200
    assert not any("{" in message or "}" in message for message in messages)


def test_levels_have_many_texts_and_share_none():
    by_level = tables()["messages"]
    assert all(len(set(texts)) >= 40 for texts in by_level)
    texts = [text for texts in by_level for text in texts]
    assert len(texts) == len(set(texts))


def test_unknown_level_raises():
    with pytest.raises(ValueError, match="0 to 4"):
        write_message(5, np.random.default_rng(0))
