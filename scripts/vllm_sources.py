"""Fetches files of vLLM's releases through the indexes that pip is configured with.

`pip download` cannot be used for the source distribution: it builds the metadata, which fails
without the compilers that vLLM wants. pip's own finder stops before that, and it reads the same
configuration, so that no index has to be named here.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import tarfile
from pathlib import Path

from pip._internal.commands import create_command


def fetch_source(version: str, folder: Path) -> Path:
    """Downloads vLLM's source distribution into `folder` and returns the file.

    Raises:
        SystemExit: no index has it, or what came is not what the index promised.
    """
    # Else it warns of each index that does not have vLLM at all.
    logging.getLogger("pip").setLevel(logging.ERROR)
    command = create_command("download")
    options, _ = command.parse_args(["--quiet", "--no-binary", "vllm", "vllm"])
    with command.main_context():
        session = command.get_default_session(options)
        finder = command._build_package_finder(options, session)
        links = [
            candidate.link
            for candidate in finder.find_all_candidates("vllm")
            if str(candidate.version) == version and not candidate.link.is_wheel
        ]
        if not links:
            raise SystemExit(f"pip's indexes have no source distribution of vLLM {version}")
        link = links[0]
        file = folder / link.filename
        response = session.get(
            link.url_without_fragment, stream=True, headers={"Accept-Encoding": "identity"}
        )
        response.raise_for_status()
        with file.open("wb") as out:
            shutil.copyfileobj(response.raw, out)
    if link.hash and hashlib.new(link.hash_name, file.read_bytes()).hexdigest() != link.hash:
        file.unlink()
        raise SystemExit(f"{link.filename} is damaged: its {link.hash_name} sum is wrong")
    return file


def extract_tests(source: Path, folder: Path) -> None:
    """Unpacks only `tests/`: beside it, the `vllm/` folder would hide the installed one."""
    with tarfile.open(source) as archive:
        for member in archive:
            _, _, path = member.name.partition("/")
            if path.startswith("tests/"):
                member.name = path
                archive.extract(member, folder, filter="data")
