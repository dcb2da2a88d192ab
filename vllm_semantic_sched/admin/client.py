"""A running server as its operator sees it."""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.request
from typing import Any

_PREFIX = "/v1/semsched"
_NEEDED = {
    _PREFIX: "--middleware vllm_semantic_sched.Middleware",
    "/v1": "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora",
}


class AdminError(RuntimeError):
    """The server could not be reached or did not do what it was asked; the message says why."""


class AdminClient:
    """Calls the endpoints of `engine/admin.py`.

    Args:
        url: base address of the server.
        api_key: the server's key, if it was started with one.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._api_key = api_key

    def status(self) -> list[dict[str, Any]]:
        """One entry per engine: running, waiting, paused, policy."""
        engines: list[dict[str, Any]] = self.call("GET", "/status")["engines"]
        return engines

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """POST to an endpoint under /v1/semsched; returns when it is done, however long that
        takes."""
        return self.call("POST", path, body)

    def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, prefix: str = _PREFIX
    ) -> dict[str, Any]:
        """One call.

        Raises:
            AdminError: with the server's own words, or what is missing.
        """
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + prefix + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request) as reply:
                text = reply.read().decode()
        except urllib.error.HTTPError as error:
            raise AdminError(_why(error, prefix, path)) from error
        except (urllib.error.URLError, OSError) as error:
            raise AdminError(f"{self._url}: {error}") from error
        try:
            answer = json.loads(text)
        except ValueError:  # vLLM's adapter endpoints answer with a sentence
            return {"message": text}
        return answer if isinstance(answer, dict) else {"message": answer}


def add_server_arguments(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Declare how a command finds a server."""
    parser.add_argument(
        "--server", metavar="URL", required=required, help="for example http://127.0.0.1:8000"
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("VLLM_API_KEY"),
        help="the server's own key, if it has one (default: $VLLM_API_KEY)",
    )


def _why(error: urllib.error.HTTPError, prefix: str, path: str) -> str:
    if error.code == 401:
        return "the server asks for its API key: --api-key or $VLLM_API_KEY"
    text = error.read().decode(errors="replace")
    try:
        told = json.loads(text)["error"]
        message = str(told["message"] if isinstance(told, dict) else told)
    except (ValueError, KeyError):
        message = f"status {error.code}: {text[:300]}"
    if error.code == 404 and "not found" in message.lower():
        return f"the server has no {prefix}{path}; start it with {_NEEDED[prefix]}"
    return message
