"""vLLM's authentication of HTTP requests, which stands inside the middleware that users name."""

from __future__ import annotations

import sys
from typing import Any

from starlette.datastructures import Headers

_DEEPEST = 32  # layers of middleware


class Unauthorized:
    """Tells requests that vLLM's own authentication would refuse.

    Args:
        app: the next layer of the server's middleware.
    """

    def __init__(self, app: Any) -> None:
        self._layer = None
        layer = app
        for _ in range(_DEEPEST):
            if hasattr(layer, "verify_token"):
                self._layer = layer
                break
            layer = getattr(layer, "app", None)
        module = sys.modules.get(type(self._layer).__module__)
        self._guarded: str = getattr(module, "GUARDED_PREFIX", "/v1")

    def __call__(self, scope: Any) -> bool:
        """Whether vLLM refuses a request, by its headers; never where the server has no key."""
        if self._layer is None or scope["type"] != "http" or scope["method"] == "OPTIONS":
            return False
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return path.startswith(self._guarded) and not self._layer.verify_token(Headers(scope=scope))
