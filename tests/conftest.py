"""Lets test modules import the helpers that stand beside them."""

import sys
from pathlib import Path

for folder in Path(__file__).parent.iterdir():
    if folder.is_dir():
        sys.path.append(str(folder))
