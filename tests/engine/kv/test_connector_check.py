"""Whether a server's configuration takes the swap connector, by vLLM's own configuration code."""

import json
import os
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig, MultiModalConfig, VllmConfig

from vllm_semantic_sched.engine.kv.connector_check import why_not
from vllm_semantic_sched.engine.startup.dry_run import why_no_connector
from vllm_semantic_sched.engine.startup.settings import SWAP_CONNECTOR

pytestmark = pytest.mark.engine

SIZE = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 1000}
MODELS = {
    "LlamaForCausalLM": SIZE | {"model_type": "llama", "intermediate_size": 64},
    "WhisperForConditionalGeneration": {
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "d_model": 64,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "pad_token_id": 1,
    },
}


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The options of a server of a model, of which only the configuration is there."""
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)

    def options(*more: str, model: str = "LlamaForCausalLM") -> list[str]:
        config = {"architectures": [model], "max_position_embeddings": 4096} | MODELS[model]
        (tmp_path / "config.json").write_text(json.dumps(config))
        return [str(tmp_path), "--skip-tokenizer-init", *more]

    return options


def test_configuration_that_takes_it(server) -> None:
    assert why_not(server("--max-model-len", "1024")) is None


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("--kv-offloading-size", "1"), "OffloadingConnector"),
        (("--pipeline-parallel", "2"), "pipeline parallelism is on"),  # abbreviated
        (("--kv-transfer-config.kv_connector", "X"), "another connector"),
    ],
)
def test_options_that_exclude_it(server, more, reason) -> None:
    role = ("--kv-transfer-config.kv_role", "kv_both") if "X" in more else ()
    found = why_not(server(*more, *role))
    assert found is not None and reason in found and "\n" not in found


def test_encoder_decoder_models_exclude_it(server) -> None:
    found = why_not(server(model="WhisperForConditionalGeneration"))
    assert found is not None and "encoder-decoder" in found


def test_environment_that_excludes_it(server, monkeypatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    found = why_not(server())
    assert found is not None and found.endswith("is also enabled") and "expandable" in found


def test_what_fails_without_it_too_is_not_its_fault(server, tmp_path) -> None:
    assert why_not([str(tmp_path / "no-such-model")]) is None
    assert why_not(server("--no-such-option")) is None
    assert why_not(server("--max-model-len", "100000")) is None


def test_it_opens_no_embedding_inputs_of_multimodal_models() -> None:
    multimodal = MultiModalConfig()
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=multimodal),
        ec_transfer_config=None,
        kv_transfer_config=KVTransferConfig(**SWAP_CONNECTOR),
    )
    VllmConfig._resolve_mm_embedding_inputs(config)
    assert not multimodal.enable_mm_embeds and not multimodal.allow_missing_mm_embeddings


def test_question_is_asked_in_a_process_of_its_own(server, tmp_path, monkeypatch) -> None:
    options = server("--pipeline-parallel", "2")
    assert why_no_connector(options, os.environ) == "pipeline parallelism is on"
    monkeypatch.setattr("sys.executable", str(tmp_path / "no-python"))
    assert why_no_connector(options, {}) is None
