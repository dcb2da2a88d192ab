"""The prefix cache of the simulated engine."""

import json
import random
from collections import Counter
from statistics import fmean

import numpy as np
from drive import PROFILE, drive
from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.sim.engine import Engine
from vllm_semantic_sched.sim.request import SimRequest
from vllm_semantic_sched.sim.scenario import parse_scenarios
from vllm_semantic_sched.sim.sections import WorkloadModel
from vllm_semantic_sched.sim.simulation import simulate
from vllm_semantic_sched.sim.workload import Workload, draw_workload

SIZE = 16


def request(index: int, arrival: float, prompt: int, output: int, *blocks: int) -> SimRequest:
    return SimRequest(index, arrival, index % 5, prompt, output, blocks=blocks)


def ttft(runs, index: int) -> float:
    return runs[index].first_token - runs[index].request.arrival


def test_shared_beginning_is_computed_once() -> None:
    """Two long prompts with the same first 60 blocks, one after the other."""
    chain = tuple(range(60))
    requests = [request(0, 0.0, 1000, 4, *chain, 100), request(1, 50.0, 1000, 4, *chain, 200)]
    cached = drive({}, requests, prefix_caching=True, kv_blocks=400)
    apart = drive({}, requests, kv_blocks=400)
    assert ttft(cached, 0) == ttft(apart, 0)
    rest = PROFILE.prefill(60 * SIZE, 1000) / PROFILE.prefill(0, 1000)
    assert ttft(cached, 1) < (rest + 0.5) * ttft(cached, 0)


def test_what_nobody_uses_goes_when_its_room_is_needed() -> None:
    chain = tuple(range(60))
    filler = [request(1 + n, 100.0 + n, 900, 4, *range(1000 * n, 1000 * n + 50)) for n in range(4)]
    again = request(5, 500.0, 1000, 4, *chain)
    first = request(0, 0.0, 1000, 4, *chain)
    for blocks, hit in ((100, False), (2000, True)):
        runs = drive({}, [first, *filler, again], prefix_caching=True, kv_blocks=blocks)
        assert (ttft(runs, 5) < 0.8 * ttft(runs, 0)) == hit


def test_requests_that_share_blocks_fit_where_others_do_not() -> None:
    chain = tuple(range(50))
    crowd = [request(n, 0.0, 820, 40, *chain) for n in range(8)]
    runs = drive({}, crowd, prefix_caching=True, kv_blocks=130, seats=8, token_budget=900)
    apart = drive({}, crowd, kv_blocks=130, seats=8, token_budget=900)
    assert max(run.finish for run in runs) < 0.6 * max(run.finish for run in apart)


def test_request_with_a_copy_of_a_cached_block_caches_what_follows() -> None:
    """Two requests with the same prompt of whole blocks: the second computes its last one again."""
    prompt = tuple(range(10))
    twins = [request(n, 0.0, 160, 40, *prompt, 100 * n, 100 * n + 1) for n in (1, 2)]
    next_turn = request(3, 50.0, 240, 4, *prompt, 200, 201, 202)
    runs = drive({}, [*twins, next_turn], prefix_caching=True, kv_blocks=100)
    assert [run.found for run in runs] == [0, 9 * SIZE, 12 * SIZE]


def _check(engine: Engine) -> None:
    """What holds of pool and cache between two steps."""
    pool = engine.pool
    holders = Counter[object]()
    for run in engine.runs.values():
        holders.update(run.cached)
        hashes = tuple(block.hash for block in run.cached)
        assert hashes == run.request.blocks[: len(hashes)]
        assert len(run.cached) <= engine.decoding.blocks(run)
    assert all(block.users == count for block, count in holders.items())
    assert 0 <= len(pool.unused) <= pool.free <= pool.total
    cached = {block for copies in pool.cached.values() for block in copies}
    assert cached == holders.keys() | pool.unused.keys()
    assert not holders.keys() & pool.unused.keys()
    for job in engine.core.waiting:
        run = engine.runs[job]
        assert engine.prefixes.cached_blocks(run) == engine.prefixes.hits(run)[0]
    # Shared blocks are taken once.
    own = sum(engine.decoding.blocks(run) - len(run.cached) for run in engine.runs.values())
    assert pool.total - pool.free == own + len(holders)


