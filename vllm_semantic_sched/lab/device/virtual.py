"""vLLM's engine core in this process, on an emulated device with a virtual clock: 600 requests in
seconds, and the same result every time."""

import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml
from vllm.config import VllmConfig
from vllm.config import vllm as vllm_config_module
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.model_executor.models import registry
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.platforms.cpu import CpuPlatform
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, core
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor

from vllm_semantic_sched.engine.clock import replace_clock
from vllm_semantic_sched.engine.startup.settings import SWAP_CONNECTOR
from vllm_semantic_sched.lab.bench.workload import ANSWER_FIELD
from vllm_semantic_sched.lab.device.answers import Answer
from vllm_semantic_sched.lab.device.clocks import StepTime, VirtualClock
from vllm_semantic_sched.lab.device.grammar import constrained_tokens
from vllm_semantic_sched.lab.device.launch import keep_scheduling_mode
from vllm_semantic_sched.lab.device.load import Image, LoadRequest
from vllm_semantic_sched.lab.device.model import DRAFTERS, SHAPES, make_shape
from vllm_semantic_sched.lab.device.sanitizer import DeviceError
from vllm_semantic_sched.lab.device.settings import KEY, WORKER
from vllm_semantic_sched.lab.device.worker import EmulatedWorker
from vllm_semantic_sched.policy.config.files import read_config

SCHEDULERS = ("semantic", "fcfs", "priority")
_POLL = 0.001  # seconds that vLLM's core sleeps when a step had nothing to compute
_STALLED = 60.0  # virtual seconds without a step, and with requests


@dataclass(frozen=True)
class EngineConfig:
    """How the engine is started. `policy`: a shipped name, a path, or the content of the file; its
    predictor is switched off unless `predictor`. `profile`: of the device; `given_profile`: what
    the scheduler is told, if that differs. `swap_gib`: host memory of our swap connector, if any;
    `connector`: another `--kv-transfer-config`. `host_seconds`: of each step's work on the host,
    before it is submitted. `model`: folder for a model of this `shape` with a tokenizer, which
    grammars need; by default it is a temporary one, without. `drafts`: tokens that a drafter
    guesses for each request in a step, by the method `drafter` of `--speculative-config`;
    `acceptance`: share of these that is right. `runner`: the model runner of vLLM, 1 or 2, in whose
    place the device stands. `adapters`: that fit into a step."""

    scheduler: str = "semantic"
    policy: str | Path | dict[str, Any] = "ems"
    predictor: bool = False
    seats: int = 128
    asynchronous: bool = True
    profile: str = "default"
    given_profile: str | None = None
    kv_gib: float | None = 58.0  # None: what the weights leave of `memory_gib`
    memory_gib: float = 80.0
    blocks: int | None = None
    block_size: int = 16
    budget: int = 2048
    max_model_len: int = 16_384
    prefix_cache: bool = False
    swap_gib: float | None = None
    connector: dict[str, Any] | None = None
    host_seconds: float = 0.0
    noise: float = 0.0
    shape: str = "llama-3.1-8b"
    model: Path | None = None
    drafts: int = 0
    drafter: str = "eagle"
    acceptance: float = 0.7
    runner: int = 1
    adapters: int = 0
    options: dict[str, Any] = field(default_factory=dict)  # of vLLM's EngineArgs


@dataclass
class Record:
    """What became of a request. Times in seconds after the start; `ended` None: it did not."""

    name: str
    level: int | None
    prompt: int
    answer: int  # tokens that it should get
    arrival: float
    first_token: float | None = None
    ended: float | None = None
    reason: str | None = None
    tokens: list[int] = field(default_factory=list, repr=False)

    @property
    def ttft(self) -> float:
        """Seconds to the first token; NaN if there was none."""
        return float("nan") if self.first_token is None else self.first_token - self.arrival

    @property
    def latency(self) -> float:
        """Seconds to the end; NaN if there was none."""
        return float("nan") if self.ended is None else self.ended - self.arrival


