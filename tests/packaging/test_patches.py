"""The patches for vLLM apply, and scripts/patches.sh applies and reverts them."""

import re
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

import patches

SERIES = [folder.name.removeprefix("vllm-") for folder in sorted(patches.PATCHES.glob("vllm-*"))]
ALL = [(version, patch) for version in SERIES for patch in patches.series(version)]
SECTIONS = ("What: ", "Why: ", "Issues: ", "Cost when unused: ")


@pytest.fixture
def installed(tmp_path: Path) -> patches.Installed:
    """What the patches touch of the installed vLLM, without them, in a folder of its own."""
    spec = find_spec("vllm")
    vllm = patches.read_installed(Path(spec.origin).parents[1])
    if vllm.version not in SERIES:
        pytest.skip(f"there are no patches for vLLM {vllm.version}")
    files = [
        file for file in patches.touched_files(patches.series(vllm.version)) if "vllm/" in file
    ]
    copy = replace(vllm, packages=tmp_path / "site-packages")
    patches.copy_files(vllm.packages, files, copy.packages)
    for patch in reversed(patches.series(vllm.version)):
        patches.git_apply(patch, copy.packages, "--reverse", patches.CODE)
    assert all(copy.is_untouched(file) for file in files)
    return copy


def content(folder: Path) -> dict[str, str]:
    return {str(file): file.read_text() for file in folder.rglob("*.py")}


def test_the_same_six_patches_for_each_release() -> None:
    names = [[patch.name for patch in patches.series(version)] for version in SERIES]
    assert len(names[0]) == 6 and all(other == names[0] for other in names)


@pytest.mark.parametrize(("version", "patch"), ALL, ids=lambda part: getattr(part, "stem", part))
def test_header_and_tests(version: str, patch: Path) -> None:
    header, _, diff = patch.read_text().partition("\n---\n")
    assert header.startswith("Subject: [PATCH] [")
    assert all(f"\n{section}" in header for section in SECTIONS)
    assert re.search(r"#\d{5}", header)
    touched = patches.touched_files([patch])
    assert [file for file in touched if file.startswith("tests/")]
    assert "SPDX-License-Identifier: Apache-2.0" in header
    added = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    assert max(map(len, added)) <= 88  # vLLM's limit


def test_each_patch_applies_alone_and_all_together(installed, tmp_path: Path) -> None:
    series = patches.series(installed.version)
    for some in [*([patch] for patch in series), series]:
        patches.apply_to_copy(installed.packages, some, tmp_path / "copy", patches.CODE)


def test_patches_apply_to_source_distributions_at_hand() -> None:
    at_hand = [version for version in SERIES if (patches.WORK / version / "source").exists()]
    assert all(patches.check(version, quick=True) for version in at_hand)


def test_apply_and_revert_an_installed_vllm(installed, monkeypatch, capsys) -> None:
    monkeypatch.setattr(patches, "installed_in", lambda venv: installed)
    monkeypatch.setattr(patches, "WORK", installed.packages.parent / "cache")
    before = content(installed.packages)
    for back, said in ((True, "has no patches"), (False, "6 patches on"), (False, "already")):
        patches.patch_installed(Path("venv"), back)
        assert said in capsys.readouterr().out
    assert "def preempt_for_waiting" in "".join(content(installed.packages).values())
    patches.patch_installed(Path("venv"), back=True)
    assert "6 patches off" in capsys.readouterr().out
    assert content(installed.packages) == before


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("back", [False, True])
def test_modified_vllm_is_refused(installed, monkeypatch, patched: bool, back: bool) -> None:
    monkeypatch.setattr(patches, "installed_in", lambda venv: installed)
    monkeypatch.setattr(patches, "WORK", installed.packages.parent / "cache")
    if patched:
        patches.patch_installed(Path("venv"), back=False)
    file = installed.packages / "vllm" / "v1" / "metrics" / "stats.py"
    file.write_text(file.read_text() + "# mine\n")
    before = content(installed.packages)
    with pytest.raises(SystemExit, match=r"was modified by something else: .*stats\.py"):
        patches.patch_installed(Path("venv"), back)
    assert content(installed.packages) == before


def test_applying_does_not_write_into_linked_files(installed, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(patches, "installed_in", lambda venv: installed)
    monkeypatch.setattr(patches, "WORK", tmp_path / "cache")
    linked = tmp_path / "linked"
    shutil.copytree(installed.packages, linked, copy_function=lambda a, b: Path(b).hardlink_to(a))
    before = content(linked)
    patches.patch_installed(Path("venv"), back=False)
    assert content(linked) == before


def test_release_without_patches_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"no patches for vLLM 0\.1\.0, only for vllm-"):
        patches.series("0.1.0")


def test_folder_that_is_no_environment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="not a virtual environment"):
        patches.installed_in(tmp_path)
