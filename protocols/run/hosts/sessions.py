"""Sessions at one server: what is computed together, for whom, and what is on disk of it.

A session begins when the first client comes with it. Its name is a random number that the clients drew when they aligned
their rows, so shares of two different alignments never meet. One configuration is trained once: as soon as all clients
have sent everything, another training of the same configuration is refused, because its release would spend its own ε.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from accel.errors import InvalidArgument
from accel.files import private_folder, write_bytes
from accel.validate import require, require_choice
from protocols.federation.read import FederationConfig
from protocols.methods.prediction import OUTPUTS
from protocols.net.live_channels import Guests
from protocols.net.spool import Spool, publish, published
from protocols.run.hosts.jobs import PREDICTION, TRAINING, MakeTask, Task, make_task
from protocols.run.hosts.pace import Pace
from protocols.run.hosts.planning import Planner
from refmpc import Ledger
from vfl.dp.certificate_cache import Say, announced

__all__ = ["Session", "SessionStore", "thinned"]

_NAME = re.compile(r"[0-9a-f]{32}")
_OPEN = 8  # predictions that may be under way
_POINTS = 500  # of a learning curve that clients are told


class Session:
    """One task, its clients' messages and its results, in a directory of its own (mode 0700)."""

    def __init__(self, directory: Path, facts: Mapping[str, Any], task: Task):
        self.directory, self.facts, self.task = directory, dict(facts), task
        self.name, self.kind = str(facts["name"]), str(facts["kind"])
        private_folder(directory)
        directory.chmod(0o700)
        if not (directory / "session.json").exists():
            write_bytes(directory / "session.json", json.dumps(self.facts).encode(), private=True)
        clients = task.plan.client_names
        self.guests = Guests(clients)
        self.spools = {} if task.live else {client: Spool(directory / "upload" / client) for client in clients}
        self.locks = {client: threading.Lock() for client in clients}
        self.progress: dict[str, Any] = {}
        self.curve: list[Any] = []  # (epoch, accuracy, loss) on public rows, while it is computed
        self.pace = Pace()
        self.ledger: Ledger | None = None  # of the latest attempt
        self.computing = False  # whether an attempt is under way here
        self.failed = ""  # why the servers cannot compute it together, if they cannot

    @property
    def missing(self) -> list[str]:
        """Clients that have not sent everything, or, if they must stay, are not here."""
        if self.task.live:
            return self.guests.missing
        return [client for client, spool in self.spools.items() if not spool.complete]

    @property
    def complete(self) -> bool:
        """Whether every client has sent everything, and it is here; or every client is here itself."""
        return not self.missing

    @property
    def done(self) -> bool:
        """Whether this server has computed it."""
        return (self.directory / "done.json").exists()

    @property
    def begun(self) -> bool:
        """Whether anything may have been computed from what clients sent."""
        if self.task.live:
            return self.done or self.computing or (self.directory / "server" / "noise.key").exists()
        return self.done or (self.complete and not self.failed)

    @property
    def has_opened(self) -> bool:
        """Whether steps of this training may have been opened: then what it spent is spent."""
        kept = ("opened-*.log", "release-*.npz", "checkpoint-*.npz")
        return any(any((self.directory / "server").glob(pattern)) for pattern in kept)

    @property
    def taken(self) -> bool:
        """Whether everybody who gets a result has fetched it."""
        return all((self.directory / "results" / f"{client}.taken").exists() for client in self.task.receivers)

    def note_people(self, client: str, tag: Any) -> None:
        """A client's keyed tag of its people, for the record of what was spent on whom: one a session, and before its upload is
        complete, because the servers compare it then."""
        if not (isinstance(tag, str) and re.fullmatch(r"[0-9a-f]{64}", tag)):
            return
        known = self.people.get(client)
        require(
            known in (None, tag), "people", f"{tag[:8]}…", f"{known}, whom {client} has named in this session before"
        )
        if known is None and not (client in self.spools and self.spools[client].complete):
            write_bytes(self.directory / f"people-{client}.tag", tag.encode(), private=True)

    @property
    def people(self) -> dict[str, str]:
        """The tags of all clients that sent one."""
        files = {client: self.directory / f"people-{client}.tag" for client in self.task.plan.client_names}
        return {client: file.read_text() for client, file in files.items() if file.exists()}

    def parameters(self) -> dict[str, Any]:
        """What the three servers compare: plan, session, and that they hold the same sharing of every client."""
        uploads = {client: spool.digest for client, spool in self.spools.items()}
        return {**self.task.plan.public_parameters(), "session": self.facts, "uploads": uploads}

    def finish(self, attempt: str, outbox: Mapping[str, list[tuple[str, bytes]]]) -> None:
        """Keep the results of a successful attempt."""
        for client, messages in outbox.items():
            publish(self.directory / "results", client, attempt, messages)
        facts = {"attempt": attempt} | ({"curve": thinned(self.curve)} if self.curve else {})
        write_bytes(self.directory / "done.json", json.dumps(facts).encode(), private=True)

    def result(self, client: str) -> tuple[dict[str, Any], bytes] | None:
        """What this server has for a client, or None as long as it is not computed."""
        found = published(self.directory / "results", client) if self.done else None
        if found is None:
            return None
        curve = json.loads((self.directory / "done.json").read_text()).get("curve")
        return (found[0] | {"curve": curve}, found[1]) if curve else found

    @property
    def shown_curve(self) -> list[Any]:
        """The learning curve on public rows, if there are any: of the attempt that computes, or that ended well."""
        if self.curve or not self.done:
            return self.curve
        return list(json.loads((self.directory / "done.json").read_text()).get("curve", []))

    def note_taken(self, client: str) -> None:
        """The client has its result. Once all have theirs, shares of rows and noise are of no use any more."""
        write_bytes(self.directory / "results" / f"{client}.taken", b"", private=True)
        if self.taken:
            shutil.rmtree(self.directory / "upload", ignore_errors=True)
            (self.directory / "server" / "noise.key").unlink(missing_ok=True)
            for pattern in ("release-*.npz", "opened-*", "shuffled-*.npz"):
                for words in (self.directory / "server").glob(pattern):
                    words.unlink(missing_ok=True)  # two clients may come for theirs in the same moment


