"""Sessions at one server: what is computed together, for whom, and what is on disk of it.

A session begins when the first client comes with it. Its name is a random number that the clients drew when they
aligned their rows, so shares of two different alignments never meet. One configuration is trained once: as soon as all
clients have sent everything, another training of the same configuration is refused, because its release would spend its
own ε.

A client that comes with another session leaves its earlier one, with what it has shared there and with nothing else. A
session is removed when every client has left it; one of which anything may have been opened is never removed
(``begun``).
"""

from __future__ import annotations

import hashlib
import math
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from accel.errors import InvalidArgument
from accel.files import Damaged, private_folder, read_bytes, read_json, write_bytes, write_json
from accel.validate import require, require_choice
from protocols.federation.read import FederationConfig
from protocols.methods.prediction import OUTPUTS
from protocols.net.live_channels import Guests
from protocols.net.spool import Spool, publish, published
from protocols.net.wire import PREDICTION, TRAINING
from protocols.run.hosts.jobs import MakeTask, Task, TrainingTask, make_task, shares_of_model
from protocols.run.hosts.pace import Pace
from protocols.run.hosts.planning import Planner
from protocols.state.model_file import MODEL
from protocols.state.run_identity import BEGUN
from refmpc import Ledger
from vfl.dp.certificate_cache import Say, announced

__all__ = ["Session", "SessionStore", "forget_session", "require_kept", "thinned"]

_NAME, _TAG = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{64}")
_OPEN = 8  # predictions of a client that may be under way
_POINTS = 500  # of a learning curve that clients are told
_FAILED, _DONE = "failed.json", "done.json"
_FOR_PEOPLE = ("claim.txt", "ledger.json", MODEL)  # as they are, so what they should be stands in ``_DONE``
_PRIVATE = ("noise.key", "opened-*", "release-*", "checkpoint-*", "shuffled-*", "joint-*", "rows-*", "commitment-*")


