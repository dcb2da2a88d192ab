"""The real servers of a module, as in tests/engine."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from importlib.util import module_from_spec, spec_from_file_location

_spec = spec_from_file_location("engine_servers", Path(__file__).parents[1] / "engine/conftest.py")
assert _spec is not None and _spec.loader is not None
_module = module_from_spec(_spec)
_spec.loader.exec_module(_module)
serve = _module.serve
