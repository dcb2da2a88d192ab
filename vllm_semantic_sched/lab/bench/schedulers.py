"""The schedulers that can be compared: how to start each, and what its requests tell it."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from vllm_semantic_sched.engine.startup.settings import DEFAULT_POLICY, SWAP_CONNECTOR
from vllm_semantic_sched.lab.bench.client import LoadClient, Progress
from vllm_semantic_sched.lab.bench.server import ServerConfig, VllmServer
from vllm_semantic_sched.lab.bench.workload import BenchRequest
from vllm_semantic_sched.operate.event_log import events_in
from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.config.files import read_config

SCHEDULER_CLASS = "vllm_semantic_sched.SemanticScheduler"
MIDDLEWARE = ("--middleware", "vllm_semantic_sched.Middleware")  # refusals get status and code
_TITLES = {
    "fcfs": "vLLM FCFS",
    "priority": "vLLM priority",
    "semantic": "Semantic (text)",
    "semantic-true": "Semantic (hint)",
    "semantic-known": "Semantic (hint, length stated)",
}
NAMES = tuple(_TITLES)
_SPARE_TOKENS = 16  # between the longest answer and `max_tokens`, the same for every request


@dataclass(frozen=True)
class SchedulerSpec:
    """One row of the comparison. `name` is `kind@POLICY` if the policy is not the run's default;
    `kind` is one of `NAMES`; `profile` is given if it differs from the policy's."""

    name: str
    kind: str
    policy: str | None = None
    extra_args: tuple[str, ...] = ()
    profile: str | None = None

    @property
    def title(self) -> str:
        """The name in tables."""
        title = _TITLES[self.kind]
        return f"{title} @{self.variant}" if self.variant else title

    @property
    def variant(self) -> str:
        """Name of a policy other than the run's default: of a file, without folder and ending."""
        return Path(self.name.partition("@")[2]).name.removesuffix(".yaml")

    @property
    def reads_text(self) -> bool:
        """Whether it reads the urgency from texts; the others are told or ignore it."""
        return self.kind == "semantic"

    @property
    def is_ours(self) -> bool:
        """Whether the scheduler is this package's."""
        return self.kind.startswith("semantic")

    def server_args(self, additional: Mapping[str, Any] = MappingProxyType({})) -> tuple[str, ...]:
        """Return the arguments of `vllm serve` that select this scheduler; `additional`: what else
        `--additional-config` has."""
        args: tuple[str, ...] = ()
        config = dict(additional)
        if self.kind == "priority":
            args = ("--scheduling-policy", "priority")
        elif self.is_ours:
            args = ("--scheduler-cls", SCHEDULER_CLASS, *MIDDLEWARE)
            settings = {"policy": self.policy, "profile": self.profile}
            settings = {key: value for key, value in settings.items() if value is not None}
            if settings:
                config["semantic_sched"] = settings
        if config:
            args += ("--additional-config", json.dumps(config))
        return args + self.extra_args if self.is_ours else args

    def configure(self, server: ServerConfig, folder: Path, start: str = "1") -> ServerConfig:
        """Return `server` with this scheduler and a log in `folder`, both named by `start`. One
        that reads texts gets a copy of its policy with an empty event log, `events_file`, and an
        emulated device a file for its steps; PolicyError if the policy is invalid."""
        spec = self
        log = folder / f"server-{self._file_name(start)}.log"
        if self.reads_text:
            folder.mkdir(parents=True, exist_ok=True)
            data, source = read_config(self.policy or DEFAULT_POLICY, kind="policy")
            data = data or {}
            events = self.events_file(folder, start)
            data = {**data, "events": {**data.get("events", {}), "path": str(events.resolve())}}
            parse_policy(data, source)
            path = folder / f"policy-{self._file_name(start)}.yaml"
            path.write_text(yaml.safe_dump(data, sort_keys=False))
            events.unlink(missing_ok=True)
            spec = replace(self, policy=str(path.resolve()))
        if server.device is None:
            return replace(server, log=log, scheduler_args=spec.server_args())
        steps = (folder / f"steps-{self._file_name(start)}.jsonl").resolve()
        device = {**server.device, "trace": str(steps)}
        args = spec.server_args({"emulated_device": device})
        return replace(server, log=log, scheduler_args=args, device=device)

    def events_file(self, folder: Path, start: str = "1") -> Path:
        """Return the event log of a scheduler that reads texts."""
        return folder / f"events-{self._file_name(start)}.jsonl"

    def _file_name(self, start: str) -> str:
        # A name may contain the path of a policy: keep only what can be part of a file name.
        return f"{re.sub(r'[^A-Za-z0-9.]+', '-', self.name)}-{start}"

    def request_id(self, mix: str, index: int) -> str:
        """The client's id of a request; no other scheduler on the same server has it."""
        return f"{self.kind}.{mix}-{index}"

    def body_extras(self, request: BenchRequest) -> Mapping[str, Any]:
        """Fields of the body that tell the tenant, urgency and, to `semantic-known`, the length."""
        if self.kind == "priority":
            return {"priority": request.level}
        if self.kind == "fcfs":
            return {}
        told: dict[str, Any] = {"tenant": request.tenant} if request.tenant else {}
        if not self.reads_text:
            told["urgency"] = request.level
        extras: dict[str, Any] = {"vllm_xargs": told} if told else {}
        if self.kind == "semantic-known":
            extras |= {"ignore_eos": True, "max_tokens": request.output_tokens}
        return extras

    def client(
        self, server: VllmServer, longest: int, progress: Progress, natural: bool = False
    ) -> LoadClient:
        """Return a client that tells this scheduler what it is told; `longest` answer in tokens."""
        return LoadClient(
            server.url,
            eos_token=end_token(server.config.model),
            max_tokens=longest + _SPARE_TOKENS,
            extras=self.body_extras,
            progress=progress,
            natural=natural,
        )


