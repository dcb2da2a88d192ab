"""Checks a set-up before a server starts, or beside a running one."""

import importlib.metadata
import json
import logging
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from vllm_semantic_sched.engine.startup.settings import (
    DEFAULT_POLICY,
    POLICY_VARIABLE,
    SWAP_CONNECTOR,
    SwapConfig,
)
from vllm_semantic_sched.engine.version import UnsupportedVersion, check_vllm_version
from vllm_semantic_sched.operate.client import AdminClient, AdminError
from vllm_semantic_sched.policy.config import AUTO, Policy, load_policy
from vllm_semantic_sched.policy.config.section import PolicyError, parse_section
from vllm_semantic_sched.policy.live import fingerprint
from vllm_semantic_sched.policy.profile.formula import EngineProfile, load_profile

_PACKAGE = "vllm-semantic-sched"
_VLLM_PORT = 8000  # vLLM's default
_TIMEOUT = 10.0  # seconds for an answer of the server
_SHARED_MEMORY = 512 * 2**20  # vLLM's queue between two processes takes 240 MiB of it
_GIB = 2**30
# What a server with all options of this package imports.
_IMPORTS = (
    "import vllm_semantic_sched.engine.scheduler, vllm_semantic_sched.engine.kv_swap, "
    "vllm_semantic_sched.engine.http.middleware"
)
_IMPORT_SECONDS = 300.0
_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


class Finding(NamedTuple):
    """The result of one check: its subject, what was found, and what to do (empty if nothing)."""

    status: Literal["ok", "warning", "fault"]
    subject: str
    text: str
    advice: str = ""

    def __str__(self) -> str:
        line = f"{self.status}: {self.subject}: {self.text}".replace("\n", "; ")
        return f"{line} -> {self.advice}" if self.advice else line


def examine(
    policy_name: str | None,  # or path
    profile_name: str | None,
    model: str | None,  # the predictor's folder or hub id
    kv_transfer: str | None,  # vLLM's `--kv-transfer-config`
    server: AdminClient | None,  # a running one
) -> Iterator[Finding]:
    """Carry out all checks, one after the other; some take seconds. A running server has shown that
    vLLM and the predictor can be loaded: that is not tried again. What it runs with is asked of it:
    files and options are checked beside it only if they are given."""
    yield from check_packages()
    yield from check_vllm(imports=server is None)
    policy = profile = None
    if server is not None and policy_name is None and profile_name is None:
        yield from _check_beside(server, kv_transfer)
        return
    override = os.environ.get(POLICY_VARIABLE)
    if override and policy_name not in (None, override):
        text = f"${POLICY_VARIABLE}={override} overrides {policy_name} on a server started here"
        yield Finding("warning", "policy", text, f"unset {POLICY_VARIABLE}")
    name = override or policy_name or DEFAULT_POLICY
    try:
        policy = load_policy(name)
        if profile_name is not None:
            policy = policy.model_copy(update={"profile": profile_name})
        yield Finding("ok", "policy", f"{name}: base {policy.base}, {policy.levels} levels")
    except PolicyError as error:
        advice = "correct it; `semsched policy keys` lists the keys, `list` the shipped policies"
        yield Finding("fault", "policy", str(error), advice)
    wanted_profile = policy.profile if policy else profile_name or AUTO
    try:
        profile = load_profile(wanted_profile)
        if wanted_profile == AUTO:
            yield Finding("ok", "profile", "derived from the model and the device at the start")
        else:
            yield from check_profile(profile)
    except PolicyError as error:
        advice = "name a shipped profile, or measure one with `semsched profile`"
        yield Finding("fault", "profile", str(error), advice)
    if policy is not None:
        yield from _check_parts(policy, model, server)
    if server is None or kv_transfer is not None:
        yield from check_connector(kv_transfer, memory=server is None)
    yield check_shared_memory()
    if server is None:
        yield check_port(_VLLM_PORT)
        return
    wanted = None
    given = policy_name is not None or profile_name is not None
    if given and policy and profile and policy.base != "fcfs":  # fcfs reports no fingerprint
        wanted = fingerprint(policy, profile)
    yield from check_server(server, wanted)


