"""Lets the engines of a server share one predictor process: about 0.8 GB less for each but one.

Each engine starts this program as its worker. The first one starts the worker and listens on a Unix
socket, to which the others connect. If it or the worker ends, all end and are started again.
"""

import argparse
import asyncio
import contextlib
import ctypes
import fcntl
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_LONGEST_LINE = 2**27  # bytes
_RETRY = 0.1  # seconds; the first one may not listen yet
_PR_SET_PDEATHSIG = 1


def shared_command(socket: Path, timeout: float, worker: Sequence[str]) -> list[str]:
    """The command line that shares a `worker` (a command line) over a socket, in a folder that only
    this user can use. A worker that does not answer within `timeout` seconds is killed."""
    own = [sys.executable, "-m", "vllm_semantic_sched.predict.shared"]
    return [*own, "--socket", str(socket), "--timeout", str(timeout), "--", *worker]


def main() -> int:
    """Serve until stdin closes."""
    parser = argparse.ArgumentParser(description="Shares a predictor; started by the scheduler.")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("worker", nargs="+")
    args = parser.parse_args()
    return asyncio.run(_run(args.socket, args.timeout, args.worker))


async def _run(path: Path, timeout: float, command: Sequence[str]) -> int:
    with open(f"{path}.lock", "w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # another one is the first
                with contextlib.suppress(OSError):
                    return await _join(path)
                await asyncio.sleep(_RETRY)
            else:
                return await _host(path, timeout, command)


async def _join(path: Path) -> int:
    """Pass everything between the engine and the first one."""
    reader, writer = await asyncio.open_unix_connection(path)
    own_requests = await _stdin()
    own_answers = await _stdout()
    requests = asyncio.create_task(_copy(own_requests, writer))
    answers = asyncio.create_task(_copy(reader, own_answers))
    await asyncio.wait([requests, answers], return_when=asyncio.FIRST_COMPLETED)
    return 0 if requests.done() else 1


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        part = await reader.read(2**16)
        if not part:
            return
        writer.write(part)
        await writer.drain()


async def _host(path: Path, timeout: float, command: Sequence[str]) -> int:
    """Run the worker for this engine and those that connect, until this one or the worker ends."""
    worker = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LONGEST_LINE,
        preexec_fn=_die_with_parent,
    )
    requests = worker.stdin
    answers = worker.stdout
    assert requests is not None and answers is not None
    ready = await answers.readline()
    if not ready:
        return await worker.wait()
    turns = asyncio.Lock()  # first come, first served

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if writer is not own_answers:
            writer.write(ready)
        try:
            while True:
                line = await reader.readline()
                if not line:
                    break
                # Not `wait_for`: it may swallow that this task is cancelled (Python 3.11).
                async with turns, asyncio.timeout(timeout):
                    requests.write(line)
                    answer = await answers.readline()
                writer.write(answer)
                await writer.drain()
        except TimeoutError:
            worker.kill()  # it hangs
        except (OSError, asyncio.CancelledError):
            pass  # the other end is gone, or all end
        writer.close()

    # Before anything may end this: a worker that cannot start says why, and is gone.
    own_requests = await _stdin()
    own_answers = await _stdout()
    own_answers.write(ready)
    await own_answers.drain()
    path.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(serve, path, limit=_LONGEST_LINE)
    tasks: list[asyncio.Task[Any]] = [
        asyncio.create_task(serve(own_requests, own_answers)),
        asyncio.create_task(worker.wait()),
    ]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    server.close()
    path.unlink(missing_ok=True)
    with contextlib.suppress(ProcessLookupError):
        worker.kill()
    return await worker.wait()


def _die_with_parent() -> None:
    """A worker that hangs does not notice that its stdin has closed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


async def _stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=_LONGEST_LINE)
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    return reader


async def _stdout() -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, sys.stdout
    )
    return asyncio.StreamWriter(transport, protocol, None, loop)


if __name__ == "__main__":
    sys.exit(main())
