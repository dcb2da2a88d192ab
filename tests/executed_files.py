"""Which files of the package run."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import vllm_semantic_sched

PACKAGE = Path(vllm_semantic_sched.__file__).parent


class ExecutedFiles:
    """The files of this package whose functions are called while `recording`, on the thread that
    records and on those that are started after `watch_new_threads`."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._names: dict[str, str | None] = {}  # by path; None: of another package
        self._active = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Add the files of what is called inside."""
        sys.setprofile(self)
        self._active = True
        try:
            yield
        finally:
            self._active = False
            sys.setprofile(None)

    @contextmanager
    def watch_new_threads(self) -> Iterator[None]:
        """Record also on threads that start inside."""
        threading.setprofile(self)
        try:
            yield
        finally:
            threading.setprofile(None)

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or not self._active:
            return
        path = frame.f_code.co_filename
        if path not in self._names:
            inside = Path(path).is_relative_to(PACKAGE)
            self._names[path] = Path(path).relative_to(PACKAGE).as_posix() if inside else None
        name = self._names[path]
        if name is not None:
            self.names.add(name)
