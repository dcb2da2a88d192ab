"""Which vLLM releases this package works with, checked once at start."""

from __future__ import annotations

import vllm
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

# vLLM calls the scheduler interface non-public and changes it between minor releases; the lower
# and upper ends are those that scripts/conformance.sh has passed on.
SUPPORTED = SpecifierSet(">=0.32.0,<0.33")


class UnsupportedVersion(RuntimeError):
    """vLLM is outside the supported range."""


def check_vllm_version(version: str = vllm.__version__) -> None:
    """Refuse to start on a vLLM whose scheduler this package was not tested with.

    Raises:
        UnsupportedVersion: names the installed version and the supported range.
    """
    try:
        # Local parts (0.32.0+cpu) and development builds count as their release.
        release = Version(Version(version).base_version)
    except InvalidVersion:
        release = None
    if release is None or release not in SUPPORTED:
        raise UnsupportedVersion(
            f"vllm-semantic-sched supports vLLM {SUPPORTED}, but vLLM {version} is installed. "
            "Install a supported release, or start without --scheduler-cls."
        )
