"""Fetches files of vLLM's releases through the indexes that pip is configured with.

`pip download` fails on the source distribution: it builds the metadata, which needs compilers.
pip's package finder only finds the link, and it reads pip's configuration.
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
        SystemExit: no index has the file, or its hash differs from the one in the index.
    """
    # pip warns about each index without vLLM.
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
