"""The container files: linted, and what they copy and mount exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from vllm_semantic_sched.cli.serve import _DRAIN_SECONDS

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "configs" / "deploy" / "docker"
DOCKERFILES = sorted(DOCKER.glob("Dockerfile*"))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfile_is_clean_and_copies_what_exists(path: Path) -> None:
    program = Path(sys.executable).with_name("hadolint")
    # DL3008: packages of a Debian release get security fixes only.
    done = subprocess.run(
        [program, "--ignore", "DL3008", path], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout
    assert re.findall(r"^USER (.+)$", path.read_text(), re.MULTILINE)[-1] == "1000:1000"
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", path.read_text(), re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    assert "configs" in names and all((ROOT / name).exists() for name in names)


def test_compose_file_mounts_what_exists() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    assert {
        Path(one["build"]["dockerfile"]).name for one in services.values() if "build" in one
    } == {path.name for path in DOCKERFILES}
    mounted = [volume.split(":") for one in services.values() for volume in one["volumes"]]
    files = {inside: DOCKER / outside for outside, inside, *_ in mounted if outside[0] == "."}
    home = "/cache"  # of the user of the images
    assert all(f"HOME={home} " in path.read_text() for path in DOCKERFILES)
    assert any(inside.startswith(f"{home}/") for _, inside, *_ in mounted)
    for service in services.values():
        if "build" in service:  # longer than `semsched serve` lets requests finish
            grace = int(service["stop_grace_period"].removesuffix("s"))
            assert grace > _DRAIN_SECONDS
    assert len(files) == 5 and all(path.is_file() for path in files.values())
    prometheus = yaml.safe_load((DOCKER / "prometheus.yaml").read_text())
    assert set(prometheus["rule_files"]) <= set(files)
    (folder,) = (
        one["options"]["path"]
        for one in yaml.safe_load((DOCKER / "dashboards.yaml").read_text())["providers"]
    )
    assert any(inside.startswith(f"{folder}/") for inside in files)
