"""Starts `vllm serve`, and other programs that import vLLM, without the imports: one process has
made them, and forks.

The process is this file as a program. It reads orders from a socket, a line of JSON each, and
answers each with the id of the process that runs the program. Several test processes can share it;
it ends with the last of them.
"""

import atexit
import gc
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

MODULE = "vllm.entrypoints.cli.main"
IMPORTED = (
    MODULE,
    *("vllm.entrypoints.cli.serve", "vllm.entrypoints.openai.api_server", "vllm.entrypoints.llm"),
    *("vllm.entrypoints.cli.run_batch", "vllm.entrypoints.generate.api_router"),
    *("vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"),
    *("vllm.model_executor.models.llama", "model_hosting_container_standards.sagemaker"),
    *("vllm_semantic_sched.engine.kv_swap", "vllm_semantic_sched.engine.http.middleware"),
    "vllm_semantic_sched.engine.metrics.stat_logger",
)
"""What a server or an offline engine runs, and what it would import before it answers."""

SPAWNED_FRONTS = "NURSERY_SPAWNED_FRONTS"
"""Environment variable: if it is set, each of several API servers makes its imports anew."""

# On a CPU vLLM sets the method to "spawn", whatever it was. These start an engine, the coordinator
# of several, a worker; the last starts several API servers.
_STARTERS = (
    *("vllm.v1.engine.utils", "vllm.v1.engine.coordinator"),
    "vllm.v1.executor.multiproc_executor",
)
_FRONTS = "vllm.v1.utils"

