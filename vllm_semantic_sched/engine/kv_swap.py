"""The path that users give as `kv_connector_module_path` in --kv-transfer-config."""

from vllm_semantic_sched.engine.kv.connector import SemanticSwapConnector

__all__ = ["SemanticSwapConnector"]