@dataclass
class VirtualRun:
    """Records in order of arrival, the steps of the device, and what is left at the end."""

    records: list[Record]
    steps: list[StepTime]
    engine: "VirtualEngine"

    def dump(self) -> str:
        """All of it as JSON lines; equal for equal runs."""
        rows = [*map(asdict, self.records), *map(asdict, self.steps)]
        return "".join(json.dumps(row) + "\n" for row in rows)


class VirtualEngine:
    """An engine core whose device and clock are emulated. A context manager; in a process, one at
    a time.

    Attributes:
        core: vLLM's EngineCore.
        clock, runner: the device's.
        records: by name of the request.
        steps: of the device, as far as they were submitted.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.clock = VirtualClock()
        self.records: dict[str, Record] = {}
        self.steps: list[StepTime] = []
        self._answers: dict[str, tuple[Answer, SamplingParams | PoolingParams]] = {}
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []  # by time, latest first
        self._aborts: list[tuple[float, str]] = []
        self._stack = ExitStack()

    def __enter__(self) -> "VirtualEngine":
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            stack.enter_context(_virtual_clock(self.clock))
            stack.enter_context(_model_runner(self.config.runner))
            self.core = _make_core(self.config, folder)
            stack.callback(_shut_down, self.core)
            self._stack = stack.pop_all()
        worker = self.core.model_executor.driver_worker.worker
        self.runner = worker.runner
        self.runner.finished_step = self.steps.append
        self.runner.host_seconds = self.config.host_seconds
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(None, None, None)

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler, or ours in its place."""
        return self.core.scheduler

    # What happens when

    def at(self, moment: float, act: Callable[[], None]) -> None:
        """Call something between two steps, once the clock has come so far."""
        self._waiting.append((moment, -len(self._waiting), act))
        self._waiting.sort(reverse=True)

    def send(self, load: Sequence[LoadRequest]) -> None:
        """Send requests at their time."""
        for request in load:
            self.at(request.arrival, partial(self.add, request))
            if request.abort is not None:
                self.abort(request.abort, request.name)

    def abort(self, moment: float, name: str) -> None:
        """The client leaves then, also in the middle of a step."""
        self._aborts.append((moment, name))
        self._aborts.sort(reverse=True)

    def add(self, request: LoadRequest) -> None:
        """Send a request now. vLLM reads it when it arrives, beside the model's steps."""
        arrived = min(request.arrival, self.clock.now())
        sent = _engine_request(request, self.config, self.core.is_pooling_model, arrived)
        answer = self.runner.answer(list(request.prompt), sent.params)
        self._answers[request.name] = (answer, sent.params)
        self.records[request.name] = Record(
            name=request.name,
            level=request.level,
            prompt=len(request.prompt),
            answer=request.answer,
            arrival=request.arrival,
        )
        replace_clock(lambda: arrived)
        try:
            prepared = self.core.preprocess_add_request(sent)
        finally:
            replace_clock(self.clock.now)
        self.core.add_request(*prepared)

    # Running

    def run(self, until: float = float("inf")) -> None:
        """Run until all is done, or the clock passes `until`. DeviceError: the sanitizer has found
        something, or no step was made for long with requests there."""
        last = self.clock.now()
        while self.clock.now() < until:
            before = len(self.steps)
            if not self.step():
                return
            if len(self.steps) > before or not self.scheduler.has_unfinished_requests():
                last = self.clock.now()
            elif self.clock.now() > last + _STALLED and not self._waiting:
                raise DeviceError(f"no step in {_STALLED:g} s with requests waiting")

    def step(self) -> bool:
        """One turn of the core's loop; False if nothing is left to do."""
        self._deliver()
        if not self.scheduler.has_requests() and not self.core.batch_queue:
            if not self._waiting:
                return False
            self.clock.wait_until(self._waiting[-1][0])
            return True
        outputs, executed = self.core.step_fn()
        self._take(outputs or {})
        self.core.post_step(executed)
        if not executed and self.scheduler.has_requests():
            self.clock.wait_until(self.clock.now() + _POLL)
        return True

    def _deliver(self) -> None:
        self.clock.passed = self._leave
        while self._waiting and self._waiting[-1][0] <= self.clock.now():
            _, _, act = self._waiting.pop()
            act()
        self._leave()
        self.core._process_aborts_queue()  # type: ignore[no-untyped-call]

    def _leave(self) -> None:
        """Clients that leave: vLLM looks for them also in the middle of a step."""
        while self._aborts and self._aborts[-1][0] <= self.clock.now():
            _, name = self._aborts.pop()
            record = self.records.get(name)
            if record is not None and record.ended is None:
                record.ended = self.clock.now()
                record.reason = "left"
                self.core.aborts_queue.put_nowait([name])

    def _take(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        now = self.clock.now()
        for output in itertools.chain.from_iterable(part.outputs for part in outputs.values()):
            record = self.records[output.request_id]
            if record.reason == "left":
                continue
            if output.new_token_ids and record.first_token is None:
                record.first_token = now
            record.tokens += output.new_token_ids
            if output.pooling_output is not None:
                record.first_token = now
                record.tokens += output.pooling_output.tolist()
            if output.finish_reason is not None:
                record.ended = now
                record.reason = str(output.finish_reason)
                self._check(record)

    def _check(self, record: Record) -> None:
        """The answer of a request must be the one that belongs to its prompt."""
        answer, params = self._answers[record.name]
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            backend = self.core.structured_output_manager.backend
            assert backend is not None
            right = constrained_tokens(answer, params, backend)
        else:
            right = answer.tokens(max(answer.length, len(record.tokens)))
        if record.tokens != right[: len(record.tokens)]:
            raise DeviceError("got another answer", record.name, self.runner.number)
        if record.reason == "stop" and len(record.tokens) != len(right):
            raise DeviceError("ended at another length", record.name, self.runner.number)


def run_virtual(load: Sequence[LoadRequest], **config: Any) -> VirtualRun:
    """Run a load on an engine with these fields of `EngineConfig`. DeviceError: the sanitizer has
    found something, or a request never ended."""
    with VirtualEngine(EngineConfig(**config)) as engine:
        engine.send(load)
        engine.run()
        records = [engine.records[request.name] for request in load]
        for record in records:
            if record.ended is None:
                raise DeviceError("was lost", record.name, engine.runner.number)
        return VirtualRun(records, engine.steps, engine)


@contextmanager
def _virtual_clock(clock: VirtualClock) -> Iterator[None]:
    before = EmulatedWorker.clock
    EmulatedWorker.clock = clock
    replace_clock(clock.now)
    try:
        yield
    finally:
        EmulatedWorker.clock = before
        replace_clock(None)


@contextmanager
def _model_runner(version: int) -> Iterator[None]:
    """Let vLLM take this version of its model runner; on a CPU it takes the first."""
    with (
        patch.object(VllmConfig, "use_v2_model_runner", version == 2),
        patch.object(vllm_config_module, "HAS_TRITON", version == 2),
    ):
        yield


def _make_core(config: EngineConfig, folder: Path) -> EngineCore:
    keep_scheduling_mode()
    model = config.model or folder / config.shape
    make_shape(model, config.shape, tokenizer=config.model is not None)
    given: dict[str, Any] = {
        "max_num_seqs": config.seats,
        "max_num_batched_tokens": config.budget,
        "max_model_len": config.max_model_len,
        "block_size": config.block_size,
        "num_gpu_blocks_override": config.blocks,
        "enable_prefix_caching": config.prefix_cache,
        "async_scheduling": config.asynchronous,
        "mm_processor_cache_gb": 0,  # images come without their data
    }
    device = {
        "profile": config.profile,
        "kv_gib": config.kv_gib,
        "memory_gib": config.memory_gib,
        "noise": config.noise,
        "acceptance": config.acceptance,
    }
    additional: dict[str, Any] = {KEY: device}
    if config.drafts:
        given["speculative_config"] = _drafter(config, folder)
    if config.scheduler == "semantic":
        path = folder / "policy.yaml"
        path.write_text(yaml.safe_dump(policy_keys(config)))
        additional["semantic_sched"] = {"policy": str(path)}
        given["scheduler_cls"] = "vllm_semantic_sched.SemanticScheduler"
    else:
        given["scheduling_policy"] = config.scheduler
    if config.adapters:
        given |= {"enable_lora": True, "max_loras": config.adapters}
    if config.swap_gib is not None:
        extra = {"kv_connector_extra_config": {"host_gib": config.swap_gib}}
        given["kv_transfer_config"] = SWAP_CONNECTOR | extra
    elif config.connector is not None:
        given["kv_transfer_config"] = config.connector
    arguments = EngineArgs(
        model=str(model),
        skip_tokenizer_init=config.model is None,
        dtype="bfloat16",
        enforce_eager=True,
        worker_cls=WORKER,
        additional_config=additional,
        **(given | config.options),
    )
    with _quick_start():
        vllm_config = arguments.create_engine_config()
        engine = EngineCore(vllm_config, Executor.get_class(vllm_config), log_stats=True)
    # Compiled by a thread, grammars would be ready at any step.
    engine.structured_output_manager._use_async_grammar_compilation = False
    return engine


def _drafter(config: EngineConfig, folder: Path) -> dict[str, Any]:
    given: dict[str, Any] = {
        "method": config.drafter,
        "num_speculative_tokens": config.drafts,
    }
    model = DRAFTERS.get(config.drafter)
    if model is not None:
        make_shape(folder / model, model)
        given["model"] = str(folder / model)
    return given


@contextmanager
def _quick_start() -> Iterator[None]:
    """Leave out what only a process of its own needs, and takes a second: a frozen heap, kernels
    that nobody launches, and another process that looks at the model's class."""
    with (
        patch.object(registry, "_run_in_subprocess", lambda look: look()),
        patch.object(core, "freeze_gc_heap", lambda: None),
        patch.object(CpuPlatform, "register_triton_kernel_overrides", lambda platform: None),
    ):
        yield


def _shut_down(engine: EngineCore) -> None:
    """As vLLM does, without collecting garbage."""
    engine.structured_output_manager.clear_backend()
    engine.model_executor.shutdown()
    engine.scheduler.shutdown()


def policy_keys(config: EngineConfig) -> dict[str, Any]:
    """The content of the policy file of an engine of ours."""
    if isinstance(config.policy, dict):
        data = dict(config.policy)
    else:
        data, _ = read_config(config.policy, kind="policy")
    if not config.predictor:
        data["predictor"] = (data.get("predictor") or {}) | {"enabled": False}
    data["profile"] = config.given_profile or config.profile
    return data


def _engine_request(
    request: LoadRequest, config: EngineConfig, pooled: bool, now: float
) -> EngineCoreRequest:
    sampling = pooling = lora = None
    end = SHAPES[config.shape]["eos_token_id"]
    extra = {ANSWER_FIELD: [request.answer, end]} | request.extra
    if config.scheduler == "semantic" and request.level is not None:
        extra.setdefault("urgency", request.level)
    if pooled:
        pooling = PoolingParams(task="embed", extra_kwargs=extra)
    else:
        sampling = _sampling_params(request, config, extra, end)
    if request.adapter:
        lora = LoRARequest(f"adapter {request.adapter}", request.adapter, "/nowhere")
    priority = 0
    if config.scheduler == "priority" and request.level is not None:
        priority = request.level
    return EngineCoreRequest(
        request_id=request.name,
        prompt_token_ids=list(request.prompt),
        mm_features=[_feature(image) for image in request.images] or None,
        sampling_params=sampling,
        pooling_params=pooling,
        arrival_time=now,
        lora_request=lora,
        cache_salt=None,
        data_parallel_rank=None,
        priority=priority,
    )


def _sampling_params(
    request: LoadRequest, config: EngineConfig, extra: dict[str, Any], end: int
) -> SamplingParams:
    params = SamplingParams(max_tokens=config.max_model_len, temperature=0, extra_args=extra)
    if request.schema is not None:
        params.structured_outputs = StructuredOutputsParams(json=request.schema)
        params.structured_outputs._backend = "xgrammar"  # as vLLM's API server chooses it
    params.update_from_generation_config({}, end)
    return params


def _feature(image: Image) -> MultiModalFeatureSpec:
    """As vLLM's API server sends it, but without the pixels."""
    place = PlaceholderRange(offset=image.offset, length=image.tokens)
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=image.name, mm_position=place
    )