class Session:
    """One task, its clients' messages and its results, in a directory of its own (mode 0700)."""

    def __init__(self, directory: Path, facts: Mapping[str, Any], task: Task):
        self.directory, self.facts, self.task = directory, dict(facts), task
        self.name, self.kind = str(facts["name"]), str(facts["kind"])
        private_folder(directory)
        directory.chmod(0o700)
        if not (directory / "session.json").exists():
            write_json(directory / "session.json", self.facts)
        clients = task.plan.client_names
        self.guests = Guests(clients)
        self.spools = {} if task.live else {client: Spool(directory / "upload" / client) for client in clients}
        self.locks = {client: threading.Lock() for client in clients}
        self.progress: dict[str, Any] = {}
        self.curve: list[Any] = []  # (epoch, accuracy, loss) on public rows, while it is computed
        self.pace = Pace()
        self.ledger: Ledger | None = None  # of the latest attempt
        self.computing = False  # whether an attempt is under way here
        self.joined = set[str]()  # clients that have come with this session since the server was started
        self.failed = ""  # why the servers cannot compute it together, if they cannot
        self._opened_nothing: bool | None = None  # of a session that cannot go on
        if (directory / _FAILED).exists():
            found = read_json(directory / _FAILED)
            self._opened_nothing = bool(found["opened nothing"])
            self.failed = "" if found["try again"] else str(found["reason"])

    def fail(self, reason: str, *, opened_nothing: bool = False, try_again: bool = False) -> None:
        """The servers cannot compute it together, also after a restart: unless that is to ``try_again``, because an
        operator may have brought back what was missing. If it ``opened_nothing`` clients may begin another session."""
        self.failed, self._opened_nothing = reason, opened_nothing
        facts = {"reason": reason, "opened nothing": opened_nothing, "try again": try_again}
        write_json(self.directory / _FAILED, facts)

    @property
    def members(self) -> set[str]:
        """Clients that have come with this session, or have shared something in it."""
        return self.joined | {client for client, spool in self.spools.items() if spool.count or spool.complete}

    def leave(self, client: str) -> None:
        """The client shares its rows in another session: what it has shared in this one is of no use any more."""
        self.joined.discard(client)
        (self.directory / f"people-{client}.tag").unlink(missing_ok=True)
        if client in self.spools:
            self.spools[client].discard()

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
        return (self.directory / _DONE).exists()

    @property
    def begun(self) -> bool:
        """Whether anything may have been computed from what clients sent: then nobody can remove it."""
        if self.done or self.computing or self.has_opened:
            return True
        if self._opened_nothing is not None:
            return not self._opened_nothing
        if self.task.live:
            return (self.directory / "server" / "noise.key").exists()
        return self.complete and not self.failed

    @property
    def has_opened(self) -> bool:
        """Whether steps of this training may have been opened: then what it spent is spent."""
        kept = ("opened-*", "release-*", "released", "checkpoint-*")
        return any(any((self.directory / "server").glob(pattern)) for pattern in kept)

    @property
    def taken(self) -> bool:
        """Whether everybody who gets a result has fetched it."""
        return all((self.directory / "results" / f"{client}.taken").exists() for client in self.task.receivers)

    def note_people(self, client: str, tag: Any) -> None:
        """A client's keyed tag of its people, for the record of what was spent on whom: one a session, and before its
        upload is complete, because the servers compare it then."""
        if not isinstance(self.task, TrainingTask):
            return
        tagged = isinstance(tag, str) and _TAG.fullmatch(tag)
        require(bool(tagged), "people", tag, "the keyed tag of this client's list of ids", "install the same version")
        known = self.people.get(client)
        require(
            known in (None, tag), "people", f"{tag[:8]}…", f"{known}, whom {client} has named in this session before"
        )
        if known is None and not (client in self.spools and self.spools[client].complete):
            write_bytes(self.directory / f"people-{client}.tag", tag.encode(), private=True, sealed=True)

    @property
    def people(self) -> dict[str, str]:
        """The tags of all clients that sent one."""
        files = {client: self.directory / f"people-{client}.tag" for client in self.task.plan.client_names}
        return {client: _read_tag(file) for client, file in files.items() if file.exists()}

    def parameters(self) -> dict[str, Any]:
        """What the three servers compare: plan, session, and that they hold the same sharing of every client."""
        uploads = {client: spool.digest for client, spool in self.spools.items()}
        return {**self.task.plan.public_parameters(), "session": self.facts, "uploads": uploads}

    def finish(self, attempt: str, outbox: Mapping[str, list[tuple[str, bytes]]]) -> None:
        """Keep the results of a successful attempt."""
        for client, messages in outbox.items():
            publish(self.directory / "results", client, attempt, messages)
        files = {name: _digest(self.directory / name) for name in _FOR_PEOPLE if (self.directory / name).exists()}
        facts = {"attempt": attempt, "files": files} | ({"curve": thinned(self.curve)} if self.curve else {})
        write_json(self.directory / _DONE, facts)
        (self.directory / _FAILED).unlink(missing_ok=True)
        self._opened_nothing = None

    def result(self, client: str) -> tuple[dict[str, Any], bytes] | None:
        """What this server has for a client, or None as long as it is not computed."""
        found = published(self.directory / "results", client) if self.done else None
        if found is None:
            return None
        curve = read_json(self.directory / _DONE).get("curve")
        return (found[0] | {"curve": curve}, found[1]) if curve else found

    @property
    def shown_curve(self) -> list[Any]:
        """The learning curve on public rows, if there are any: of the attempt that computes, or that ended well."""
        if self.curve or not self.done:
            return self.curve
        return list(read_json(self.directory / _DONE).get("curve", []))

    def note_taken(self, client: str) -> None:
        """The client has its result. Once all have theirs, shares of rows and noise are of no use any more."""
        write_bytes(self.directory / "results" / f"{client}.taken", b"", private=True)
        if self.taken:
            self.settle()

    def settle(self) -> None:
        """All three servers have computed it, or nobody will: remove shares of rows, noise and words; results stay, and
        so do a server's shares of a model that none of them knows."""
        _remove_private(self.directory, shares_of_model(self.directory))


def _remove_private(directory: Path, but: Path | None = None) -> None:
    shutil.rmtree(directory / "upload", ignore_errors=True)
    for pattern in _PRIVATE:
        for file in (directory / "server").glob(pattern):
            if file != but:
                file.unlink(missing_ok=True)  # two clients may come for theirs in the same moment


def _holds_private(directory: Path) -> bool:
    """Whether there is anything to forget."""
    private = [file for pattern in _PRIVATE for file in (directory / "server").glob(pattern)]
    kept = [name for name in ("upload", "results") if (directory / name).exists()]
    return bool(private or kept) or not ((directory / _DONE).exists() or (directory / _FAILED).exists())


def forget_session(directory: Path, why: str) -> bool:
    """Remove what a server keeps of a session. Returns whether a record of it stays, because something may have been
    opened."""
    if directory.name.startswith(TRAINING) and (
        (directory / _DONE).exists() or (directory / "server" / BEGUN).exists()
    ):
        write_json(directory / _FAILED, {"reason": why, "opened nothing": False, "try again": False})
        _remove_private(directory)
        shutil.rmtree(directory / "results", ignore_errors=True)
        return True
    shutil.rmtree(directory)
    return False