_START_SECONDS = 60.0  # until the process has its name; its imports come later


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
                raise subprocess.TimeoutExpired("a child of the nursery", timeout or 0.0)
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            # It may have ended before its keeper reported it.
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Nursery:
    """In place of the module `subprocess` where a program is started that imports vLLM.

    Args:
        modules: what to import beforehand.
        name: of the process, which all that give the same name share; by default it is one's own.
    """

    STDOUT = subprocess.STDOUT
    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self, modules: tuple[str, ...] = IMPORTED, name: str | None = None) -> None:
        self._modules = modules
        self._name = f"nursery of {name or uuid.uuid4()}"
        self._process: subprocess.Popen[bytes] | None = None  # if it was started here
        self._socket: socket.socket | None = None
        self._folder = tempfile.TemporaryDirectory()
        self._started = 0

    def Popen(
        self,
        command: list[str],
        stdout: Any,
        env: dict[str, str],
        cwd: str | Path | None = None,
        **_: Any,
    ) -> Child:
        """Fork a process that goes on as `python -m MODULE ...` or `python FILE ...` would, in a
        session of its own; both outputs go to the file `stdout`."""
        command = [str(word) for word in command]
        assert command[0] == sys.executable and command[1] != "-c", command
        if self._socket is None:
            self._socket = self._connect(env)
        self._started += 1
        status = Path(self._folder.name, str(self._started))
        order = {"arguments": command[1:], "log": stdout.name, "environment": env}
        order |= {"status": str(status), "folder": str(cwd or Path.cwd())}
        self._socket.sendall(json.dumps(order).encode() + b"\n")
        answer = read_line(self._socket)
        assert answer, "the nursery has ended"
        return Child(int(answer), status)

    def run(self, command: list[str], timeout: float = 600.0, **options: Any) -> Child:
        """The same, until the process has ended; it is killed if that takes too long."""
        child = self.Popen(command, **options)
        try:
            child.wait(timeout)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            raise
        return child

    def close(self) -> None:
        """No more orders; those who serve go on."""
        if self._socket is not None:
            self._socket.close()

    def _connect(self, env: dict[str, str]) -> socket.socket:
        """Start the process unless it is there. If two do so at the same time, one of the processes
        ends for want of the name."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(address(self._name))
                return connection
            except ConnectionRefusedError:
                connection.close()
                assert time.monotonic() < deadline, "the nursery does not start"
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, __file__, self._name, *self._modules],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=env,
                    start_new_session=True,
                )
            time.sleep(0.02)


def address(name: str) -> str:
    """One that is no file, and is gone with its process."""
    return f"\0{name}"


def read_line(connection: socket.socket) -> bytes:
    """What was sent, up to a line's end; empty at the end of the connection. Both sides wait for an
    answer before they send more."""
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(2**16)
        if not part:
            return b""
        line += part
    return line


def main() -> None:
    before = dict(os.environ)
    name, *modules = sys.argv[1:]
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(address(name))
    except OSError:  # another one has it
        return
    listener.listen()
    for module in modules:
        import_module(module)
    # vLLM collects garbage several times at a start: never again what is here already.
    gc.collect()
    gc.freeze()
    testers = [listener.accept()[0]]
    while testers:
        for ready in select.select([listener, *testers], [], [])[0]:
            if ready is listener:
                testers.append(listener.accept()[0])
            elif line := read_line(ready):
                follow(json.loads(line), ready, before, others=[listener, *testers])
            else:
                testers.remove(ready)
                ready.close()
        while reaped():
            pass


def follow(
    order: dict[str, Any],
    tester: socket.socket,
    before: dict[str, str],
    others: list[socket.socket],
) -> None:
    """Fork a process that runs what an order says, and answer with its id.

    Args:
        before: the environment of the imports.
        others: sockets that the process must not keep.
    """
    reading, writing = os.pipe()
    if os.fork() == 0:
        for other in others:
            other.close()
        keep(order["status"], writing)
        # Only the one that runs the program gets here.
        settle(order, before)
        try:
            status = run(order["arguments"])
        except SystemExit as end:
            status = end.code
        leave(status)
    os.close(writing)
    with os.fdopen(reading) as answer:
        tester.sendall(answer.read().encode() + b"\n")


def keep(status: str, writing: int) -> None:
    """Returns in a new process, and waits for its end in this one."""
    program = os.fork()
    if program:
        os.close(writing)
        result = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        part = Path(status + ".part")
        part.write_text(str(result))
        part.rename(status)
        os._exit(0)
    os.setsid()
    os.write(writing, str(os.getpid()).encode())
    os.close(writing)


def settle(order: dict[str, Any], before: dict[str, str]) -> None:
    """Make this process what a new one with the order's folder, outputs and environment would be;
    `before` is the environment of the imports."""
    os.chdir(order["folder"])
    nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(order["log"], os.O_WRONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(nothing), os.close(log)
    # What the imports have set stays.
    wanted = order["environment"]
    for name in before.keys() - wanted.keys():
        os.environ.pop(name, None)
    os.environ.update({name: to for name, to in wanted.items() if before.get(name) != to})
    paths = wanted.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path]
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(wanted.get("OMP_NUM_THREADS") or torch.get_num_threads()))
    if wanted.get("VLLM_WORKER_MULTIPROC_METHOD") == "fork":
        fork_what_vllm_spawns(fronts=SPAWNED_FRONTS not in wanted)


def fork_what_vllm_spawns(fronts: bool) -> None:
    """Let the processes of this server be forked.

    Args:
        fronts: several API servers too.
    """
    fork = multiprocessing.get_context("fork")
    for starter in filter(None, map(sys.modules.get, _STARTERS)):
        setattr(starter, "get_mp_context", lambda: fork)  # noqa: B010
    if fronts and (module := sys.modules.get(_FRONTS)):
        like = {**vars(multiprocessing), "get_context": lambda method: fork}
        setattr(module, "multiprocessing", SimpleNamespace(**like))  # noqa: B010
    os.register_at_fork(after_in_child=after_fork)


def after_fork() -> None:
    """What a process that is spawned finds as it should be."""
    # Else signals to it would reach its parent's event loop as well.
    signal.set_wakeup_fd(-1)
    # Several API servers add up their metrics in files; which it is, is decided at the import.
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ and "prometheus_client" in sys.modules:
        values = sys.modules["prometheus_client.values"]
        values.ValueClass = values.get_value_class()


def run(arguments: list[str]) -> Any:
    """Run `-m MODULE ...` or `FILE ...`."""
    if arguments[0] != "-m":
        sys.path[0] = str(Path(arguments[0]).parent)
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
        return 0
    _, name, *rest = arguments
    sys.path[0] = os.getcwd()
    sys.argv = [name, *rest]
    if module := sys.modules.get(name):  # and so what it spawns finds this file as its main one
        return module.main()
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return 0


def leave(status: Any) -> NoReturn:
    """End as by `sys.exit(status)`, but without taking all modules apart, which is seconds of work:
    processes that `multiprocessing` has forked end like this, too."""
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the other threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


def reaped() -> bool:
    """Whether a keeper had ended."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] > 0
    except ChildProcessError:
        return False


if __name__ == "__main__":
    main()
