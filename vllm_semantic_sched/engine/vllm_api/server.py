"""vLLM's servers: their authentication, engines, device and model."""

import argparse
import inspect
import re
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, cast

import torch
from starlette.datastructures import Headers
from vllm.config import VllmConfig
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

RANK = "data_parallel_rank"
"""Argument of the engine client's `generate`: the number of the engine; None: vLLM chooses. vLLM
fills it from the header X-data-parallel-rank."""

_PACKAGE = "vllm_semantic_sched."

_BEAM = re.compile(r".*-[0-9a-f]{16}-beam-\d+(?:-[0-9a-f]{8})?", re.DOTALL)


def is_beam(request_id: str) -> bool:
    """Whether a request computes the next token of one beam of a beam search. vLLM makes each a
    request of its own, with sampling parameters that say nothing of the client's request."""
    return _BEAM.fullmatch(request_id) is not None


def encode_with_rank(engine_client: Any) -> Callable[..., AsyncGenerator[Any, None]]:
    """The engine client's `encode`, with the argument `RANK`: vLLM has it in `generate` and in
    `add_request`, which both call."""
    encode = engine_client.encode
    add_request = engine_client.add_request
    if RANK in inspect.signature(encode).parameters:
        return cast("Callable[..., AsyncGenerator[Any, None]]", encode)
    ranks: dict[str, int] = {}

    def add(request_id: str, *args: Any, **kwargs: Any) -> Any:
        rank = ranks.pop(request_id, None)
        if rank is not None:
            kwargs[RANK] = rank
        return add_request(request_id, *args, **kwargs)

    async def ranked(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        request_id = args[2] if len(args) > 2 else kwargs["request_id"]
        rank = kwargs.pop(RANK, None)
        if rank is not None:
            ranks[request_id] = rank
        try:
            async with aclosing(encode(*args, **kwargs)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            ranks.pop(request_id, None)

    engine_client.add_request = add
    return ranked


STOPPED_ERRORS = (EngineDeadError, EngineGenerateError)
"""What the engine client's `generate` raises after its engine has stopped, or `end_requests`."""


def end_requests(engine_client: Any) -> None:
    """End all requests of an API server: their `generate` tells the engine and raises one of
    `STOPPED_ERRORS`."""
    engine_client.output_processor.propagate_error(RuntimeError("the server is stopping"))


def limits_on_all(vllm_config: VllmConfig) -> list[str]:
    """Options given by which API servers refuse requests, whatever their level."""
    options = []
    for field in ("max_num_queued_reqs", "max_num_queued_tokens"):
        if getattr(vllm_config.scheduler_config, field, None) is not None:
            options.append(f"--{field.replace('_', '-')}")
    return options


def class_name(cls: type) -> str:
    """The name of a class with that of its module, as options of vLLM take it."""
    return f"{cls.__module__}.{cls.__qualname__}"


def other_scheduler(vllm_config: VllmConfig) -> str | None:
    """The scheduler class that engines of a configuration run, if it is none of this package's: a
    platform's plug-in may have replaced the one that the user named."""
    scheduler = vllm_config.scheduler_config.get_scheduler_cls()
    ours = any(base.__module__.startswith(_PACKAGE) for base in scheduler.__mro__)
    return None if ours else class_name(scheduler)


def parameters_of(request: Any) -> dict[str, Any] | None:
    """What clients and the middleware add to the parameters of a request, of sampling or of
    pooling."""
    if request.sampling_params is not None:
        return request.sampling_params.extra_args
    return getattr(request.pooling_params, "extra_kwargs", None)


class Unauthorized:
    """Tells requests that vLLM's own authentication, inside the middleware that users name, would
    refuse. `app`: the next layer of the server's middleware."""

    def __init__(self, app: Any) -> None:
        self._layer = app
        for _ in range(32):  # layers of middleware
            if hasattr(self._layer, "verify_token"):
                break
            self._layer = getattr(self._layer, "app", None)
        else:
            self._layer = None
        module = sys.modules.get(type(self._layer).__module__)
        self._guarded: str = getattr(module, "GUARDED_PREFIX", "/v1")

    def __call__(self, scope: Any) -> bool:
        """Whether vLLM refuses a request, by its headers; never where the server has no key."""
        if self._layer is None or scope["type"] != "http" or scope["method"] == "OPTIONS":
            return False
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return path.startswith(self._guarded) and not self._layer.verify_token(Headers(scope=scope))


def engine_count(vllm_config: VllmConfig) -> int:
    """Engines among which an API server can choose; vLLM numbers them from 0 on."""
    parallel = vllm_config.parallel_config
    if parallel.local_engines_only:
        return parallel.data_parallel_size_local
    return parallel.data_parallel_size


def api_servers(vllm_config: VllmConfig) -> tuple[int, int]:
    """This API server's number, from 0 on, and how many of them send requests to the engines."""
    parallel = vllm_config.parallel_config
    return parallel._api_process_rank, parallel._api_process_count


def shares_host(vllm_config: VllmConfig) -> bool:
    """Whether this engine is one of several of a server. vLLM tells the engines of dense models
    that they are alone, in all fields but this one."""
    parallel = vllm_config.parallel_config
    return max(parallel.data_parallel_size, parallel.elastic_ep_max_dp_size) > 1


async def pause(engine_client: Any, mode: str) -> None:
    """Stop starting requests, and wait until nothing runs any more; `mode`: `wait` or `keep`. New
    requests join the queue: `pause_generation` refuses them from vLLM 0.33 on, if running ones may
    finish."""
    await engine_client.engine_core.pause_scheduler_async(mode=mode, clear_cache=False)


def why_refused(vllm_config: VllmConfig) -> str | None:
    """Why an engine must not run with another scheduler than vLLM's own, and what to do; None if it
    may."""
    if vllm_config.model_config.is_diffusion:
        return (
            "diffusion language models need a scheduler of vLLM's own: start the server without "
            "--scheduler-cls"
        )
    return None


def why_unordered(vllm_config: VllmConfig) -> str | None:
    """Why the order of requests must not depend on time in an engine, and what to do; None if it
    may."""
    parallel = vllm_config.parallel_config
    backend = parallel.distributed_executor_backend
    if backend == "external_launcher" and parallel.world_size > 1:
        return (
            "with the executor external_launcher every rank schedules by itself, and ranks that "
            "decide by their own clocks diverge and hang: use the executor mp or ray, or the "
            "policy fcfs"
        )
    return None


class Hardware(NamedTuple):
    """The device of an engine."""

    kind: str  # torch's device type: cpu, cuda
    name: str  # as the driver reports it
    dtype: str  # of weights and activations, as torch names it
    memory: float  # GB of one device
    here: bool  # whether the calling process uses the device


def describe_hardware(config: VllmConfig) -> Hardware:
    """The device that an engine runs on."""
    from vllm.platforms import current_platform

    kind = str(current_platform.device_type)
    return Hardware(
        kind=kind,
        name="this processor" if kind == "cpu" else current_platform.get_device_name(),
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        memory=current_platform.get_device_total_memory() / 1e9,
        here=kind == "cpu" or (kind == "cuda" and torch.cuda.is_initialized()),
    )


def has_sleep_mode() -> bool:
    """Whether the platform can release the device's memory; elsewhere vLLM ignores the call."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_sleep_mode_available())


def describe_model(config: VllmConfig) -> tuple[int, dict[str, Any]]:
    """The tensor-parallel size of an engine, and the arguments of `ModelShape.from_config`."""
    model = config.model_config
    arguments = {
        "name": str(model.served_model_name or model.model),
        "config": model.hf_config.to_dict(),
        "dtype": str(model.dtype),
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "quantization": model.quantization,
    }
    return config.parallel_config.tensor_parallel_size, arguments


def serve_arguments(options: Sequence[str]) -> argparse.Namespace:
    """The options of `vllm serve`, the model first, as vLLM parses them. Raises ValueError or
    SystemExit if they are wrong."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()  # type: ignore[no-untyped-call]
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    arguments: argparse.Namespace = parser.parse_args(["serve", *options])
    return arguments


def config_of_server(options: Sequence[str]) -> VllmConfig:
    """The configuration with which `vllm serve` would start engines; reads, and if need be fetches,
    the model's configuration. Raises what vLLM raises if it refuses the options."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    arguments = serve_arguments(options)
    if getattr(arguments, "model_tag", None) is not None:
        arguments.model = arguments.model_tag
    engine = AsyncEngineArgs.from_cli_args(arguments)
    return engine.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)


def why_no_kv_connector(config: VllmConfig, name: str) -> str | None:
    """Why the engine of a configuration would not run the KV connector that it was made with; None
    if it would."""
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector != name:  # --kv-offloading-size replaces it
        chosen = None if transfer is None else transfer.kv_connector
        return f"another option chooses the KV connector {chosen}"
    if config.model_config.is_encoder_decoder:  # the scheduler asserts that
        return "vLLM runs encoder-decoder models without KV connectors"
    return None
