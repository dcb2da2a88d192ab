"""Runs `uv pip install`, or `compile`, with the package sources that pip is configured with.

uv reads neither pip's configuration files nor PIP_* variables. This script translates them into
uv's environment variables, which, unlike arguments, show no password in a list of processes.

    python scripts/uv_install.py ARGUMENT...    arguments of `uv pip install`; it installs into the
                                                environment of this Python unless they say otherwise
    python scripts/uv_install.py compile ARGUMENT...
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

# Where pip sets an option; a later section overrides an earlier one.
SECTIONS = ("global", "install", ":env:")


def pip_options(listing: str) -> dict[str, str]:
    """Options of `pip install` from the output of `pip config list`, by name without dashes."""
    options: dict[str, str] = {}
    lines = [line.partition("=") for line in listing.splitlines()]
    for section in SECTIONS:
        for key, _, value in lines:
            place, _, name = key.partition(".")
            # pip ignores empty values, too.
            if place == section and ast.literal_eval(value):
                options[name] = ast.literal_eval(value)
    return options


def uv_environment(options: dict[str, str]) -> dict[str, str]:
    """Environment variables that give uv the sources, certificates and limits in `options`."""

    def entries(name: str) -> list[str]:
        return options.get(name, "").split()

    environment = {
        "UV_DEFAULT_INDEX": options.get("index-url", ""),
        "UV_INDEX": " ".join(entries("extra-index-url")),
        "UV_FIND_LINKS": ",".join(entries("find-links")),
        "UV_INSECURE_HOST": " ".join(entries("trusted-host")),
        "UV_CONSTRAINT": " ".join(entries("constraint")),
        "UV_HTTP_TIMEOUT": options.get("timeout") or options.get("default-timeout", ""),
        "HTTPS_PROXY": options.get("proxy", ""),
        "HTTP_PROXY": options.get("proxy", ""),
        "SSL_CLIENT_CERT": options.get("client-cert", ""),
    }
    if options.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        environment["UV_NO_INDEX"] = "1"
    certificates = options.get("cert", "")
    if certificates:
        kind = "SSL_CERT_DIR" if Path(certificates).is_dir() else "SSL_CERT_FILE"
        environment[kind] = certificates
    return {name: value for name, value in environment.items() if value}


def main() -> int:
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    ).stdout
    command = "install"
    arguments = sys.argv[1:]
    if arguments[:1] == ["compile"]:
        command, *arguments = arguments
    if "--python" not in arguments:
        arguments = ["--python", sys.executable, *arguments]
    uv = str(Path(sys.executable).with_name("uv"))
    # What the user has set for uv has precedence over what pip was given.
    environment = uv_environment(pip_options(listing)) | os.environ
    if "--require-hashes" in arguments:
        # uv takes a package from the first index that has it, so that nobody can put a newer one
        # of the same name into another. Where hashes say what is taken, any index may have it.
        environment.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
        environment.pop("UV_CONSTRAINT", None)  # uv would want a hash of each constraint, too
    return subprocess.run([uv, "pip", command, *arguments], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
