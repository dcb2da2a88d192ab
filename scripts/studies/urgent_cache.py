"""Compare what the prefix cache keeps of urgent conversations, on the emulated device.

Conversations of level 0 and 3 send their next turn 25 seconds after the last one on average, beside
prompts of level 4 that share eight beginnings. Prints, for vLLM's own scheduler and for values of
`retention.cache_share`, the share of prompt tokens found in the cache and the seconds to the first
token. Takes half a minute a row.

example:
  python scripts/studies/urgent_cache.py --conversations 6
"""

import argparse
import random
from collections import Counter
from statistics import fmean
from typing import Any

from vllm_semantic_sched.cli.console import print_table
from vllm_semantic_sched.lab.device.load import LoadRequest
from vllm_semantic_sched.lab.device.virtual import EngineConfig, VirtualEngine

_SECONDS = 240.0
_TOKENS = range(20, 3000)
_LONGEST = 4000  # tokens of a conversation, which then begins anew
_BLOCKS = 4000


def load(conversations: int, seed: int) -> list[LoadRequest]:
    """So many conversations of level 0, 24 of level 3, and three prompts a second of level 4."""
    chance = random.Random(seed)

    def tokens(least: int, most: int) -> tuple[int, ...]:
        return tuple(chance.choices(_TOKENS, k=chance.randint(least, most)))

    requests = []
    for number in range(conversations + 24):
        level = 0 if number < conversations else 3
        now, prompt = chance.uniform(0, 20), tokens(600, 1200)
        while now < _SECONDS:
            name = f"turn {len(requests)}"
            requests.append(LoadRequest(name, now, level, prompt, chance.randint(60, 160)))
            prompt += tokens(200, 400)
            if len(prompt) > _LONGEST:
                prompt = tokens(600, 1200)
            now += 5 + chance.expovariate(1 / 20)
    beginnings = [tokens(512, 512) for _ in range(8)]
    now = chance.expovariate(3)
    while now < _SECONDS:
        prompt = chance.choice(beginnings) + tokens(200, 1500)
        answer = chance.randint(80, 250)
        requests.append(LoadRequest(f"prompt {len(requests)}", now, 4, prompt, answer))
        now += chance.expovariate(3)
    return sorted(requests, key=lambda request: request.arrival)


def serve(requests: list[LoadRequest], **options: Any) -> list[str]:
    """Of levels 0, 3 and 4: share of prompt tokens from the cache, and mean time to first token."""
    config = EngineConfig(prefix_cache=True, blocks=_BLOCKS, seats=64, **options)
    found, asked = Counter[int](), Counter[int]()
    levels = {request.name: request.level or 0 for request in requests}
    with VirtualEngine(config) as engine:
        manager = engine.scheduler.kv_cache_manager
        record = manager.record_prefix_cache_stats

        def note(request: Any, hits: int) -> None:
            if not request.num_preemptions:
                found[levels[request.request_id]] += hits
                asked[levels[request.request_id]] += request.num_prompt_tokens
            record(request, hits)

        manager.record_prefix_cache_stats = note
        engine.send(requests)
        engine.run()
        records = list(engine.records.values())
    cells = []
    for level in (0, 3, 4):
        first = fmean(record.ttft for record in records if record.level == level)
        cells.append(f"{found[level] / asked[level]:.0%}, {first:.3f} s")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=6, help="of level 0")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.1, 0.2])
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args()
    requests = load(args.conversations, args.seed)
    rows = [["vLLM", *serve(requests, scheduler="fcfs")]]
    for share in args.shares:
        policy = {"retention": {"cache_share": share}}
        rows.append([f"cache_share: {share:g}", *serve(requests, policy=policy)])
    header = ["prefix cache", "level 0", "level 3", "level 4"]
    print_table(f"{args.conversations} conversations of level 0", header, rows)


if __name__ == "__main__":
    main()
