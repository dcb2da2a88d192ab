"""A small random-weight Llama with a real tokenizer, for load tests without a download.

The output is meaningless, but tokenizer, attention and sampling are real, and with fp32 weights
greedy outputs of two schedulers can be compared. The tokenizer is the 32k SentencePiece vocabulary
in `mistral_common`, a dependency of vLLM. (Llama: `transformers` splits the texts of any Qwen model
by the rules of Qwen's vocabulary.)
"""

import json
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

from vllm_semantic_sched.operate.real_model import write_once

_SENTENCEPIECE_FILE = "mistral_instruct_tokenizer_240323.model.v3"

# Roles appear in the prompt as plain words: an urgency predictor that reads the served text meets
# them as it would with a chat model.
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ m['role'] }}: {{ m['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True)
class TinyModelConfig:
    """Shape of a model, in the words of `LlamaConfig`. By default the engine, not the HTTP server,
    is the bottleneck on two CPU cores."""

    hidden_size: int = 384
    intermediate_size: int = 1024
    num_hidden_layers: int = 4
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    max_position_embeddings: int = 1024
    # With random weights of ordinary scale every next token depends on the last one alone, and
    # greedy decoding falls into a short cycle. A larger scale gives attention an influence.
    initializer_range: float = 0.05


SIZES = {
    "tiny": TinyModelConfig(),
    # Computing 8,000 tokens takes seconds on two CPU cores, and their KV 96 MiB.
    "small": TinyModelConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8448,
    ),
}


def make_model(directory: Path, config: TinyModelConfig = SIZES["tiny"]) -> bool:
    """Write the model and its tokenizer into `directory`; False if the same model was there
    already. FileNotFoundError if `mistral_common` lacks the expected tokenizer file."""
    wanted = json.dumps(asdict(config), sort_keys=True)
    return write_once(directory, wanted, lambda: _write(directory, config))


def _write(directory: Path, config: TinyModelConfig) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory)
    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    shape = LlamaConfig(
        **asdict(config),
        vocab_size=len(tokenizer),
        # Tied embeddings make a random model repeat its input.
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        torch_dtype="float32",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(shape).to(torch.float32)
    model.generation_config.do_sample = False
    logging.disable_progress_bar()
    model.save_pretrained(str(directory), safe_serialization=True)


def write_tokenizer(directory: Path) -> None:
    """Write the tokenizer alone. FileNotFoundError if `mistral_common` lacks the expected file."""
    from transformers import LlamaTokenizer

    source = resources.files("mistral_common") / "data" / _SENTENCEPIECE_FILE
    if not source.is_file():
        raise FileNotFoundError(f"mistral_common does not carry {_SENTENCEPIECE_FILE}")
    (directory / "tokenizer.model").write_bytes(source.read_bytes())
    tokenizer = LlamaTokenizer.from_pretrained(str(directory))
    tokenizer.chat_template = _CHAT_TEMPLATE
    tokenizer.save_pretrained(str(directory))
