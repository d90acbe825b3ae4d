"""Sessions at one server: what is computed together, for whom, and what is on disk of it.

A session begins when the first client comes with it. Its name is a random number that the clients drew when they aligned
their rows, so shares of two different alignments never meet. One configuration is trained once: as soon as all clients
have sent everything, another session of the same configuration is refused, because its release would spend its
own ε.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from accel.validate import require
from protocols.deploy.config import FederationConfig
from protocols.deploy.facts import plan_for
from protocols.deploy.spool import Spool, publish, published, write_private
from protocols.plan import Plan
from protocols.upload import CHUNK_ROWS

__all__ = ["TRAINING", "Session", "SessionStore"]

TRAINING = "training"
_NAME = re.compile(r"[0-9a-f]{32}")
_HEAD = 1 << 12  # bytes of a message besides its values


class Session:
    """One thing to compute, its clients' messages and its results, in a directory of its own (mode 0700)."""

    def __init__(self, directory: Path, kind: str, name: str, rows: int, plan: Plan):
        self.directory, self.kind, self.name, self.rows, self.plan = directory, kind, name, rows, plan
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.chmod(0o700)
        facts = directory / "session.json"
        if not facts.exists():
            write_private(facts, json.dumps({"kind": kind, "name": name, "rows": rows}).encode())
        self.spools = {client: Spool(directory / "upload" / client) for client in plan.client_names}
        self.locks = {client: threading.Lock() for client in plan.client_names}
        self.progress: dict[str, Any] = {}

    @property
    def server_directory(self) -> Path:
        """Noise key and checkpoints."""
        return self.directory / "server"

    @property
    def complete(self) -> bool:
        """Whether every client has sent everything, and it is here."""
        return all(spool.complete for spool in self.spools.values())

    @property
    def begun(self) -> bool:
        """Whether anything may have been computed from what clients sent."""
        return self.complete or self.done

    @property
    def done(self) -> bool:
        """Whether this server has computed it."""
        return (self.directory / "done.json").exists()

    @property
    def taken(self) -> bool:
        """Whether every client has fetched what is for it."""
        return all((self.directory / "results" / f"{client}.taken").exists() for client in self.spools)

    @property
    def message_limit(self) -> int:
        """Bytes of the largest message that a client may send."""
        return 8 * min(self.rows, CHUNK_ROWS) * max(self.plan.classes, *self.plan.client_widths) + _HEAD

    def parameters(self) -> dict[str, Any]:
        """What the three servers compare: plan, session, and that they hold the same sharing of every client."""
        uploads = {client: spool.digest for client, spool in self.spools.items()}
        return {**self.plan.public_parameters(), "kind": self.kind, "session": self.name, "uploads": uploads}

    def finish(self, attempt: str, outbox: Mapping[str, list[tuple[str, bytes]]]) -> None:
        """Keep the results of a successful attempt."""
        for client, messages in outbox.items():
            publish(self.directory / "results", client, attempt, messages)
        write_private(self.directory / "done.json", json.dumps({"attempt": attempt}).encode())

    def result(self, client: str) -> tuple[dict[str, Any], bytes] | None:
        """What this server has for a client, or None as long as it is not computed."""
        return published(self.directory / "results", client) if self.done else None

    def note_taken(self, client: str) -> None:
        """The client has its result. Once all have theirs, the shares of their rows and the noise are of no use any more."""
        write_private(self.directory / "results" / f"{client}.taken", b"")
        if self.taken:
            shutil.rmtree(self.directory / "upload", ignore_errors=True)
            (self.server_directory / "noise.key").unlink(missing_ok=True)


class SessionStore:
    """All sessions of one configuration at one server. Changes are announced through ``changed``."""

    def __init__(self, config: FederationConfig, directory: Path):
        self._config = config
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.chmod(0o700)
        self.changed = threading.Condition()
        self._sessions: dict[str, Session] = {}
        for file in sorted(directory.glob("*/session.json")):
            facts = json.loads(file.read_text())
            self._sessions[facts["name"]] = self._make(**facts)

    def __iter__(self) -> Iterator[Session]:
        with self.changed:
            return iter(list(self._sessions.values()))

    def __getitem__(self, name: str) -> Session:
        return self._sessions[name]

    def get(self, name: Any) -> Session | None:
        return self._sessions.get(name) if isinstance(name, str) else None

    @property
    def training(self) -> Session | None:
        """The training of this configuration, if it has begun."""
        return next((session for session in self if session.kind == TRAINING), None)

    def open(self, kind: Any, name: Any, rows: Any) -> Session:
        """The session that a client names, begun if it is new; refused with a sentence if it may not begin."""
        require(kind == TRAINING, "kind", kind, f"{TRAINING!r}")
        require(isinstance(name, str) and bool(_NAME.fullmatch(name)), "session", name, "32 hexadecimal digits")
        good = isinstance(rows, int) and not isinstance(rows, bool) and 1 <= rows <= 10**9
        require(good, "rows", rows, "a whole number from 1 to 10^9")
        with self.changed:
            known = self._sessions.get(name)
            if known is not None:
                require(known.rows == rows, "rows", rows, f"{known.rows}, as the other client says")
                require(known.kind == kind, "kind", kind, f"{known.kind!r}, as the other client says")
                return known
            self._make_room(kind, name)
            session = self._make(kind, name, rows)
            self._sessions[name] = session
            return session

    def _make_room(self, kind: str, name: str) -> None:
        for other in list(self._sessions.values()):
            if other.kind != kind:
                continue
            require(
                not other.begun,
                "session",
                name[:8],
                f"{other.name[:8]}, with which this configuration was trained already",
                "to train again, change the name or the parameters in federation.toml: every release spends its own ε",
            )
            del self._sessions[other.name]  # no value was computed from it
            shutil.rmtree(other.directory, ignore_errors=True)

    def _make(self, kind: str, name: str, rows: int) -> Session:
        return Session(self._directory / f"{kind}-{name}", kind, name, rows, plan_for(self._config, rows))
