"""Who may use the operator endpoints: whoever has the server's token, on its own machine."""

from __future__ import annotations

import ipaddress
import secrets
from urllib.parse import urlsplit

from fastapi import HTTPException, Request

from vllm_semantic_sched.predict.shared import TOKEN_HEADER, admin_token


def from_this_machine(request: Request) -> None:
    """Reject requests from other machines, and those that a local proxy or web page relays."""
    relayed = {"forwarded", "x-forwarded-for", "x-real-ip", "origin"} & set(request.headers)
    if request.client is None:  # a Unix socket
        local = True
    else:
        try:
            local = ipaddress.ip_address(request.client.host).is_loopback
        except ValueError:
            local = not request.client.host
    if relayed or not local or not _names_this_machine(request.headers.get("host", "")):
        raise HTTPException(403, "these endpoints answer on the server's own machine only")
    token = admin_token((request.scope.get("server") or ("", 0))[1] or 0)
    given = request.headers.get(TOKEN_HEADER, "")
    if token is None or not secrets.compare_digest(token.encode(), given.encode()):
        raise HTTPException(
            403, f"{TOKEN_HEADER} is missing or wrong: run the command as the server's user"
        )


def _names_this_machine(host: str) -> bool:
    """Whether a Host header is an address or localhost: a web page that rebinds its own name to
    this machine cannot send that."""
    name = urlsplit(f"//{host}").hostname or ""
    if name in ("localhost", ""):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
