"""Asks vLLM whether a server could start with the swap connector, without starting one."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

_SECONDS = 180.0  # to import vLLM and to read the model's configuration, which may be fetched
_MODULE = "vllm_semantic_sched.engine.kv.connector_check"


def why_no_connector(options: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """The reason why vLLM's configuration would not take the swap connector, in a line; None if it
    would, or if nobody knows: without vLLM, or where the server cannot start anyhow. Takes seconds.

    Args:
        options: of `vllm serve`, the model first, without the connector.
        environment: variables added to those of this process.
    """
    command = [sys.executable, "-m", _MODULE, json.dumps(list(options))]
    variables = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", **environment}
    try:
        # A process of its own: reading a configuration may initialize a device.
        done = subprocess.run(
            command, capture_output=True, text=True, env=variables, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        return None
    return lines[-1] or None
