"""The frame of a study: command line, exit status, a server under load, files."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vllm_semantic_sched.cli.arguments import Failure, serving
from vllm_semantic_sched.cli.console import print_table
from vllm_semantic_sched.lab.bench.client import LoadClient, Progress, Record
from vllm_semantic_sched.lab.bench.command_line import make_server
from vllm_semantic_sched.lab.bench.metrics import duration
from vllm_semantic_sched.lab.bench.schedulers import SchedulerSpec
from vllm_semantic_sched.lab.bench.server import VllmServer, prefer_client
from vllm_semantic_sched.lab.bench.workload import BenchRequest


def main(
    description: str | None,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
) -> None:
    """Parse the command line, run the study and exit: 2 for bad arguments, 1 for a failed run.

    The output folder, if there is an option for it, exists when `run` is called.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    args = parser.parse_args()
    if getattr(args, "output", None) is not None:
        args.output.mkdir(parents=True, exist_ok=True)
    try:
        with serving():
            sys.exit(run(args))
    except Failure as failure:
        print(f"{parser.prog}: {failure}", file=sys.stderr)
        sys.exit(failure.status)


@contextmanager
def serve(
    args: argparse.Namespace, spec: SchedulerSpec, max_output: int
) -> Iterator[tuple[VllmServer, LoadClient]]:
    """Start a server with this scheduler and the options of `add_server_arguments`, and a client
    for it; stop it at the end of the block. `max_output`: tokens of the longest answer."""
    progress = Progress(not args.quiet)
    progress.message(f"starting the server: {spec.name}")
    prefer_client(args.nice)
    with VllmServer(spec.configure(make_server(args), args.output)) as server:
        yield server, spec.client(server, max_output, progress)


def capacity(client: LoadClient, sample: Sequence[BenchRequest]) -> float:
    """Return the requests per second that the server answers when all of `sample` arrive at once;
    RuntimeError if it answers none."""
    done = client.send_together(sample, "capacity")
    seconds = duration(done)
    if not seconds:
        raise RuntimeError("the server answered no request")
    return len(done) / seconds


def arriving_at(
    requests: Sequence[BenchRequest], times: Sequence[float], **fields: Any
) -> list[BenchRequest]:
    """Return the requests with these arrival times and other fields."""
    pairs = zip(requests, times, strict=True)
    return [replace(request, arrival=time, **fields) for request, time in pairs]


def refusal_code(record: Record) -> str | None:
    """Return the code with which the middleware refused a request; None if it did not."""
    if record.error is None or not record.error.startswith("{"):
        return None
    try:
        body = json.loads(record.error)
    except ValueError:
        return None
    error = body.get("error", body)
    return str(error["code"]) if "retry_after" in error else None


def percentiles(values: Sequence[float], missing: float = float("nan")) -> tuple[float, float]:
    """Return p50 and p99; `missing` twice if there are no values."""
    import numpy as np

    if not values:
        return missing, missing
    p50, p99 = np.percentile(values, [50, 99])
    return float(p50), float(p99)


@dataclass(frozen=True)
class Target:
    """A requirement: `required` is a minimum for `measured` or, with `at_most`, a maximum."""

    text: str
    measured: float
    required: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """False for an undefined measurement."""
        return self.measured <= self.required if self.at_most else self.measured >= self.required


def missed(targets: Iterable[Target]) -> list[str]:
    """Return a line for each target that was not reached."""
    return [f"target missed: {target.text}" for target in targets if not target.met]


def print_targets(targets: Iterable[Target]) -> None:
    """Print each target with the measured value and a verdict."""
    rows = []
    for target in targets:
        direction = "at most" if target.at_most else "at least"
        required = f"{direction} {target.required:g}"
        verdict = "met" if target.met else "missed"
        rows.append((target.text, f"{target.measured:.3g}", required, verdict))
    print_table("targets", ("target", "measured", "required", ""), rows)


def write_json(path: Path, document: object) -> None:
    """Write a document."""
    path.write_text(json.dumps(document, indent=1, default=str) + "\n", encoding="utf-8")


def write_figures(folder: Path | None, rows: Mapping[str, Any]) -> None:
    """Write rows, which are dataclasses, by name to figures.json; nothing without a folder."""
    if folder is not None:
        figures = {name: asdict(row) for name, row in rows.items()}
        write_json(folder / "figures.json", figures)