def thinned(curve: list[Any]) -> list[list[float]]:
    """At most so many points as fit into a message, the first and the last among them; six digits are enough to
    draw."""
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
        found = [_read_facts(file) for file in directory.glob("*/session.json")]
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
        """The training of this configuration: the one that has begun, else that with the most clients, the newest of
        these."""
        trainings = [session for session in self if session.kind == TRAINING]
        begun = [session for session in trainings if session.begun]
        return max(begun or trainings[::-1], key=lambda session: len(session.members), default=None)

    def open(self, hello: Mapping[str, Any], client: str) -> Session:
        """The session that ``client`` names, made if it is new; refused with a sentence if it may not begin;
        ``StillPlanning`` if its plan is not there yet."""
        session = self._found(hello, client)
        with self.changed:
            self._join(session, client)
        return session

    def _found(self, hello: Mapping[str, Any], client: str) -> Session:
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
            self._require_room(facts)
            session = self._sessions[facts["name"]] = Session(self._directory_of(facts), facts, task)
            return session

    def _known(self, facts: Mapping[str, Any]) -> Session:
        self._require_room(facts)
        known = self._sessions[facts["name"]]
        for field, value in facts.items():
            require(known.facts[field] == value, field, value, f"{known.facts[field]!r}, as another client says")
        if known.failed and known.begun:
            raise InvalidArgument(known.failed)
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

    def _join(self, session: Session, client: str) -> None:
        """Let the client leave what it had begun before: a training, or its oldest prediction if there are many."""
        others = [other for other in self._sessions.values() if other.kind == session.kind and other is not session]
        if session.kind == PREDICTION:
            for other in [other for other in others if other.done and other.taken]:
                self._remove(other, "everybody has its result")
        session.joined.add(client)
        begun_by_it = [other for other in others if client in other.members and not other.begun]
        for other in begun_by_it if session.kind == TRAINING else begun_by_it[: 1 - _OPEN]:
            other.leave(client)
            if not other.members:
                self._remove(other, "every client has left this session for another one")

    def _require_room(self, facts: Mapping[str, Any]) -> None:
        """Refuse a second training of this configuration, before anything is planned for it."""
        for other in self._sessions.values():
            if other.name == facts["name"] or not other.kind == facts["kind"] == TRAINING:
                continue
            if other.begun:  # every release spends its own ε
                raise InvalidArgument(
                    f"This configuration was already trained (run {other.name[:8]}). "
                    "Change its name or a parameter in federation.toml to train again"
                )

    def _remove(self, session: Session, why: str) -> None:
        del self._sessions[session.name]
        session.failed = why
        shutil.rmtree(session.directory, ignore_errors=True)

    def forget_older(self, days: float) -> list[str]:
        """Forget sessions to which nothing has happened for so many days; returns their names."""
        forgotten = []
        for session in self:
            newest = max(
                (file.stat().st_mtime for file in session.directory.rglob("*") if file.is_file()), default=math.inf
            )
            if session.computing or time.time() - newest < days * 86400 or not _holds_private(session.directory):
                continue
            why = f"nothing has happened to this session for {days:g} days ([run] retention_days): it was forgotten"
            with self.changed:
                if forget_session(session.directory, why):
                    session.fail(why)
                else:
                    self._remove(session, why)
            forgotten.append(session.name)
        return forgotten

    def _trained(self) -> Path | None:
        """Where the training lies, if it is done."""
        found = next((s.directory for s in self._sessions.values() if s.kind == TRAINING and s.done), None)
        if found is not None:
            for name in _FOR_PEOPLE:
                require_kept(found, name)
        return found

    def _trained_now(self) -> Path | None:
        with self.changed:
            return self._trained()

    @property
    def planning(self) -> str:
        """What is being planned, in words, or nothing."""
        return self._planner.words

    def _directory_of(self, facts: Mapping[str, Any]) -> Path:
        return self._directory / f"{facts['kind']}-{facts['name']}"


def require_kept(directory: Path, name: str) -> Path:
    """A file for people in the directory of a session; ``Damaged`` if it is not what this server wrote."""
    file, done = directory / name, directory / _DONE
    written = read_json(done).get("files", {}).get(name) if done.exists() else None
    if written is not None and (not file.exists() or _digest(file) != written):
        raise Damaged(file, f"it is not the file that {_DONE} names", "bring it back from a backup")
    return file


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _read_tag(file: Path) -> str:
    tag = read_bytes(file).decode(errors="replace")
    if not _TAG.fullmatch(tag):
        raise Damaged(file, "it is no tag")
    return tag


def _read_facts(file: Path) -> dict[str, Any]:
    facts = read_json(file)
    if not (isinstance(facts, dict) and {"kind", "name", "rows", "output"} <= facts.keys()):
        raise Damaged(file, "it does not name a session")
    return facts
