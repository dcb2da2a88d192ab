"""Checks that an event log is whole: every line unchanged, none removed, none moved."""

import contextlib
import json
from collections import deque
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vllm_semantic_sched.operate.event_log import key_of, log_parts
from vllm_semantic_sched.policy.record.event_format import Chain

Kind = Literal["problem", "gap", "note"]

_RECENT = 10_000  # hashes among which that of a restart is looked for
_RESTARTS = ("started", "resumed")
_NOT_KEYED = "not keyed: whoever can write the log could have hashed it anew"


class Finding(NamedTuple):
    """Something about a log. A `problem`: it was changed; a `gap`: the server lost lines or was not
    there."""

    kind: Kind
    where: str  # file and line
    text: str


class Audit:
    """Checks a log and its rotated parts. OSError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.lines = 0
        self.findings: list[Finding] = []
        self._path = path
        self._key = key_of(path)
        self._head = ""
        with contextlib.suppress(FileNotFoundError):  # before the log, which may grow
            self._head = Path(f"{path}.head").read_text().strip()
        self._awaits_head = bool(self._head)
        self.chain = Chain()  # with the last hash; note it elsewhere to find a log that was cut
        self._recent: deque[str] = deque(maxlen=_RECENT)
        self._begun = self._closed = self._blind = False
        self._torn = ""  # where a line ended early
        self._unchained = 0
        self._read_all()

    @property
    def whole(self) -> bool:
        """Whether nothing was changed, as far as the chain can tell."""
        return not any(finding.kind == "problem" for finding in self.findings)

    def _read_all(self) -> None:
        where = str(self._path)
        for part in log_parts(self._path):
            with part.open(encoding="utf-8", errors="replace", newline="\n") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        where = f"{part.name}:{number}"
                        self._read(where, line.removesuffix("\n"))
        if not self._begun:
            self._find("problem", where, "no line has a hash")
        if self._torn:
            self._find("gap", self._torn, "the last line is not complete")
        if self._awaits_head:
            self._find("problem", where, "lines are missing at the end")
        elif not self._head:
            self._find("note", where, "without PATH.head, lines missing at the end are not found")
        if not self._closed:
            self._find("note", where, "no closing line: the server runs or was killed")
        if self._begun and not self.chain.key:
            kind: Kind = "problem" if self._key else "note"
            self._find(kind, where, _NOT_KEYED)

    def _read(self, where: str, text: str) -> None:
        self.lines += 1
        try:
            event = json.loads(text)
            digest = str(event["chain"])
        except (ValueError, KeyError, TypeError):
            if self._begun:
                self._torn = self._torn or where
            else:
                self._unchained += 1
            return
        about = event.get("log")
        if about is not None:
            self.chain.key = self._key if event.get("keyed") else b""
        if not self._begun:
            self._begin(where, event)
        if self._torn and about not in _RESTARTS:
            self._find("problem", self._torn, "not a line of this log")
        elif self._torn:
            self._find("gap", self._torn, "the server could not complete this line")
        self._torn = ""
        if not self.chain.follow(text) and not self._blind:
            self._find("problem", where, "changed, moved, or a line before it is missing")
        if about is not None:
            self._read_about(where, about, event)
        self._closed = about == "closed"
        self._recent.append(digest)
        self._awaits_head = self._awaits_head and digest != self._head

    def _begin(self, where: str, event: dict[str, Any]) -> None:
        self._begun = True
        about = event.get("log")
        previous = str(event.get("previous", ""))
        if about == "continued":
            self.chain.last = previous
            self._find("note", where, "older lines have expired or were removed")
        elif about != "started" or previous:
            self._find("problem", where, "the first line of the file is missing")
        if self._unchained:
            kind: Kind = "note" if event.get("unchained") else "problem"
            self._find(kind, where, f"{self._unchained} lines before have no hash")
        self._blind = bool(event.get("keyed")) and not self._key
        if self._blind:
            self._find("problem", where, "the key is missing: nothing is checked")

    def _read_about(self, where: str, about: str, event: dict[str, Any]) -> None:
        if event.get("lost"):
            self._find("gap", where, f"the server lost {event['lost']} lines")
        head = event.get("head")
        if about not in _RESTARTS or not self._recent:
            return
        if head and head not in self._recent:
            self._find("problem", where, "lines before this restart are missing")
        if about == "started" and not self._closed:
            self._find("gap", where, "the server ended without closing the log, and started again")

    def _find(self, kind: Kind, where: str, text: str) -> None:
        self.findings.append(Finding(kind, where, text))
