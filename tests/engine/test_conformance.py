"""vLLM's own scheduler tests pass with our class where they pass with vLLM's.

Here those that touch what we override; scripts/matrix.sh runs all, under all base policies.
"""

import re

import conformance
import pytest
from conformance import DOOR, RECORDS, installed_release, lost_tests, required

pytestmark = pytest.mark.engine

# About parts of vLLM's scheduler that we leave alone, and random ones that take long.
LEFT_TO_THE_MATRIX = re.compile(
    "diffusion|ec_connector|encoder|cross_attn|spec_|sampling_mask|routed_experts|draft|mamba|blast"
)


@pytest.fixture(autouse=True)
def forked(monkeypatch, nursery) -> None:
    monkeypatch.setattr(conformance, "subprocess", nursery)


def test_no_test_of_vllm_is_lost(tmp_path) -> None:
    names = required(installed_release(), "semantic")
    chosen = [name for name in names if not LEFT_TO_THE_MATRIX.search(name)]
    chosen += [name for name in names if "blast[preemption-1" in name]
    assert len(chosen) > 90
    assert lost_tests("semantic", tmp_path, chosen, workers=0) == {}


def test_no_test_of_the_http_server_is_lost(tmp_path) -> None:
    """Those of authentication, CORS and statuses, with our middleware around each application."""
    release = installed_release()
    if not (RECORDS / f"{release}-{DOOR}.txt").exists():
        return
    about = re.compile("authentication|cors|http_status")
    chosen = [name for name in required(release, DOOR) if about.search(name)]
    assert len(chosen) > 20
    assert lost_tests(DOOR, tmp_path, chosen, workers=0) == {}