def end_token(model: Path) -> int:
    """Return the model's end token; ValueError if `config.json` has none."""
    file = model / "config.json"
    token = json.loads(file.read_text()).get("eos_token_id")
    if isinstance(token, list):
        token = token[0] if token else None
    if not isinstance(token, int):
        raise ValueError(f"{file} names no eos_token_id")
    return token


def with_shared_servers(specs: Sequence[SchedulerSpec]) -> list[tuple[SchedulerSpec, ...]]:
    """Group the schedulers that one server can stand in for: vLLM's priority policy is FCFS among
    equals, and the semantic ones of one policy differ only in what the requests tell them."""
    groups: dict[object, list[SchedulerSpec]] = {}
    for spec in specs:
        key = (spec.policy, spec.profile, spec.extra_args) if spec.is_ours else None
        groups.setdefault(key, []).append(spec)
    return list(map(tuple, groups.values()))


def swap_arguments(host_gib: float) -> tuple[str, ...]:
    """Return the arguments of `vllm serve` that keep KV of preempted requests in host memory."""
    connector = {**SWAP_CONNECTOR, "kv_connector_extra_config": {"host_gib": host_gib}}
    return ("--kv-transfer-config", json.dumps(connector))


def parse_schedulers(
    names: str, default_policy: str | None, profile: str | None = None, host_gib: float = 0.0
) -> list[SchedulerSpec]:
    """Parse a list like `fcfs,semantic,semantic@sjf`; profile and GiB for KV are of the semantic
    ones. ValueError for an unknown or repeated name, or a stock scheduler with a policy."""
    specs: dict[str, SchedulerSpec] = {}
    extra = swap_arguments(host_gib) if host_gib else ()
    for name in map(str.strip, names.split(",")):
        kind, _, policy = name.partition("@")
        spec = SchedulerSpec(name, kind, policy or default_policy, extra, profile)
        if kind not in NAMES:
            raise ValueError(f"unknown scheduler {name!r}: choose from {', '.join(NAMES)}")
        if policy and not spec.is_ours:
            raise ValueError(f"{kind} is vLLM's own and takes no policy, got {name!r}")
        if name in specs:
            raise ValueError(f"scheduler {name!r} is listed twice")
        specs[name] = spec
    return list(specs.values())


def read_levels(log: Path) -> Mapping[str, int]:
    """Return the levels that the predictor gave, by the client's request id. The last one counts,
    as a later reading may correct an earlier one."""
    if not log.is_file():
        return {}
    return {
        client_id(event["request"]): event["level"]
        for event in events_in(log)
        # Lines about the log and the engine are of no request.
        if event.get("level_from") == "prediction"
    }


def client_id(engine_id: str) -> str:
    """The id that the client gave, without what vLLM adds to it: `chatcmpl-ID-12345678` of a chat,
    `cmpl-ID-0-12345678` of a completion, which also has the number of its prompt."""
    if engine_id.startswith("chatcmpl-"):
        return engine_id.removeprefix("chatcmpl-").rsplit("-", 1)[0]
    return engine_id.removeprefix("cmpl-").rsplit("-", 2)[0]
