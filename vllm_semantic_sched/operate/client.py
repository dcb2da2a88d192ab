"""Talks to a running server: over HTTP, or by SIGHUP to its engine processes."""

import contextlib
import json
import os
import signal
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

import psutil

from vllm_semantic_sched.policy.config.private_files import TOKEN_HEADER, admin_token

_PREFIX = "/v1/semsched"
_REQUIRED_OPTIONS = {
    _PREFIX: "--middleware vllm_semantic_sched.Middleware",
    "/v1": "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora",
}


class AdminError(RuntimeError):
    """The server is unreachable or refuses an action. The message says why; `status` is the HTTP
    status, None if the server did not answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class AdminClient:
    """Calls the endpoints of `engine/http/admin.py`; `api_key` if the server has one."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._api_key = api_key

    def status(self, timeout: float | None = None) -> list[dict[str, Any]]:
        """Running and waiting requests, paused state and policy of each engine; `timeout` in
        seconds, None for no limit."""
        engines = self.call("/status", timeout=timeout).get("engines")
        if not isinstance(engines, list):
            raise AdminError(f"{self.url} is not a vLLM server with this package")
        return engines

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """POST to an endpoint under /v1/semsched and wait, without timeout, for the answer."""
        return self.call(path, body)

    def call(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        prefix: str = _PREFIX,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """The JSON object that the server answers, see `send`."""
        text = self.send(path, body, prefix, timeout)
        try:
            answer = json.loads(text)
        except ValueError:  # vLLM's adapter endpoints answer in plain text
            answer = text
        return answer if isinstance(answer, dict) else {"message": answer}

    def send(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        prefix: str = "",
        timeout: float | None = None,
    ) -> str:
        """Send a POST if there is a body, else a GET, and return the text of the answer. AdminError
        unless it comes within `timeout` seconds, with status 200; it has the server's message, or
        the server option that is missing."""
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            if prefix == _PREFIX:
                address = urllib.parse.urlsplit(self.url)
                token = admin_token(address.port or (443 if address.scheme == "https" else 80))
                if token is not None:
                    headers[TOKEN_HEADER] = token
            request = urllib.request.Request(self.url + prefix + path, data, headers)
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                return str(reply.read().decode())
        except urllib.error.HTTPError as error:
            raise AdminError(_message(error, prefix, path), error.code) from error
        except urllib.error.URLError as error:
            raise AdminError(f"{self.url}: {error.reason}") from error
        # ValueError: the address or the text; the others: the connection broke.
        except (OSError, HTTPException, ValueError) as error:
            raise AdminError(f"{self.url}: {error}") from error


def abandon_pause(server: AdminClient) -> None:
    """Resume a server whose pause may still wait for running requests. AdminError if it refuses."""
    server.post("/pause", mode="keep")  # vLLM resumes only from a pause that is complete
    server.post("/resume")


def _message(error: urllib.error.HTTPError, prefix: str, path: str) -> str:
    if error.code == 401:
        return "the server needs its API key: --api-key or $VLLM_API_KEY"
    text = error.read().decode(errors="replace")
    try:
        content = json.loads(text)["error"]
        if isinstance(content, dict):
            content = content["message"]
        message = str(content)
    except (ValueError, KeyError):
        message = f"status {error.code}: {text[:300]}"
    if error.code == 404 and "not found" in message.lower() and prefix in _REQUIRED_OPTIONS:
        return f"the server has no {prefix}{path}; start it with {_REQUIRED_OPTIONS[prefix]}"
    return message


def send_hangup(pid: int) -> list[int]:
    """Send SIGHUP to all engine processes of a server (`pid`: its own, or an engine's), which makes
    them reload their policy, and return them. AdminError if there is none, or SIGHUP would kill
    one; none gets a signal then."""
    engines = []
    with contextlib.suppress(psutil.Error, ValueError):
        server = psutil.Process(pid)
        processes = (server, *server.children(recursive=True))
        engines = [process.pid for process in processes if _is_engine(process)]
    if not engines:
        raise AdminError(f"process {pid} is neither a vLLM server nor an engine")
    for engine in engines:
        if not _catches_hangup(engine):
            raise AdminError(
                f"SIGHUP would kill engine process {engine}: it was started from a terminal, or "
                "runs another scheduler. Use --server, or start the server with nohup or as a "
                "service."
            )
    for engine in engines:
        os.kill(engine, signal.SIGHUP)
    return engines


def _is_engine(process: psutil.Process) -> bool:
    try:
        return any("EngineCore" in word for word in process.cmdline())
    except psutil.Error:
        return False


def _catches_hangup(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGHUP - 1) & 1)
