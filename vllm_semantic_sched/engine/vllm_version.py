"""The releases of vLLM that this package supports. Does not import vLLM."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

# vLLM calls the scheduler interface non-public and changes it between minor releases. Both ends
# of the range have passed scripts/conformance.sh.
SUPPORTED = SpecifierSet(">=0.32.0,<0.33")


class UnsupportedVersion(RuntimeError):
    """vLLM is outside the supported range."""


def check_vllm_version(version: str) -> None:
    """Reject a vLLM release whose scheduler this package was not tested with.

    Raises:
        UnsupportedVersion: names the version and the supported range.
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
