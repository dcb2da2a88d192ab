"""Packs vLLM, what it imports, and this project for a GPU machine without network that has Python
3.12, PyTorch, Triton and transformers.

vLLM's extensions use PyTorch's stable ABI, so those that were built beside a newer PyTorch load
there. Nearly all of their size is GPU code for other devices, which is left out, and of
FlashAttention 3 all but bfloat16 with heads of 128; FlashAttention 2 stays behind.
"""

import argparse
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from vllm_sources import CACHE

from gpu.fatbin import fat_binaries, thin

ROOT = Path(__file__).resolve().parents[2]
ARCHIVE = "gpu-kit.tar.xz"
WEIGHTS = "*.safetensors"
"""Tracked files that do not travel: `gpu_check.sh aside` moves them away."""
_MIB = 2**20
_PYTHON = "3.12"
_GLIBC = (17, 24, 27, 28, 31, 34, 35)
_EXTENSION = "vllm/_C_stable_libtorch.abi3.so"
_MIXTURES = "vllm/_moe_C_stable_libtorch.abi3.so"
_ATTENTION = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
# Kernels by mangled name: bfloat16 for heads of 128, and what is needed beside them.
_ATTENTION_KERNELS = (
    "FlashAttnFwdCombine|N3cub|prepare_varlen|(?<!ILi192EEEEE)ELi128ENS_10bfloat16_tEfNS_4arch4Sm90"
)
# Of the wheel: sources for compilers, other front ends, and extensions for other models.
_NOT_OF_VLLM = (
    "*.h", "*.hpp", "*.cuh", "*.inl", "*.cu", "*.cpp", "*.jpg", "*/vllm-rs",
    "*/swagger-ui-bundle.js", "*/_vllm_fa2_C*", "*/_flash[mk]*_C*", "*/_qutlass*",
    "*/deep_gemm/*.so", "*/_deepselect*",
)  # fmt: skip
# Of this project: the networks and what they are trained with.
_NOT_OURS = (WEIGHTS, "*/lab/training/texts/*")
_SCRIPTS = (
    "scripts/gpu_check.sh",
    "scripts/gpu",
    "scripts/studies/common.py",
    "scripts/studies/torch_check.py",
    "scripts/studies/kv_copy.py",
)
_TOKENIZER = "mistral_instruct_tokenizer_240323.model.v3"  # of the benchmark's models


class TooLarge(SystemExit):
    """The kit and the tracked files exceed the limit."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="gpu_check.sh build", description=__doc__)
    add = parser.add_argument
    add("out", type=Path, help="folder for the archive, which Git must ignore")
    add("--release", default="0.32.0", help="of vLLM (%(default)s)")
    add("--architecture", type=int, default=90, help="compute capability (%(default)s: H100, H200)")
    add(
        "--limit",
        type=float,
        default=64.0,
        help="MiB that archive and tracked files without weights may have together (%(default)s)",
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    cache = CACHE / "gpu-kit" / args.release
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as folder:
        tree = Path(folder) / "kit"
        add_vllm(vllm_wheel(args.release, cache), tree / "site", args.architecture)
        add_packages(cache / "wheels", tree)
        add_project(tree)
        archive = args.out / ARCHIVE
        pack(tree, archive)
    check_size(archive.stat().st_size, tracked_bytes(ROOT), args.limit)
    print(f"written: {archive}\nthere: tar xJf {ARCHIVE} && scripts/gpu_check.sh check")


def vllm_wheel(release: str, cache: Path) -> Path:
    """The CUDA build's wheel, from the package registry if it is not cached (over 300 MB)."""
    wheels = list(cache.glob("vllm-*.whl"))
    if not wheels:
        fetch([f"vllm=={release}"], cache)
        wheels = list(cache.glob("vllm-*.whl"))
    return wheels[0]


def fetch(requirements: Iterable[str], folder: Path) -> None:
    """Download wheels for the other machine, without their dependencies."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    subprocess.run([*command, str(folder), *_target(), *requirements], check=True)


def _target() -> list[str]:
    """pip's options for the other machine."""
    options = ["--only-binary=:all:", "--python-version", _PYTHON, "--implementation", "cp"]
    for abi in (f"cp{_PYTHON.replace('.', '')}", "abi3", "none"):
        options += ["--abi", abi]
    old = ("manylinux1_x86_64", "manylinux2014_x86_64")
    for platform in (*old, *(f"manylinux_2_{version}_x86_64" for version in _GLIBC)):
        options += ["--platform", platform]
    return options


def requirements() -> list[str]:
    """The packages that serving imports and the other machine lacks, as they were locked."""
    lock = (ROOT / "scripts" / "requirements.lock").read_text()
    versions = dict(re.findall(r"^(\S+?)==(\S+)", lock, re.MULTILINE))
    names = (ROOT / "scripts" / "gpu" / "packages.txt").read_text().split()
    return [f"{name}=={versions[name]}" for name in names]


