"""Where the optional data folder is: traces for the simulator, texts for the lab."""

import os
from pathlib import Path


def data_root() -> Path | None:
    """The data folder: `SEMSCHED_DATA`, else `../shared/data` beside the project, else None."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    root = Path(os.environ.get("SEMSCHED_DATA") or beside)
    return root if root.is_dir() else None
