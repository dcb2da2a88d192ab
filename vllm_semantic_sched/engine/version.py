"""The releases of vLLM that this package supports. Does not import vLLM."""

import functools
import importlib.metadata
import logging
import os

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

# vLLM calls the scheduler interface non-public and changes it between minor releases. Every
# minor release of the range has passed scripts/matrix.sh.
SUPPORTED = SpecifierSet(">=0.31.0,<0.34")

ALLOW_UNTESTED = "SEMSCHED_ALLOW_UNTESTED_VLLM"  # environment variable


class UnsupportedVersion(RuntimeError):
    """vLLM is outside the supported range."""


def check_vllm_version(version: str) -> None:
    """Raise UnsupportedVersion for a vLLM release whose scheduler this package was not tested with,
    unless the environment allows it."""
    try:
        # Local parts (0.32.0+cpu) and development builds count as their release.
        release = Version(Version(version).base_version)
    except InvalidVersion:
        release = None
    if release is not None and release in SUPPORTED:
        return
    problem = f"vllm-semantic-sched supports vLLM {SUPPORTED}, but vLLM {version} is installed."
    if os.environ.get(ALLOW_UNTESTED) != "1":
        raise UnsupportedVersion(
            f"{problem} Install a supported release, start without --scheduler-cls, or set "
            f"{ALLOW_UNTESTED}=1 to try this one."
        )
    logging.getLogger("vllm.semantic_sched").warning(
        "Semantic scheduling: %s %s=1 tries it.", problem, ALLOW_UNTESTED
    )


@functools.cache  # reading the metadata of all packages takes half a second
def check_installed_vllm() -> None:
    """`check_vllm_version` of the installed vLLM, to be called before anything of it is imported:
    another release may lack what this package imports."""
    for name in importlib.metadata.packages_distributions().get("vllm", ()):
        check_vllm_version(importlib.metadata.version(name))
