"""Starts `vllm serve` without its imports: one process has made them, and forks.

The process is this file as a program. It reads orders from its standard input, a line of JSON each,
and answers each with the id of the process that serves.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

MODULE = "vllm.entrypoints.cli.main"
ENGINE = "vllm.v1.engine.utils"  # starts the engine's process
IMPORTED = (
    MODULE,
    *("vllm.entrypoints.cli.serve", "vllm.entrypoints.openai.api_server"),
    *("vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"),
    "vllm.model_executor.models.llama",
)
"""What a server runs, and what it would import before it answers."""


class Child:
    """A process of the nursery, as `subprocess.Popen` shows one."""

    def __init__(self, pid: int, status: Path) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        if self.returncode is None and self._status.exists():
            self.returncode = int(self._status.read_text())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("vllm serve", timeout or 0.0)
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            # It may have ended before its keeper reported it.
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Nursery:
    """In place of the module `subprocess` where a server is started.

    Args:
        modules: what to import beforehand; the first has the function `main` that a child calls.
    """

    STDOUT = subprocess.STDOUT
    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self, modules: tuple[str, ...] = IMPORTED) -> None:
        self._modules = modules
        self._process: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory()
        self._started = 0

    def Popen(self, command: list[str], stdout: Any, env: dict[str, str], **_: Any) -> Child:
        """Fork a process that goes on as `python -m MODULE ...` would, in a session of its own."""
        assert command[:3] == [sys.executable, "-m", self._modules[0]], command
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__, *self._modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=env,
                text=True,
                start_new_session=True,
            )
        self._started += 1
        status = Path(self._folder.name, str(self._started))
        order = {"arguments": command[3:], "log": stdout.name, "environment": env}
        pipes = self._process.stdin, self._process.stdout
        assert pipes[0] is not None and pipes[1] is not None
        pipes[0].write(json.dumps(order | {"status": str(status)}) + "\n")
        pipes[0].flush()
        answer = pipes[1].readline()
        assert answer, "the nursery has ended"
        return Child(int(answer), status)

    def close(self) -> None:
        """No more orders; those who serve go on."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(60)


def main() -> None:
    before = dict(os.environ)
    sys.path[0] = os.getcwd()  # as after `python -m`
    for name in sys.argv[1:]:
        import_module(name)
    while order := sys.stdin.readline():
        reading, writing = os.pipe()
        if os.fork() == 0:
            keep(json.loads(order), before, writing)
            # Only the one that serves gets here; it ends as any program does.
            sys.exit(sys.modules[sys.argv[0]].main())
        os.close(writing)
        with os.fdopen(reading) as answer:
            print(answer.read(), flush=True)
        while reaped():
            pass


def keep(order: dict[str, Any], before: dict[str, str], writing: int) -> None:
    """Returns in a new process, and waits for its end in this one."""
    server = os.fork()
    if server:
        os.close(writing)
        result = os.waitstatus_to_exitcode(os.waitpid(server, 0)[1])
        part = Path(order["status"] + ".part")
        part.write_text(str(result))
        part.rename(order["status"])
        os._exit(0)
    os.setsid()
    os.write(writing, str(os.getpid()).encode())
    os.close(writing)
    nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(order["log"], os.O_WRONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(nothing), os.close(log)
    # What the imports have set stays.
    wanted = order["environment"]
    for name in before.keys() - wanted.keys():
        os.environ.pop(name, None)
    os.environ.update({name: to for name, to in wanted.items() if before.get(name) != to})
    sys.argv = [sys.argv[1], *order["arguments"]]
    if wanted.get("VLLM_WORKER_MULTIPROC_METHOD") == "fork" and (engine := sys.modules.get(ENGINE)):
        # On a CPU vLLM sets the variable to "spawn", whatever it was.
        setattr(engine, "get_mp_context", lambda: multiprocessing.get_context("fork"))  # noqa: B010
    # Else signals to an engine that the server forks would reach the server's event loop as well.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def reaped() -> bool:
    """Whether a keeper had ended."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] > 0
    except ChildProcessError:
        return False


if __name__ == "__main__":
    main()
