"""What the prefix cache keeps of urgent requests that have ended (`retention.cache_share`)."""

import pytest
from engine_steps import EngineSteps
from schedulers import build_ours
from virtual_runs import MUCH_HELD, check_feature
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from vllm_semantic_sched.engine import vllm_api
from vllm_semantic_sched.lab.bench.standalone import BLOCK_SIZE, make_request

pytestmark = pytest.mark.engine

BLOCKS = 40


class Cache:
    """An engine with a prefix cache, and prompts that fill blocks of their own."""

    def __init__(self, folder, share: float) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self.scheduler = build_ours(
            folder,
            f"retention: {{cache_share: {share}}}\n",
            num_blocks=BLOCKS + 1,
            prefix_caching=True,
        )
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self._steps = EngineSteps(self.scheduler)
        self._count = 0

    def send(self, text: str, urgency: int, blocks: int = 8) -> int:
        """Serve a request; the blocks of its prompt that were cached."""
        self._count += 1
        length = blocks * BLOCK_SIZE + 1
        seed = sum(map(ord, text)) * 31
        request = Request(
            f"request {self._count}",
            [1 + (seed + place * place) % 997 for place in range(length)],
            make_request("", length, output_tokens=1, urgency=urgency).sampling_params,
            None,
            block_hasher=self._hasher,
        )
        _, cached, _ = self.scheduler.kv_cache_manager.get_computed_blocks(request)
        self._steps.add_requests(request)
        self._steps.finish(20)
        self.check()
        return cached // BLOCK_SIZE

    def check(self) -> None:
        """The list of free blocks is whole in both directions."""
        queue = self.pool.free_block_queue
        free = queue.get_all_free_blocks()
        assert len(free) == queue.num_free_blocks == BLOCKS
        assert len({block.block_id for block in free}) == BLOCKS
        back, block = [], queue.fake_free_list_tail.prev_free_block
        while block is not queue.fake_free_list_head:
            back.append(block)
            block = block.prev_free_block
        assert back == free[::-1]


@pytest.mark.parametrize(("share", "kept"), [(0.0, 0), (0.25, 8), (0.1, 4)])
def test_cache_gives_up_blocks_of_urgent_requests_last(tmp_path, share, kept) -> None:
    """Within a share of all blocks, of which the first of the prompt stay longest."""
    cache = Cache(tmp_path, share)
    cache.send("urgent", urgency=0)
    for number in range(20):
        cache.send(f"other {number}", urgency=4)
    assert cache.send("urgent", urgency=0) == kept
    assert cache.scheduler.counters.total("policy_errors") == 0


def test_oldest_of_urgent_requests_go_first(tmp_path) -> None:
    cache = Cache(tmp_path, 0.4)
    for number in range(4):
        cache.send(f"urgent {number}", urgency=0)
    for number in range(20):
        cache.send(f"other {number}", urgency=4)
    hits = [cache.send(f"urgent {number}", urgency=4) for number in (3, 2, 1, 0)]
    assert hits == [8, 8, 0, 0]


def test_others_use_kept_blocks_when_they_need_them(tmp_path) -> None:
    cache = Cache(tmp_path, 0.9)
    for number in range(4):
        cache.send(f"urgent {number}", urgency=0)
    cache.send("large", urgency=4, blocks=BLOCKS - 2)
    assert sum(cache.send(f"urgent {number}", urgency=4) for number in range(4)) <= 2


def test_blocks_that_others_have_used_are_kept_no_more(tmp_path) -> None:
    """Their place in the order of free blocks is another."""
    cache = Cache(tmp_path, 0.5)
    cache.send("urgent", urgency=0, blocks=16)
    cache.send("large", urgency=4, blocks=BLOCKS - 2)
    cache.scheduler.kv_cache_manager.evict_blocks(set(range(BLOCKS + 1)))
    cache.send("one", urgency=4)
    cache.send("another", urgency=4)
    assert cache.send("one", urgency=4) == 8


def test_answers_stay_the_same() -> None:
    policy = MUCH_HELD | {"retention": {"cache_share": 0.3}}
    check_feature(prefix_cache=True, policy=policy, modes=[True])


def test_reset_of_the_cache_keeps_nothing(tmp_path) -> None:
    cache = Cache(tmp_path, 0.5)
    cache.send("urgent", urgency=0)
    assert cache.scheduler.reset_prefix_cache()
    assert cache.send("other", urgency=4) == 0
    assert cache.send("another", urgency=4) == 0
    assert cache.send("other", urgency=4) == 8


def test_cache_goes_on_in_stock_order_after_a_failure(tmp_path, monkeypatch) -> None:
    cache = Cache(tmp_path, 0.5)
    cache.send("urgent", urgency=0)
    monkeypatch.setattr(vllm_api.CacheOrder, "_first_kept", lambda self, blocks: 1 / 0)
    for number in range(20):
        cache.send(f"other {number}", urgency=4)
    assert cache.send("urgent", urgency=0) == 0
    assert cache.scheduler.counters.total("policy_errors") == 1
