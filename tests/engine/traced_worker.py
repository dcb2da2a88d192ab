"""The predictor process, which notes the files that run for each line that it gets."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from executed_files import ExecutedFiles

from vllm_semantic_sched.predict import worker


class TracedInput:
    """Lines of the standard input; the files that run until the next one is asked for."""

    def __init__(self, notes: Path) -> None:
        self._notes = notes

    def __iter__(self) -> Iterator[str]:
        for line in sys.__stdin__:
            files = ExecutedFiles()
            with files.recording():
                yield line
            self._notes.write_text(json.dumps(sorted(files.names)))


if __name__ == "__main__":
    notes = Path(sys.argv.pop(1))
    sys.stdin = TracedInput(notes)
    sys.exit(worker.main())