def thinned(curve: list[Any]) -> list[list[float]]:
    """At most so many points as fit into a message, the first and the last among them; six digits are enough to draw."""
    kept = (
        {round(i * (len(curve) - 1) / max(1, _POINTS - 1)) for i in range(_POINTS)}
        if len(curve) > _POINTS
        else range(len(curve))
    )
    return [[int(epoch), round(right, 6), round(loss, 6)] for epoch, right, loss in (curve[i] for i in sorted(kept))]


class SessionStore:
    """All sessions of one configuration at one server. Changes are announced through ``changed``."""

    def __init__(
        self,
        config: FederationConfig,
        directory: Path,
        *,
        predictions: bool,
        say: Say = lambda event, **facts: None,
        make: MakeTask = make_task,
    ):
        self._planner = Planner(config, say, make)
        self._directory = directory
        self._predictions = predictions
        private_folder(directory)
        directory.chmod(0o700)
        self.changed = threading.Condition()
        self._sessions: dict[str, Session] = {}
        found = [json.loads(file.read_text()) for file in directory.glob("*/session.json")]
        with announced(say):
            for facts in sorted(found, key=lambda facts: facts["kind"] != TRAINING):
                if facts["kind"] == TRAINING or predictions:
                    task = make(config, facts, self._trained())
                    self._sessions[facts["name"]] = Session(self._directory_of(facts), facts, task)

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

    def open(self, hello: Mapping[str, Any], client: str) -> Session:
        """The session that ``client`` names, begun if it is new; refused with a sentence if it may not begin; ``StillPlanning`` if
        its plan is not there yet."""
        facts = self._checked(hello)
        with self.changed:
            if facts["name"] in self._sessions:
                return self._known(facts)
            self._require_room(facts)
        # a plan takes as long as a caller's numbers want it to: nobody waits for it but other callers with new sessions
        task = self._planner.task(facts, self._trained_now, client)
        with self.changed:
            if facts["name"] in self._sessions:
                return self._known(facts)
            self._make_room(facts)
            session = self._sessions[facts["name"]] = Session(self._directory_of(facts), facts, task)
            return session

    def _known(self, facts: Mapping[str, Any]) -> Session:
        known = self._sessions[facts["name"]]
        for field, value in facts.items():
            require(known.facts[field] == value, field, value, f"{known.facts[field]!r}, as another client says")
        return known

    def _checked(self, hello: Mapping[str, Any]) -> dict[str, Any]:
        kind, name, rows, output = (hello.get(field) for field in ("kind", "session", "rows", "output"))
        require_choice("kind", kind, (TRAINING, PREDICTION))
        require(isinstance(name, str) and bool(_NAME.fullmatch(name)), "session", name, "32 hexadecimal digits")
        good = isinstance(rows, int) and not isinstance(rows, bool) and 1 <= rows <= 10**9
        require(good, "rows", rows, "a whole number from 1 to 10^9")
        if kind == PREDICTION:
            require_choice("output", output, OUTPUTS)
            way_out = "start it without --until-trained"
            require(self._predictions, "kind", kind, f"{TRAINING!r}: this server makes no predictions", way_out)
        else:
            require(output is None, "output", output, "none in training")
        return {"kind": kind, "name": name, "rows": rows, "output": output}

    def _make_room(self, facts: Mapping[str, Any]) -> None:
        others = [session for session in self._sessions.values() if session.kind == facts["kind"]]
        if facts["kind"] == PREDICTION:
            for other in [session for session in others if session.done and session.taken]:
                self._remove(other)
            waiting = [session for session in others if session.name in self._sessions and not session.done]
            if len(waiting) >= _OPEN:
                self._remove(waiting[0])  # the oldest: clients that are still there begin it again
            return
        self._require_room(facts)
        for other in others:
            self._remove(other)  # nothing was computed from it

    def _require_room(self, facts: Mapping[str, Any]) -> None:
        """Refuse a second training of this configuration, before anything is planned for it."""
        for other in self._sessions.values():
            if other.kind == facts["kind"] == TRAINING and other.begun:  # every release spends its own ε
                raise InvalidArgument(
                    f"This configuration was already trained (run {other.name[:8]}). "
                    "Change its name or a parameter in federation.toml to train again"
                )

    def _remove(self, session: Session) -> None:
        del self._sessions[session.name]
        session.failed = "another alignment has taken the place of this one: start this client with --align-again"
        shutil.rmtree(session.directory, ignore_errors=True)

    def _trained(self) -> Path | None:
        """Where the training lies, if it is done."""
        return next((s.directory for s in self._sessions.values() if s.kind == TRAINING and s.done), None)

    def _trained_now(self) -> Path | None:
        with self.changed:
            return self._trained()

    @property
    def planning(self) -> str:
        """What is being planned, in words, or nothing."""
        return self._planner.words

    def _directory_of(self, facts: Mapping[str, Any]) -> Path:
        return self._directory / f"{facts['kind']}-{facts['name']}"
