"""`python -m vllm_semantic_sched.lab.device.serve serve MODEL [OPTIONS]`: vLLM's command line on
the emulated device. `--additional-config '{"emulated_device": {"profile": "h100"}}'` says which."""

import sys

from vllm_semantic_sched.lab.device.launch import keep_scheduling_mode
from vllm_semantic_sched.lab.device.settings import WORKER


def main() -> None:
    """Run vLLM's command with the worker and the scheduling mode of a GPU."""
    keep_scheduling_mode()
    from vllm.entrypoints.cli.main import main as vllm_main

    sys.argv[0] = "vllm"
    sys.argv += ["--worker-cls", WORKER]
    vllm_main()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
