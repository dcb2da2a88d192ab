"""The path that users give as `kv_connector_module_path` in --kv-transfer-config."""

from vllm_semantic_sched.engine.version import check_installed_vllm

check_installed_vllm()  # before anything of vLLM is imported

from vllm_semantic_sched.engine.kv.connector import SemanticSwapConnector  # noqa: E402

__all__ = ["SemanticSwapConnector"]
