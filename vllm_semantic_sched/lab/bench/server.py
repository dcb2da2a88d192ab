"""Runs a real `vllm serve` on the loopback interface for as long as a `with` block lasts."""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

PREDICTOR = "vllm_semantic_sched.predict.worker"
"""Name of the predictor process in `VllmServer.cpu_seconds`."""

API_SERVER = "api server"
"""Name of the process that was started."""

ANSWER_LENGTH = "vllm_semantic_sched.lab.bench.answer_length:AnswerLength"
"""For vLLM's `--logits-processors`."""

_VLLM = "vllm.entrypoints.cli.main"
_EMULATED = "vllm_semantic_sched.lab.device.serve"
_LOG_TAIL_LINES = 40
_START_SECONDS = 240.0
_STOP_GRACE_SECONDS = 10.0


class ServerFailed(RuntimeError):
    """The server did not start, or ended by itself. The message quotes the end of its log."""


@dataclass(frozen=True)
class ServerConfig:
    """The model to serve and the resources for it. The default workload needs more seats
    (`max_num_seqs`) and KV blocks than the defaults. `num_blocks` (None: vLLM's choice) counts
    blocks of `block_size` tokens and must hold a request of `max_model_len` tokens and a block.
    `device`: settings of an emulated device, which then takes the place of this machine's."""

    model: Path
    log: Path
    seats: int = 16
    num_blocks: int | None = 96
    block_size: int = 32
    # Tokens per streamed message after the first. Formatting one message per token would cost a
    # small model's server more than the tokens do.
    stream_interval: int = 8
    nice: int = 0
    scheduler_args: tuple[str, ...] = ()
    extra_args: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    device: Mapping[str, Any] | None = None

    def command(self, port: int) -> list[str]:
        """The command line that starts the server."""
        program = _VLLM if self.device is None else _EMULATED
        args = [sys.executable, "-m", program, "serve", str(self.model)]
        args += ["--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", str(self.seats)]
        args += ["--served-model-name", "bench", "--disable-uvicorn-access-log"]
        # The queueing delay is taken from the engine's own clock, per request.
        args += ["--enable-per-request-metrics", "--stream-interval", str(self.stream_interval)]
        more = [*self.scheduler_args, *self.extra_args]
        if self.device is not None:  # it knows its memory, and gives answers their lengths
            return [*args, "--block-size", str(self.block_size), "--enforce-eager", *more]
        args += ["--logits-processors", ANSWER_LENGTH]
        file = self.model / "config.json"
        config = json.loads(file.read_text()) if file.is_file() else {}  # a hub id: vLLM chooses
        if "float32" in (config.get("dtype"), config.get("torch_dtype")):
            # vLLM's "auto" turns fp32 weights into bf16, where equal logits are common and
            # greedy outputs of two runs cannot be compared.
            args += ["--dtype", "float32"]
        if self.num_blocks is not None:
            args += ["--num-gpu-blocks-override", str(self.num_blocks)]
            args += ["--block-size", str(self.block_size)]
        if not has_gpu():
            # Memory may appear in small steps on a virtual machine: give sizes explicitly.
            args += ["--gpu-memory-utilization", "0.7", "--enforce-eager"]
            args += ["--kv-cache-memory-bytes", str(256 * 2**20)]
        return [*args, *more]

    def process_environment(self) -> dict[str, str]:
        """Return this process's environment with telemetry and downloads turned off."""
        defaults: dict[str, str] = {}
        fixed = dict.fromkeys(("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "HF_HUB_OFFLINE"), "1")
        if not has_gpu():
            # Pinning would put the threads on one core each, whatever else runs there.
            fixed["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            # One core stays free for the HTTP server and the client. With a thread on every core,
            # each matrix product waits for the thread that was interrupted: on two cores with
            # other programs running, throughput fell to a fifth.
            defaults["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 2) - 1))
            # On a CPU vLLM runs the worker in another process to place its threads. The settings
            # above make this unnecessary, and the scheduler, which polls for the worker's
            # answers, would take most of another core.
            defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        return {**defaults, **os.environ, **fixed, **self.environment}


def has_gpu() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return bool(torch.cuda.is_available())


def set_priority(process: int, nice: int) -> None:
    """Set the priority of a process and its future children; below 0 needs root."""
    os.setpriority(os.PRIO_PROCESS, process, nice)
    # Where Linux groups processes by session, nice counts within a session only, and the session's
    # own weight is what other programs compete with. Kernels and sandboxes refuse the weight in
    # their own ways; without it the priority still counts among the session's own processes.
    with contextlib.suppress(OSError):
        Path(f"/proc/{process}/autogroup").write_text(str(nice))


def prefer_client(server_nice: int) -> None:
    """Give this process a higher priority than the servers it will start, if that is allowed. A
    client without enough CPU time sends and reads late; see `latest send` in the report."""
    with contextlib.suppress(PermissionError):
        set_priority(os.getpid(), max(-20, server_nice - 10))


class VllmServer:
    """A server in a `with` block; ServerFailed if it ends or is not healthy in time."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Base address without a trailing slash."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id of the API server; None if it does not run."""
        return None if self._process is None else self._process.pid

    def launch(self) -> None:
        """Start the process without waiting until it is healthy; no-op if already running."""
        if self._process is not None:
            return
        self.config.log.parent.mkdir(parents=True, exist_ok=True)
        with self.config.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.config.command(self.port),
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.config.process_environment(),
                # A group of its own, so that stopping reaches the engine processes too.
                start_new_session=True,
            )
        atexit.register(self.stop)
        # Also for 0: the client may run at another priority, which the server inherits.
        set_priority(self._process.pid, self.config.nice)

    def __enter__(self) -> Self:
        try:
            self.launch()
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the server and every process it started; no-op if already stopped."""
        process = self._process
        self._process = None
        atexit.unregister(self.stop)
        if process is None:
            return
        process.terminate()  # no-op if it has ended
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_GRACE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the group was made for it and has its id
        process.wait()

    def check(self) -> None:
        """Raise ServerFailed if the server has ended."""
        if self._process is None or self._process.poll() is not None:
            raise ServerFailed(f"the server ended unexpectedly\n{self.log_tail()}")

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU time used so far by process name: seconds, user plus system."""
        import psutil

        if self._process is None:
            return {}
        used: defaultdict[str, float] = defaultdict(float)
        leader = psutil.Process(self._process.pid)
        for process in [leader, *leader.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                title = process_title(process.cmdline()) or process.name()
                name = API_SERVER if process.pid == leader.pid else title
                used[name] += times.user + times.system
        return used

    def get_text(self, path: str) -> str:
        """The text of a page of the server; OSError if it does not answer within 30 s."""
        with urllib.request.urlopen(self.url + path, timeout=30) as reply:
            return str(reply.read().decode())

    def log_tail(self) -> str:
        """The last lines of the server's log, with its name."""
        lines = self.config.log.read_text(errors="replace").splitlines()
        return "\n".join([f"--- end of {self.config.log.name} ---", *lines[-_LOG_TAIL_LINES:]])

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            self.check()
            try:
                # The second is 503 until the predictor has its model; vLLM alone has no such path.
                for path in ("/health", "/semsched/ready"):
                    urllib.request.urlopen(self.url + path, timeout=2).close()
                return
            except OSError as error:
                if isinstance(error, urllib.error.HTTPError) and error.code != 503:
                    return
                time.sleep(0.25)
        late = f"the server was not healthy after {_START_SECONDS:.0f} s"
        raise ServerFailed(f"{late}\n{self.log_tail()}")


def process_title(command: list[str]) -> str:
    """Return the module that a process runs, or its program without the folder."""
    if command[1:2] == ["-m"] and len(command) > 2:
        return command[2]
    return command[0].rsplit("/", 1)[-1] if command else ""


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