@given(st.integers(0, 10_000))
def test_no_block_is_lost_or_counted_twice(seed: int) -> None:
    """Random chains of a few beginnings, on an engine that preempts for want of blocks."""
    rng = random.Random(seed)
    requests = []
    for index in range(25):
        prompt, output = rng.randint(1, 120), rng.randint(1, 60)
        chain, blocks = rng.randint(0, 2), []
        for place in range((prompt + output) // SIZE):
            chain = hash((chain, place, rng.random() < 0.3))
            blocks.append(chain)
        requests.append(request(index, index * 0.01, prompt, output, *blocks))
    engines = []

    def check(engine: Engine, now: float) -> None:
        engines[:] = [engine]
        _check(engine)

    runs = drive({}, requests, check, prefix_caching=True, kv_blocks=24, seats=5)
    assert all(run.finish is not None for run in runs)
    (engine,) = engines
    assert engine.pool.free == engine.pool.total
    assert not any(block.users for copies in engine.pool.cached.values() for block in copies)


def draw(seed: int = 0, **keys) -> Workload:
    model = WorkloadModel(arrivals="poisson", requests=60, rate=5.0, **keys)
    return draw_workload(model, 5, np.random.default_rng(seed), block_size=SIZE)


def test_turns_of_a_session_continue_each_other() -> None:
    reuse = {"beginnings": 2, "beginning": {"value": 100}, "turns": 3, "pause": 1.0}
    workload = draw(reuse=reuse, prompt={"value": 40}, output={"value": 20})
    requests = [workload.request(index) for index in range(len(workload))]
    assert len(requests) == 60
    by_length = {
        turn: [request for request in requests if request.prompt_tokens == 140 + 60 * turn]
        for turn in range(3)
    }
    assert sum(map(len, by_length.values())) == 60
    # What begins alike has whole blocks in common: 6 of a beginning, and all of the last turn.
    assert len({request.blocks[:6] for request in requests}) == 2
    assert len({request.blocks[6] for request in by_length[0]}) == len(by_length[0])
    first = {request.blocks: request for request in by_length[0]}
    for second in by_length[1]:
        before = first[second.blocks[: 160 // SIZE]]
        assert before.arrival < second.arrival and before.level == second.level


def test_prompts_without_reuse_have_no_hashes() -> None:
    assert all(not draw().request(index).blocks for index in range(60))


def test_trace_of_mooncake_is_read_with_its_hashes(tmp_path) -> None:
    """Each id stands for 512 tokens and all before them."""
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 500, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 10]},
        {"timestamp": 900, "input_length": 600, "output_length": 5, "hash_ids": [7, 11]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    model = WorkloadModel(arrivals="jsonl", path=str(path))
    workload = draw_workload(model, 5, np.random.default_rng(0), block_size=SIZE)
    first, second, third = (workload.request(index) for index in range(3))
    assert second.arrival == 0.5 and second.prompt_tokens == 1100 and second.output_tokens == 5
    assert [len(request.blocks) for request in (first, second, third)] == [68, 68, 37]
    assert first.blocks[:64] == second.blocks[:64] and first.blocks[64] != second.blocks[64]
    assert third.blocks[:32] == first.blocks[:32] and third.blocks[32] != first.blocks[32]


def test_rank_by_uncached_work_shortens_the_waits_of_long_prompts() -> None:
    """Questions about documents, of which the cache holds some."""
    content = {
        "workload": {
            "arrivals": "poisson",
            "requests": 300,
            "rate": 20.0,
            "prompt": {"value": 60},
            "output": {"value": 40},
            "reuse": {
                "beginnings": 30,
                "beginning": {"kind": "lognormal", "median": 4000, "sigma": 0.5},
            },
        },
        "engine": {
            "profile": "h100-8b",
            "seats": 32,
            "kv_blocks": 6000,
            "prefix_caching": True,
        },
        "schedulers": {
            "by length": {"policy": "sjf"},
            "uncached": {"policy": "sjf", "rank_uncached": True},
        },
    }
    scenario = parse_scenarios(content)[0]
    ttft, found = {}, {}
    for name in scenario.policies:
        runs = simulate(scenario, name).runs
        ttft[name] = fmean(run.first_token - run.request.arrival for run in runs)
        found[name] = sum(run.found for run in runs)
    assert ttft["uncached"] < 0.7 * ttft["by length"]
    assert found["uncached"] > found["by length"]
