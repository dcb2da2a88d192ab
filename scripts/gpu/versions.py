"""Prints what this machine has, and imports all that serving needs, unless the second argument is
`--versions`; exit status 1 if an import fails."""

import importlib
import importlib.metadata
import json
import platform
import sys
import time
import traceback
from pathlib import Path

_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "numpy",
    "vllm",
    "vllm-semantic-sched",
    "pydantic",
    "fastapi",
    "protobuf",
    "aiohttp",
    "huggingface-hub",
    "setuptools",
)
_MODULES = (
    "vllm.engine.arg_utils",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.model_executor.models.llama",
    "vllm_semantic_sched.engine.scheduler",
    "vllm_semantic_sched.engine.http.middleware",
    "vllm_semantic_sched.engine.kv_swap",
    "vllm_semantic_sched.cli",
    "vllm_semantic_sched.lab.bench.answer_length",
    "gpu.served",
)
_ON_GPU = (
    "vllm._C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa3_C",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.triton_attn",
)


def installed() -> dict[str, str]:
    """Versions by package; those that are missing are left out."""
    versions = {"Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def failed_imports(names: tuple[str, ...]) -> list[str]:
    """Import modules; the names of those that cannot be."""
    failed = []
    for name in names:
        begin = time.perf_counter()
        try:
            importlib.import_module(name)
            print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)
        except BaseException:  # an extension may raise anything, SystemExit too
            failed.append(name)
            print(f"{name}: failed")
            traceback.print_exc(limit=-4, file=sys.stdout)
    return failed


def main() -> None:
    facts = installed()
    failed: list[str] = []
    try:
        import torch

        facts["device"] = "CPU"
        if torch.cuda.is_available():
            facts["device"] = torch.cuda.get_device_name()
            facts["CUDA"] = str(torch.version.cuda)
        if "--versions" not in sys.argv:
            gpu = _ON_GPU if torch.cuda.is_available() else ()
            failed = failed_imports((*gpu, *_MODULES))
    except ImportError as error:
        failed.append(str(error))
    Path(sys.argv[1]).write_text(json.dumps(facts | {"failed": failed}))
    print(facts)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