def add_vllm(wheel: Path, site: Path, architecture: int) -> None:
    """Unpack the wheel without what is not needed, and thin its extensions."""
    with zipfile.ZipFile(wheel) as archive:
        extension = archive.read(_EXTENSION)
        for name in archive.namelist():
            if is_left_out(name, _NOT_OF_VLLM):
                continue
            data = archive.read(name)
            if name in (_EXTENSION, _MIXTURES, _ATTENTION):
                data = _thinned(name, data, architecture, extension)
            path = site / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def _thinned(name: str, data: bytes, architecture: int, extension: bytes) -> bytes:
    """The extension with code for one architecture, and a line about it."""
    copy = bytearray(data)
    if name == _ATTENTION:
        done = thin(copy, architecture, wanted=_ATTENTION_KERNELS, spare=extension)
    else:
        done = thin(copy, architecture)
    if not done.kept:
        raise SystemExit(f"{name} has no code for sm_{architecture}")
    count = sum(1 for _ in fat_binaries(copy))  # what was written can be read
    print(
        f"{Path(name).name}: {done.kept / _MIB:.1f} MiB of GPU code kept, "
        f"{done.dropped / _MIB:.1f} dropped; {done.emptied} of {count} parts without any",
        flush=True,
    )
    return bytes(copy)


def is_left_out(name: str, patterns: Iterable[str]) -> bool:
    """Whether a path in an archive matches one of the patterns."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def add_packages(wheels: Path, tree: Path) -> None:
    """Install the locked packages and this project into `tree`/site; the wheels are cached."""
    wheels.mkdir(parents=True, exist_ok=True)
    wanted = requirements()
    missing = [requirement for requirement in wanted if requirement not in cached(wheels)]
    if missing:
        fetch(missing, wheels)
    there = cached(wheels)
    chosen = [*(there[requirement] for requirement in wanted), build_own_wheel(tree.parent)]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-compile", "--target", str(tree / "site"), *_target()]
    subprocess.run([*command, *map(str, chosen)], check=True)
    shutil.rmtree(tree / "site" / "bin", ignore_errors=True)
    for path in (tree / "site" / "mistral_common" / "data").iterdir():
        if path.is_file() and path.name != _TOKENIZER:
            path.unlink()


def cached(wheels: Path) -> dict[str, Path]:
    """Wheels by requirement, `name==version`."""
    by_requirement = {}
    for path in wheels.glob("*.whl"):
        name, version = path.name.split("-")[:2]
        by_requirement[f"{_normalized(name)}=={version}"] = path
    return by_requirement


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def build_own_wheel(folder: Path) -> Path:
    """This project's wheel from the last commit, without networks and texts."""
    source = folder / "source"
    extract_commit(source, ["."])
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    subprocess.run([*command, str(folder), str(source)], check=True)
    return next(folder.glob("vllm_semantic_sched-*.whl"))


def add_project(tree: Path) -> None:
    """Copy the scripts that run there."""
    extract_commit(tree, _SCRIPTS)
    commit = subprocess.run(
        ["git", "-C", ROOT, "rev-parse", "--short", "HEAD"],
        check=True,
        capture_output=True,
        text=True,
    )
    (tree / "COMMIT").write_text(commit.stdout)


def extract_commit(folder: Path, paths: Iterable[str]) -> None:
    """Write these paths of the last commit, without what is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["git", "-C", str(ROOT), "archive", "HEAD", *paths]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as archive,
    ):
        for member in archive:
            if not is_left_out(member.name, _NOT_OURS):
                archive.extract(member, folder, filter="data")
    if process.returncode:
        raise SystemExit(f"git archive failed with {process.returncode}")


def pack(tree: Path, archive: Path) -> None:
    """Write the archive."""
    compress = "xz -6 -T0"
    command = ["tar", "-C", str(tree), "--sort=name", "--owner=0", "--group=0"]
    subprocess.run([*command, "-I", compress, "-cf", str(archive), "."], check=True)


def tracked_bytes(root: Path) -> int:
    """Bytes of all tracked files but the weights."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z"], check=True, capture_output=True
    ).stdout
    paths = [os.fsdecode(name) for name in listed.split(b"\0") if name]
    sizes = (
        (root / path).lstat().st_size
        for path in paths
        if not fnmatch.fnmatch(path, WEIGHTS) and (root / path).is_file()
    )
    return sum(sizes)


def check_size(archive: int, tracked: int, limit: float) -> None:
    """Print the sizes in bytes as MiB; TooLarge if they exceed `limit` MiB."""
    total = (archive + tracked) / _MIB
    text = f"archive {archive / _MIB:.1f} MiB, tracked files without weights {tracked / _MIB:.1f}"
    print(f"{text}: {total:.1f} of {limit:g} MiB")
    if total > limit:
        raise TooLarge(f"{total - limit:.1f} MiB too large")


if __name__ == "__main__":
    main()
