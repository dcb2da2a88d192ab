"""The load: reproducible, of the right mix, in bursts, with lengths that belong to the texts."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from vllm_semantic_sched.bench.asks import BUILTIN_ASKS, ask_source
from vllm_semantic_sched.bench.load import MIXES, WorkloadConfig, parse_mix
from vllm_semantic_sched.bench.message_texts import BY_LEVEL
from vllm_semantic_sched.bench.messages import write_message
from vllm_semantic_sched.bench.workload import make_workload

BUILTIN, _ = ask_source(None)
CONFIG = WorkloadConfig(requests=200, gap=0.5, max_burst=20, seed=3)


def test_same_seed_same_workload_and_other_seed_another():
    first = make_workload(CONFIG, BUILTIN)
    assert make_workload(CONFIG, BUILTIN).requests == first.requests
    assert make_workload(replace(CONFIG, seed=4), BUILTIN).requests != first.requests


def test_pace_changes_arrivals_only():
    slow = make_workload(replace(CONFIG, gap=2.0), BUILTIN).requests
    fast = make_workload(CONFIG, BUILTIN).requests
    assert [replace(r, arrival=0.0) for r in slow] == [replace(r, arrival=0.0) for r in fast]
    assert slow[-1].arrival == 4 * fast[-1].arrival


@pytest.mark.parametrize("mix", MIXES)
def test_levels_have_the_shares_of_the_mix(mix):
    requests = make_workload(replace(CONFIG, mix=mix), BUILTIN).requests
    counts = Counter(request.level for request in requests)
    assert [counts[level] for level in range(5)] == [round(200 * s) for s in MIXES[mix]]


def test_mixes_share_no_prompt_order():
    texts = [
        [r.text for r in make_workload(replace(CONFIG, mix=mix), BUILTIN).requests] for mix in MIXES
    ]
    assert texts[0][:20] != texts[1][:20]


def test_bursts_are_at_most_max_burst_and_a_gap_apart():
    requests = make_workload(CONFIG, BUILTIN).requests
    bursts = Counter(request.arrival for request in requests)
    assert max(bursts.values()) <= CONFIG.max_burst
    assert len(bursts) > 5
    assert all(arrival % CONFIG.gap == 0 for arrival in bursts)


def test_lengths_stay_in_bounds_and_follow_the_ask():
    requests = make_workload(replace(CONFIG, max_output_tokens=100), BUILTIN).requests
    assert all(8 <= request.output_tokens <= 100 for request in requests)
    by_text = {ask.text: ask for ask in BUILTIN_ASKS}
    for request in requests:
        ask = next(ask for text, ask in by_text.items() if request.text.endswith(text))
        assert min(ask.low, 100) <= request.output_tokens <= min(ask.high, 100)


def test_custom_mix_and_bad_ones():
    assert parse_mix("1:0:0:0:1") == (0.5, 0.0, 0.0, 0.0, 0.5)
    for bad in ("odd", "1:2", "1:1:1:1:-1", "0:0:0:0:0", ""):
        with pytest.raises(ValueError, match="even, rare"):
            parse_mix(bad)


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError):
        make_workload(replace(CONFIG, requests=0), BUILTIN)


@pytest.mark.parametrize("level", range(5))
def test_every_message_renders_and_voices_vary(level):
    rng = np.random.default_rng(0)
    messages = {write_message(level, rng) for _ in range(500)}
    assert len(messages) > 200
    assert not any("{" in message or "}" in message for message in messages)


def test_corpus_is_large_and_levels_share_no_text():
    assert all(len(set(texts)) >= 40 for texts in BY_LEVEL)
    everything = [text for texts in BY_LEVEL for text in texts]
    assert len(everything) == len(set(everything))


def test_unknown_level_is_refused():
    with pytest.raises(ValueError, match="0 to 4"):
        write_message(5, np.random.default_rng(0))
