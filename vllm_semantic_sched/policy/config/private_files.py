"""Files that only their user can read: the folder of this user's sockets, and secrets."""

import contextlib
import os
import secrets
import tempfile
from pathlib import Path

TOKEN_HEADER = "X-Semsched-Token"  # of the operator endpoints


def own_folder() -> Path | None:
    """A folder that only this user can use; None if there can be none."""
    folder = Path(tempfile.gettempdir()) / f"semsched-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if folder.is_dir() and status.st_uid == os.getuid() and not status.st_mode & 0o077:
            return folder
    return None


def admin_token(port: int) -> str | None:
    """The token of the server on a port, see `kept_secret`; None if there can be none."""
    with contextlib.suppress(OSError):
        folder = own_folder()
        if folder is not None:
            return kept_secret(folder / f"{port}.token") or None
    return None


def kept_secret(path: Path) -> str:
    """The secret in a file that only its user can read; whoever asks first makes it. OSError if
    the file cannot be read or made."""
    if not path.exists():
        made = path.with_suffix(f".{os.getpid()}.new")
        made.touch(mode=0o600)
        made.write_text(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(made, path)  # whole, or not at all
        made.unlink()
    return path.read_text()
