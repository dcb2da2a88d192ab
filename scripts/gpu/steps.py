"""Runs steps with time limits, and keeps a page of how far they came."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

_LEAST_SECONDS = 10.0  # with less time left, a step is not begun
_TAIL = 12  # lines of a failed step's log on the page

Section = Callable[[Path], str]
"""Markdown from what the steps left in the output folder; empty if that is not there."""


@dataclass(frozen=True)
class Step:
    """A command. `seconds`: its time limit."""

    name: str
    command: Sequence[str | Path]
    seconds: float
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a step ended: `passed`, or why not."""

    name: str
    status: str
    seconds: float

    @property
    def passed(self) -> bool:
        return self.status == "passed"


class Run:
    """All steps of a check, as a `with` block. Page (README.md) and results.json are written after
    each step and at the end, also after an error or a signal."""

    def __init__(self, title: str, output: Path, seconds: float, sections: Sequence[Section]):
        self.output = output
        self.outcomes: list[Outcome] = []
        self._title = title
        self._sections = sections
        self._end = time.monotonic() + seconds
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Run":
        self.output.mkdir(parents=True, exist_ok=True)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        self.write()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._running:
            _end(process)
        if error is not None:
            self._add(Outcome("end", f"interrupted: {type(error).__name__} {error}", 0.0))
        self.write()

    @property
    def failed(self) -> bool:
        return not all(outcome.passed for outcome in self.outcomes)

    def left(self) -> float:
        """Seconds for all further steps."""
        return self._end - time.monotonic()

    def step(self, step: Step) -> bool:
        """Run a step; whether it passed."""
        return self.together([step])

    def together(self, steps: Sequence[Step]) -> bool:
        """Run steps side by side; whether all passed."""
        if self.left() < _LEAST_SECONDS:
            for step in steps:
                self._add(Outcome(step.name, "left out: no time", 0.0))
            return False
        begin = time.monotonic()
        processes = [(step, self._start(step)) for step in steps]
        outcomes = []
        for step, process in processes:
            limit = min(begin + step.seconds, self._end)
            try:
                code = process.wait(max(0.0, limit - time.monotonic()))
                status = "passed" if code == 0 else f"failed ({code})"
            except subprocess.TimeoutExpired:
                status = f"stopped after {limit - begin:.0f} s"
            # Also after its end: what it started must not disturb the next one.
            _end(process)
            self._running.remove(process)
            outcome = Outcome(step.name, status, time.monotonic() - begin)
            outcomes.append(outcome)
            self._add(outcome)
        return all(outcome.passed for outcome in outcomes)

    def judge(self, name: str, problems: Sequence[str]) -> None:
        """Add a step that only looked at what others left."""
        status = f"failed: {'; '.join(problems)}" if problems else "passed"
        self._add(Outcome(name, status, 0.0))

    def write(self) -> None:
        """Write what there is."""
        document = {"title": self._title, "steps": [asdict(outcome) for outcome in self.outcomes]}
        (self.output / "results.json").write_text(json.dumps(document, indent=1) + "\n")
        (self.output / "README.md").write_text(self._page())

    def _start(self, step: Step) -> subprocess.Popen[bytes]:
        with (self.output / f"{step.name}.log").open("wb") as log:
            try:
                process = subprocess.Popen(
                    [str(part) for part in step.command],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=os.environ | step.environment,
                    start_new_session=True,
                )
            except OSError as error:
                log.write(str(error).encode())
                process = subprocess.Popen(["false"], start_new_session=True)
        self._running.append(process)
        return process

    def _add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        print(f"{outcome.name:24} {outcome.status}, {outcome.seconds:.0f} s", flush=True)
        self.write()

    def _page(self) -> str:
        lines = [f"# {self._title}", "", "| step | result | seconds |", "|---|---|---|"]
        for outcome in self.outcomes:
            log = f"{outcome.name}.log"
            name = f"[{outcome.name}]({log})" if (self.output / log).exists() else outcome.name
            lines.append(f"| {name} | {outcome.status} | {outcome.seconds:.0f} |")
        parts = ["\n".join(lines)]
        for section in self._sections:
            try:
                parts.append(section(self.output))
            except Exception as error:  # a page without one section is better than none
                parts.append(f"A section could not be written: {error!r}")
        for outcome in self.outcomes:
            tail = _tail(self.output / f"{outcome.name}.log")
            if tail and not outcome.passed:
                parts.append(f"## End of {outcome.name}.log\n\n```\n{tail}\n```")
        return "\n\n".join(part for part in parts if part) + "\n"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a step's process and all that it started."""
    for number, grace in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _tail(log: Path) -> str:
    if not log.exists():
        return ""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(line[:300] for line in lines[-_TAIL:])


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
