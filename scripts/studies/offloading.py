"""Can vLLM's own offloading keep the KV of preempted requests? Our swap connector beside vLLM's
`OffloadingConnector` and `SimpleCPUOffloadConnector`, under preemptions for urgent requests, on the
emulated device in virtual time.

Each way has the same load, the same host memory and the prefix cache; prompts share nothing.
Tokens of victims are those whose KV they had when they were preempted, and where it came from when
they went on.

example:
  python scripts/studies/offloading.py --output offloading
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import main, write_figures

from vllm_semantic_sched.cli.console import print_table
from vllm_semantic_sched.engine.startup.settings import SWAP_CONNECTOR
from vllm_semantic_sched.lab.bench.device_use import LABEL
from vllm_semantic_sched.lab.bench.prompts import Lengths
from vllm_semantic_sched.lab.device.figures import LevelFigures, level_figures
from vllm_semantic_sched.lab.device.gpus import SHIPPED
from vllm_semantic_sched.lab.device.load import LoadConfig, LoadRequest, draw_load
from vllm_semantic_sched.lab.device.virtual import EngineConfig, VirtualEngine

_MIX = (20, 20, 20, 20, 20)
_PROMPTS = Lengths(mu=7.3, sigma=0.5, least=100, most=6000)
_ANSWERS = Lengths(mu=5.5, sigma=0.7, least=10, most=1500)


@dataclass(frozen=True)
class Row:
    """One way. Tokens: of all preemptions; `offloaded`: loaded by a connector of vLLM; `victims`:
    requests that were preempted, at whatever level. `copied`: seconds of the copy queue."""

    preemptions: int
    held: float
    loaded: float
    offloaded: float
    found: float  # all that was there when they went on, but what our connector loaded
    recomputed: float
    victims: LevelFigures
    urgent: LevelFigures
    everyone: LevelFigures
    saved_gib: float
    copied: float
    seconds: float


def connectors(gib: float) -> dict[str, dict[str, Any] | None]:
    """`--kv-transfer-config` of each way."""
    size = {"cpu_bytes_to_use": int(gib * 2**30)}

    def offloading(connector: str, **more: Any) -> dict[str, Any]:
        extra = size | more
        return {
            "kv_connector": connector,
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }

    return {
        "none": None,
        "ours": SWAP_CONNECTOR | {"kv_connector_extra_config": {"host_gib": gib}},
        "Offloading": offloading("OffloadingConnector"),
        "Offloading, answers too": offloading("OffloadingConnector", offload_prompt_only=False),
        "SimpleCPUOffload": offloading("SimpleCPUOffloadConnector"),
        "SimpleCPUOffload, lazy": offloading("SimpleCPUOffloadConnector", lazy_offload=True),
    }


def measure(load: list[LoadRequest], config: EngineConfig) -> Row:
    """Run a load."""
    victims: set[str] = set()
    copies = [0.0, 0.0]  # seconds, tokens saved
    offloaded = 0
    with VirtualEngine(config) as engine:
        scheduler = engine.scheduler
        preempt = scheduler._preempt_request

        def note(request: Any, *args: Any, **more: Any) -> None:
            victims.add(request.request_id)
            preempt(request, *args, **more)

        scheduler._preempt_request = note
        if config.connector is not None:
            allocated = scheduler.connector.update_state_after_alloc

            def note_load(request: Any, blocks: Any, tokens: int) -> None:
                nonlocal offloaded
                offloaded += tokens * (request.num_preemptions > 0)
                allocated(request, blocks, tokens)

            scheduler.connector.update_state_after_alloc = note_load
        timeline = engine.runner.timeline
        copy = timeline.copy

        def note_copy(now: float, seconds: float, beside: bool) -> tuple[float, float]:
            copies[0] += seconds
            return copy(now, seconds, beside)

        timeline.copy = note_copy  # type: ignore[method-assign]
        engine.runner.sanitizer.copy_out = _counted(engine.runner.sanitizer.copy_out, copies)
        engine.send(load)
        engine.run()
        records = [engine.records[request.name] for request in load]
        total = scheduler.counters.total
        loaded = total("loaded_tokens")
        shape = scheduler.kv_cache_config
        block = shape.kv_cache_tensors[0].size / shape.num_blocks
        return Row(
            preemptions=round(total("preemptions")),
            held=total("preempted_tokens"),
            loaded=loaded,
            offloaded=offloaded - loaded,
            found=total("found_tokens"),
            recomputed=total("recomputed_tokens"),
            victims=level_figures([one for one in records if one.name in victims]),
            urgent=level_figures([one for one in records if one.level == 0]),
            everyone=level_figures(records),
            saved_gib=copies[1] * block / 2**30,
            copied=copies[0],
            seconds=engine.clock.now(),
        )


def _counted(copy_out: Any, copies: list[float]) -> Any:
    def counted(*args: Any) -> None:
        copies[1] += 1
        copy_out(*args)

    return counted


def print_rows(rows: dict[str, Row]) -> None:
    names = ["way", "preemptions", "tokens held", "loaded", "by vLLM", "on device", "recomputed %"]
    names += ["saved GiB", "copies, s", "victims: latency", "level 0: latency", "TTFT p99", "all"]
    table = []
    for name, row in rows.items():
        line = [
            name,
            row.preemptions,
            f"{row.held:.0f}",
            f"{row.loaded:.0f}",
            f"{row.offloaded:.0f}",
            f"{row.found - row.offloaded:.0f}",
            f"{100 * row.recomputed / row.held:.1f}",
            f"{row.saved_gib:.1f}",
            f"{row.copied:.1f}",
            f"{row.victims.latency:.2f}",
            f"{row.urgent.latency:.2f}",
            f"{row.urgent.ttft_p99:.2f}",
            f"{row.everyone.latency:.2f}",
        ]
        table.append(line)
    print_table(LABEL, names, table)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--profile", default="a100", help="a100 or h100")
    add("--policy", default="ems")
    add("--seats", type=int, default=24)
    add("--kv-gib", type=float, default=6.0)
    add("--host-gib", type=float, nargs="+", default=[8.0])
    add("--requests", type=int, default=120)
    add("--rate", type=float, default=6.0, help="per second")
    add("--seed", type=int, default=5)
    add("--output", type=Path, help="folder for figures.json")


def run(args: argparse.Namespace) -> int:
    """Run all ways, and print one table."""
    load = draw_load(
        LoadConfig(
            requests=args.requests,
            rate=args.rate,
            seed=args.seed,
            mix=_MIX,
            prompts=_PROMPTS,
            answers=_ANSWERS,
        )
    )
    rows: dict[str, Row] = {}
    for gib in args.host_gib:
        for name, connector in connectors(gib).items():
            config = EngineConfig(
                policy=args.policy,
                seats=args.seats,
                profile=SHIPPED[args.profile].profile,
                kv_gib=args.kv_gib,
                prefix_cache=True,
                connector=connector,
            )
            rows[f"{name}, {gib:g} GiB"] = measure(load, config)
            print(f"{name}, {gib:g} GiB: done", file=sys.stderr)
    print_rows(rows)
    write_figures(args.output, rows)
    return 0


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
