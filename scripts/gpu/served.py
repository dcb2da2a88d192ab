"""Offers one scheduler's server a load: Poisson arrivals at a multiple of what vLLM's own scheduler
serves, lengths and urgencies as on the emulated device, clients that state the urgency.

The first server's capacity is measured first and kept in the output folder for the others.
"""

import argparse
import json
import math
import shlex
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from gpu.answers import policy
from vllm_semantic_sched.cli.arguments import serving
from vllm_semantic_sched.lab.bench.client import LoadClient, Record
from vllm_semantic_sched.lab.bench.prompts import ANSWERS, CHAT, Lengths
from vllm_semantic_sched.lab.bench.schedulers import end_token, parse_schedulers
from vllm_semantic_sched.lab.bench.server import ServerConfig, VllmServer
from vllm_semantic_sched.lab.bench.usage import read_counters
from vllm_semantic_sched.lab.bench.workload import LEVELS, BenchRequest
from vllm_semantic_sched.lab.device.load import LoadConfig, LoadRequest, draw_load

_CAPACITY = "capacity.json"
_SPARE_TOKENS = 16
_WARM_UP = 8  # requests


@dataclass(frozen=True)
class Level:
    """Figures of a level's requests, seconds. A request without a first token counts in `ttft` with
    the time that it had waited; `latency` is of the `done` ones, NaN without any."""

    sent: int
    done: int
    ttft: float
    ttft_p50: float
    ttft_p99: float
    latency: float


def level_figures(records: Sequence[Record], wall: float) -> Level:
    """Figures of some requests of a run of `wall` seconds. ValueError without any."""
    if not records:
        raise ValueError("no requests")
    ttfts = sorted(
        wall - record.arrival if record.ttft is None else record.ttft for record in records
    )
    latencies = [record.e2e for record in records if record.finish is not None]
    return Level(
        sent=len(records),
        done=len(latencies),
        ttft=statistics.fmean(ttfts),
        ttft_p50=ttfts[len(ttfts) // 2],
        ttft_p99=ttfts[min(len(ttfts) - 1, int(0.99 * len(ttfts)))],
        latency=statistics.fmean(latencies) if latencies else math.nan,
    )


def capacity_of(records: Sequence[Record]) -> float:
    """Requests per second of a batch that was sent at once, by its first three quarters: the last
    ones run with seats free. ValueError: fewer than four were answered."""
    ends = sorted(record.finish for record in records if record.finish is not None)
    if len(ends) < 4:
        raise ValueError("the batch was not served")
    count = 3 * len(ends) // 4
    return count / ends[count - 1]


def scaled(lengths: Lengths, scale: float) -> Lengths:
    """The same distribution of lengths times `scale`."""
    return Lengths(
        mu=lengths.mu + math.log(scale),
        sigma=lengths.sigma,
        least=max(1, int(scale * lengths.least)),
        most=max(1, int(scale * lengths.most)),
    )


def figures(records: Sequence[Record], wall: float) -> dict[str, Any]:
    """Figures of a run, by level and of all."""
    done = [record for record in records if record.finish is not None]
    tokens = sum(record.output_tokens for record in done)
    by_level = {}
    for level in range(LEVELS):
        of_level = [record for record in records if record.level == level]
        if of_level:
            by_level[str(level)] = asdict(level_figures(of_level, wall))
    return {
        "wall": wall,
        "tokens_per_second": tokens / wall,
        "wrong_lengths": sum(record.output_tokens != record.wanted_tokens for record in done),
        "errors": sorted({record.error for record in records if record.error})[:3],
        "levels": by_level,
        "all": asdict(level_figures(records, wall)),
    }


class Load:
    """Sends drawn requests, whose prompts are tokens, to a server."""

    def __init__(self, client: LoadClient) -> None:
        self._client = client

    def send(self, load: Sequence[LoadRequest], stop_after: float) -> tuple[list[Record], float]:
        """The records, and the seconds that the run took."""
        requests = [
            BenchRequest(index, drawn.arrival, drawn.level, drawn.name, drawn.answer)
            for index, drawn in enumerate(load)
        ]
        told = self._client.extras

        def extras(request: BenchRequest) -> Mapping[str, Any]:
            return {"prompt": list(load[request.index].prompt), **told(request)}

        begin = time.perf_counter()
        records = replace(self._client, extras=extras).send(requests, stop_after=stop_after)
        return records, time.perf_counter() - begin


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("output", type=Path, help="folder for LABEL.json and the server's log")
    add("label")
    add("scheduler", help="as `semsched bench run --schedulers` names it")
    add("model", type=Path)
    add("--host-gib", type=float, default=0.0, help="host memory for KV of preempted requests")
    add("--seats", type=int, default=128)
    add("--times", type=float, default=1.5, help="of the capacity (%(default)s)")
    add("--seconds", type=float, default=35.0, help="of arrivals (%(default)s)")
    add("--drain", type=float, default=20.0, help="most seconds for the rest (%(default)s)")
    add("--batch", type=int, default=160, help="requests that measure the capacity (%(default)s)")
    add("--scale", type=float, default=1.0, help="of all lengths (%(default)s)")
    add("--server-args", default="", help="more arguments of vllm serve, one quoted string")


@serving()
def run(args: argparse.Namespace) -> None:
    """Serve the load and write LABEL.json; RuntimeError if the server failed."""
    args.output.mkdir(parents=True, exist_ok=True)
    own = args.output / "policy.yaml"
    own.write_text(yaml.safe_dump(policy(swap=False)))
    [spec] = parse_schedulers(args.scheduler, str(own.resolve()), host_gib=args.host_gib)
    config = ServerConfig(
        model=args.model,
        log=args.output / f"{args.label}-server.log",
        seats=args.seats,
        num_blocks=None,
        scheduler_args=spec.server_args(),
        extra_args=tuple(shlex.split(args.server_args)),
    )
    lengths = {"prompts": scaled(CHAT, args.scale), "answers": scaled(ANSWERS, args.scale)}
    longest = lengths["answers"].most + _SPARE_TOKENS
    begin = time.perf_counter()
    with VllmServer(config) as server:
        results: dict[str, Any] = {"label": args.label, "start": time.perf_counter() - begin}
        load = Load(LoadClient(server.url, end_token(args.model), longest, spec.body_extras))
        batch = draw_load(LoadConfig(args.batch, 1e9, seed=6, **lengths))
        load.send(batch[:_WARM_UP], 60.0)
        capacity = args.output / _CAPACITY
        if not capacity.exists():
            records, _ = load.send(batch, 180.0)
            capacity.write_text(json.dumps(capacity_of(records)))
        rate = args.times * json.loads(capacity.read_text())
        count = max(1, round(rate * args.seconds))
        requests = draw_load(LoadConfig(count, rate, **lengths))
        records, wall = load.send(requests, args.seconds + args.drain)
        results |= {"rate": rate} | figures(records, wall)
        results["counters"] = {
            counter: count
            for counter, count in read_counters(server.get_text("/metrics")).items()
            if count
        }
        results["records"] = [
            {"level": r.level, "arrival": r.arrival, "ttft": r.ttft, "finish": r.finish,
             "prompt": r.prompt_tokens, "tokens": r.output_tokens}
            for r in records
        ]  # fmt: skip
    (args.output / f"{args.label}.json").write_text(json.dumps(results))
    print({key: value for key, value in results.items() if key != "records"})
    if results["all"]["done"] == 0 or results["wrong_lengths"]:
        raise RuntimeError("no request was answered, or an answer has another length")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