def _check_beside(server: AdminClient, kv_transfer: str | None) -> Iterator[Finding]:
    """The checks of a running server about which nothing else was said."""
    if kv_transfer is not None:
        yield from check_connector(kv_transfer, memory=False)
    yield check_shared_memory()
    yield from check_server(server, None)


def _check_parts(
    policy: Policy, model: str | None, server: AdminClient | None
) -> Iterator[Finding]:
    """The parts of a policy that a server has not shown to work."""
    if server is None and policy.events.path is not None:
        yield check_event_log(policy.events.path)
    if server is None or model is not None:
        yield check_predictor(policy, model)


# Versions


def check_packages() -> Iterator[Finding]:
    """Python and the packages that this one requires, against its own metadata."""
    try:
        wanted = SpecifierSet(importlib.metadata.metadata(_PACKAGE)["Requires-Python"])
    except importlib.metadata.PackageNotFoundError:
        text = f"{_PACKAGE} is not installed, so vLLM does not find its metrics plugin"
        yield Finding(
            "fault", "packages", text, "pip install its checkout in the server's environment"
        )
        return
    python = platform.python_version()
    if python in wanted:
        yield Finding("ok", "Python", python)
    else:
        text = f"{python} is not supported, {wanted} is"
        yield Finding("fault", "Python", text, "make an environment with a supported Python")
    required = list(_requirements(_PACKAGE, _PACKAGE))
    met = [f"{finding.subject} {finding.text}" for finding in required if finding.status == "ok"]
    if met:
        yield Finding("ok", "packages", ", ".join(met))
    yield from (finding for finding in required if finding.status != "ok")


def check_vllm(imports: bool = True) -> Iterator[Finding]:
    """vLLM's version, its torch and, with `imports`, whether a server could import both."""
    distributions = importlib.metadata.packages_distributions().get("vllm")
    if not distributions:
        text = "not installed in this environment"
        yield Finding("fault", "vLLM", text, "run this command in the server's environment")
        return
    version = importlib.metadata.version(distributions[0])
    try:
        check_vllm_version(version)
    except UnsupportedVersion as error:
        text, _, advice = str(error).partition(". ")
        yield Finding("fault", "vLLM", text, advice)
        return
    for finding in _requirements(distributions[0], f"vLLM {version}"):
        if finding.subject == "torch" and finding.status != "ok":
            yield finding
    text = f"{version}, torch {_installed('torch')}"
    if not imports:
        yield Finding("ok", "vLLM", text)
        return
    problem = _import_problem()
    if problem is None:
        yield Finding("ok", "vLLM", f"{text}; the scheduler can be imported")
    else:
        text = f"{version} is installed, but the scheduler cannot be imported: {problem}"
        yield Finding("fault", "vLLM", text, "install vLLM and torch again, for this hardware")


