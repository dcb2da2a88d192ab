"""What `startup.dry_run` runs in a process of its own: its last line is the reason, or empty."""

import json
import sys
from collections.abc import Sequence

from vllm_semantic_sched.engine import vllm_api
from vllm_semantic_sched.engine.kv.connector import why_config_unsupported
from vllm_semantic_sched.engine.startup.settings import SWAP_CONNECTOR

_LONGEST = 300  # characters of a reason


def why_not(options: Sequence[str]) -> str | None:
    """Why vLLM's configuration would not take the swap connector beside other options of `vllm
    serve`, the model first; None if it would, or if it does not take them without it."""
    words = list(options)
    try:
        if vllm_api.serve_arguments(words).kv_transfer_config is not None:
            return "--kv-transfer-config names another connector"
        config = vllm_api.config_of_server([*words, "--kv-transfer-config", _connector()])
    except (Exception, SystemExit) as error:  # of wrong options, argparse exits
        return None if isinstance(error, SystemExit) else _ours(words, error)
    return vllm_api.why_no_kv_connector(config, _NAME) or why_config_unsupported(config)


_NAME = SWAP_CONNECTOR["kv_connector"]


def _connector() -> str:
    return json.dumps({**SWAP_CONNECTOR, "kv_connector_extra_config": {"host_gib": 1.0}})


def _ours(words: Sequence[str], error: Exception) -> str | None:
    """What an error says, unless it also comes without the connector."""
    try:
        vllm_api.config_of_server(words)
    except (Exception, SystemExit):
        return None
    return _first_sentence(error)


def _first_sentence(error: Exception) -> str:
    details = getattr(error, "errors", None)  # pydantic's
    text = str(details()[0]["msg"]) if callable(details) else str(error)
    sentence = " ".join(text.removeprefix("Value error, ").split()).partition(". ")[0]
    return f"vLLM says: {sentence.rstrip('.')[:_LONGEST] or type(error).__name__}"


if __name__ == "__main__":
    reason = why_not(json.loads(sys.argv[1]))
    print(f"\n{reason or ''}")