def _requirements(package: str, name: str) -> Iterator[Finding]:
    """Each requirement of an installed package, called `name`, without its extras."""
    for requirement in map(Requirement, importlib.metadata.requires(package) or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _installed(requirement.name)
        if version is not None and requirement.specifier.contains(version, prereleases=True):
            yield Finding("ok", requirement.name, version)
        else:
            text = f"{version or 'none'} is installed, {name} needs {requirement.specifier or 'it'}"
            yield Finding(
                "fault",
                requirement.name,
                text,
                f"pip install '{requirement.name}{requirement.specifier}'",
            )


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _import_problem() -> str | None:
    """Why a server could not import vLLM and this package; None if it could. A build for other
    hardware may end the process, so it gets one of its own."""
    command = [sys.executable, "-c", _IMPORTS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"it took more than {_IMPORT_SECONDS:.0f} s"
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


# Policy and predictor


def check_profile(profile: EngineProfile) -> Iterator[Finding]:
    """Warnings that a server would log about an engine profile."""
    warnings = profile.warnings(0)  # those that a server would log; the context length is not known
    for warning in warnings:
        text, _, advice = warning.partition(". ")
        yield Finding("warning", "profile", text, advice)
    if not warnings:
        yield Finding("ok", "profile", f"{profile.hardware}, {profile.model}")


def check_event_log(path: str) -> Finding:
    """Whether a server started here could write its event log. Leaves nothing behind."""
    file = Path(path).expanduser().absolute()
    folder = next(parent for parent in file.parents if parent.exists())
    try:
        if file.exists():
            file.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        text = f"events.path: cannot write {file}: {error.strerror}"
        return Finding("fault", "event log", text, "name another path, as events.path or --events")
    return Finding("ok", "event log", f"{file} can be written")


def missing_model(policy: Policy) -> str | None:
    """That the predictor's model is missing, as far as its name tells: a hub id may be fetched."""
    model = policy.predictor.model
    if model is None or not policy.reads(hinted=False) or Path(model).is_dir():
        return None
    if _HUB_ID.fullmatch(model):
        return None
    return f"predictor.model: there is no folder {model}"


def check_predictor(policy: Policy, model: str | None) -> Finding:
    """Start the predictor process and load the instant reader, as a server does; `model` replaces
    the policy's."""
    if not policy.reads(hinted=False):
        return Finding("ok", "predictor", "the policy reads no text")
    from vllm_semantic_sched.predict.instant import InstantReader
    from vllm_semantic_sched.predict.process import PredictorError
    from vllm_semantic_sched.predict.service import PredictionService

    settings = policy.predictor
    if model is not None:
        settings = settings.model_copy(update={"model": model})
    service = PredictionService(settings, logging.getLogger(__name__))
    try:
        buckets = service.start()
    except PredictorError as error:
        advice = "name another model as predictor.model, or unset it for the shipped one"
        return Finding("fault", "predictor", str(error), advice)
    finally:
        service.close()
    text = f"{settings.model or 'the shipped model'} can be loaded"
    try:
        instant = settings.has_instant_reader
        if instant and InstantReader.load_beside(settings.model, buckets) is None:
            text += "; it has no instant reader, so requests wait for the predictor"
    except Exception as error:  # any: the server catches the same
        text = f"no instant reader: {error}; requests wait for the predictor"
        return Finding("warning", "predictor", text, "train the model again with `semsched train`")
    return Finding("ok", "predictor", text)


# Memory


def check_connector(given: str | None, memory: bool) -> Iterator[Finding]:
    """The swap connector's options in vLLM's `--kv-transfer-config`, and, with `memory`, whether
    its host pool fits into free memory."""
    subject = "KV connector"
    key = "kv_connector_extra_config"
    if given is None:
        text = "none given; without one, the KV of preempted requests is computed again"
        yield Finding("ok", subject, text)
        return
    try:
        pool = parse_section(SwapConfig, _swap_options(given).get(key, {}), key)
    except ValueError as error:
        advice = f"start it with `semsched serve`, or give {json.dumps(SWAP_CONNECTOR)}"
        yield Finding("fault", subject, str(error), advice)
        return
    yield Finding("ok", subject, f"{pool.host_gib:g} GiB of host memory per worker process")
    if memory:
        free = available_memory() / _GIB
        text = f"{pool.host_gib:g} GiB for the host pool, {free:.1f} GiB available"
        if pool.host_gib < free:
            yield Finding("ok", "host memory", text)
        else:
            yield Finding("fault", "host memory", text, "lower host_gib, or free memory")


def _swap_options(given: str) -> Mapping[str, Any]:
    """The swap connector's part of `--kv-transfer-config`; ValueError if there is none."""
    try:
        config = json.loads(given)
    except ValueError as error:
        raise ValueError(f"--kv-transfer-config is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError("--kv-transfer-config is not a JSON object")
    if config.get("kv_connector") == "MultiConnector":
        extra = config.get("kv_connector_extra_config")
        members = extra.get("connectors") if isinstance(extra, dict) else None
        if not isinstance(members, list) or not members or not isinstance(members[0], dict):
            raise ValueError("MultiConnector has no list of connectors")
        config = members[0]  # the swap connector must be the first
    for key, value in SWAP_CONNECTOR.items():
        if config.get(key) != value:
            raise ValueError(f"{key} is {config.get(key)!r} and must be {value!r}")
    return config


def available_memory(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process can still take: of the machine, and of its control group."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = (group / "memory.max").read_text()
        used = (group / "memory.current").read_text()
        stat = (group / "memory.stat").read_text()
    except OSError:
        return available
    if limit.strip() == "max":
        return available
    # The kernel drops cached files before it refuses memory.
    cached = int(dict(line.split() for line in stat.splitlines())["inactive_file"])
    return min(available, int(limit) - int(used) + cached)


def check_shared_memory() -> Finding:
    """Room in the file system through which vLLM's processes exchange messages."""
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Finding("fault", "shared memory", str(error), "mount /dev/shm")
    text = f"{free / _GIB:.1f} GiB free in /dev/shm"
    if free >= _SHARED_MEMORY:
        return Finding("ok", "shared memory", text)
    text = f"{text}; vLLM with several worker processes needs 0.5 GiB"
    advice = "start the container with --ipc=host or --shm-size=2g"
    return Finding("warning", "shared memory", text, advice)


# Server


def check_port(port: int) -> Finding:
    """Whether a server could listen on a port of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            text = f"{port}, vLLM's default, cannot be used: {error.strerror}"
            advice = "start vLLM with another --port; to check a running server, give --server"
            return Finding("warning", "port", text, advice)
    return Finding("ok", "port", f"{port}, vLLM's default, is free")


def check_server(client: AdminClient, wanted: str | None) -> Iterator[Finding]:
    """A running server: version, scheduler, middleware, and the policy's `wanted` fingerprint."""
    try:
        version = str(json.loads(client.send("/version", timeout=_TIMEOUT))["version"])
        check_vllm_version(version)
    except AdminError as error:
        advice = "start vLLM there, or correct the address; another program may have the port"
        yield Finding("fault", "server", str(error), advice)
        return
    except (ValueError, KeyError, TypeError):
        text = f"{client.url} is not a vLLM server: another program has the port"
        yield Finding("fault", "server", text, "start vLLM with another --port")
        return
    except UnsupportedVersion as error:
        yield Finding("fault", "server", f"{client.url} runs another release: {error}")
        return
    yield Finding("ok", "server", f"{client.url} answers, vLLM {version}")
    try:
        engines = client.status(_TIMEOUT)
    except AdminError as error:
        yield _closed_endpoints(error)
        return
    yield Finding("ok", "middleware", f"the operator's endpoints answer; engines: {len(engines)}")
    schedulers = {str(engine["scheduler"]) for engine in engines if "scheduler" in engine}
    if schedulers:
        yield Finding("ok", "scheduler", ", ".join(sorted(schedulers)))
    if all(engine.get("ready", True) for engine in engines):
        yield Finding("ok", "predictor", "up in every engine, or not needed")
    else:
        text = "not up in every engine: requests there keep their provisional or default level"
        yield Finding("warning", "predictor", text, "look for `predictor` in the server's log")
    if any(engine["paused"] for engine in engines):
        advice = "semsched maintenance resume"
        yield Finding("warning", "server", "it is paused and starts no requests", advice)
    for text in dict.fromkeys(map(_policy_of, engines)):
        yield Finding("ok", "policy", text)
    for text in dict.fromkeys(map(_connector_of, engines)):
        yield Finding("ok", "KV connector", text)
    policies = {engine["policy"].get("fingerprint") for engine in engines}
    if wanted is not None and policies != {wanted}:
        text = f"the server runs another policy or profile than the one given ({wanted})"
        yield Finding("warning", "server", text, "semsched policy reload, or restart it with both")


def _policy_of(engine: Mapping[str, Any]) -> str:
    """The policy in force of an engine, from its status."""
    policy = engine["policy"]
    text = f"{policy['name']}: base {policy['base']}"
    if policy["levels"] is not None:
        text += f", {policy['levels']} levels"
    return f"{text}, version {policy['version']} since the start"


def _connector_of(engine: Mapping[str, Any]) -> str:
    """The KV connector of an engine, and what becomes of preempted requests' KV."""
    name = engine["kv_connector"] or "none"
    if engine["host_pool"]:
        return (
            f"{name}; {engine['host_pool']} KV blocks on the host keep that of preempted requests"
        )
    return f"{name}; the KV of preempted requests is computed again"


def _closed_endpoints(error: AdminError) -> Finding:
    advice = "start it with `semsched serve`"
    if error.status == 404:
        text = "not loaded: no operator's endpoints, refused requests get status 500"
        advice = f"{advice}, or --middleware vllm_semantic_sched.Middleware"
        return Finding("warning", "middleware", text, advice)
    if error.status == 501:
        return Finding("fault", "scheduler", f"the server runs another one ({error})", advice)
    return Finding("warning", "middleware", f"cannot be checked: {error}")
