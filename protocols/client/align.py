"""Clients find their common rows: a private set intersection over mutual TLS between clients, without any server.

The label client leads and listens at its ``alignment`` address; the others call it. Afterwards the leader draws the
name of the session, which ties the uploads of all clients to this one alignment. An attempt that breaks leaves nothing
behind: the next one has other keys. How often a client has aligned anew is kept in its state and bounded, because each
time with another list tells the others' clients more.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from accel.errors import InvalidArgument
from accel.files import Damaged, private_folder, read_arrays, read_json, write_arrays, write_json
from accel.validate import require
from protocols.log import Log
from protocols.net.answerer import Answerer
from protocols.net.backoff import Backoff
from protocols.net.listener import Door, Handler
from protocols.net.waiting import Waiting
from protocols.net.wire import ALIGNED, LEADS, Channel, Identity, Refused, call
from refmpc.core.errors import PeerLost, PeerTimeout, RefmpcError
from refmpc.net.framing import name_of, printable
from refmpc.net.rendezvous import listen_everywhere
from refmpc.net.tls import tls_context
from vfl.alignment import Alignment, AlignmentError, AlignmentRefused, PeerTls, align_as_leader, align_as_member
from vfl.alignment.ids import arrow_ids, bytes_and_offsets
from vfl.tables import IdRule, describe_ids

__all__ = ["MOST_ALIGNMENTS", "Agreed", "Aligner"]

MOST_ALIGNMENTS = 10  # of one training, with other ids or --align-again

_PATIENCE = 600.0  # seconds for one message of the intersection: long lists take time to blind
_ATTEMPTS = 5
_SIGN = 1.0  # seconds between two signs of life of the leader while clients are missing
_SILENCE = 60.0  # seconds without one after which it is gone

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Agreed:
    """``rows[i]`` is this client's row of the i-th common id, in an order that all clients share; ``session`` names it.
    ``bytes_moved``: what this client has sent and received for it."""

    rows: np.ndarray
    session: str
    from_disk: bool = False
    bytes_moved: int = 0


class Aligner:
    """One client's part in the alignment for one purpose; use as a context manager, which stays open for the whole call
    so that a client that comes too late is told so."""

    def __init__(
        self,
        identity: Identity,
        kind: str,
        ids: Sequence[str],
        state: Path,
        log: Log,
        *,
        listen_on: str | None,
        pad_to: int | None = None,
        minimum: int = 0,
        most: int | None = None,
        terms: Mapping[str, Any] | None = None,
        id_form: str = IdRule().form,
        handlers: Mapping[str, Handler] | None = None,
    ):
        self._identity, self._kind, self._ids, self._log = identity, kind, ids, log
        self._tag = _tag_of(ids, terms or {})  # refuses what cannot be matched, before anybody is called
        private_folder(state)
        state.chmod(0o700)
        self._state, self._file = state, state / f"alignment-{kind}.npz"
        self._times = state / f"alignments-{kind}.json"
        self._minimum, self._most = minimum, most
        clients = identity.config.ordered_clients
        self._names = [client.name for client in clients]
        self._leader = clients[-1]
        self._listen_on, self._pad_to, self._id_form = listen_on, pad_to, id_form
        self._terms = {"--pad-to": pad_to, **(terms or {})}  # what all clients must have chosen alike
        self._waiting = Waiting(log)
        self._handlers = {"align": self._arrive, **(handlers or {})}
        self._arrived: dict[str, Channel] = {}
        self._changed = threading.Condition()
        self._agreed: Agreed | None = None

    @contextmanager
    def open(self) -> Iterator[Aligner]:
        """Listen, if others call this client."""
        if self._identity.name != self._leader.name or len(self._names) == 1:
            yield self
            return
        address = self._meeting_place()
        listeners = listen_everywhere(self._listen_on or address[0], address[1])
        identity, timeout = self._identity, self._identity.config.run.timeout
        doctor = Answerer(
            identity.config, identity.credentials, identity.name, state=lambda: f"aligns for {self._kind}"
        )
        with Door(identity, listeners, self._handlers, self._log, timeout=timeout, doctor=doctor) as self._door:
            yield self

    def agree(self, advance: Advance, *, again: bool = False) -> Agreed:
        """The common rows: from disk if this client has aligned the same ids before, else with the others."""
        agreed = None if again else self._load()
        if agreed is None:
            self._earlier()
            self._counted = False
            agreed = self._align(advance)
            self._save(agreed)
            self._announce(agreed)
        with self._changed:
            self._agreed = agreed
            late, self._arrived = self._arrived, {}
        for channel in late.values():  # it lost its connection after all were matched: it calls again, and is told so
            channel.close()
        if not len(agreed.rows):
            self.forget()  # other files may have rows in common
            raise InvalidArgument(
                f"no person is in every client's file: none of the {describe_ids(self._ids)} here is in all the "
                "others; check that the files are about the same people, that --id is the right column, and that all "
                "files write ids in the same way ([id] rule in columns.toml)"
            )
        return agreed

    def _align(self, advance: Advance) -> Agreed:
        session = secrets.token_hex(16)
        if len(self._names) == 1:
            order = np.argsort(np.frombuffer(os.urandom(8 * len(self._ids)), dtype=np.uint64), kind="stable")
            return Agreed(order, session)
        backoff = Backoff()
        for left in range(_ATTEMPTS - 1, -1, -1):
            try:
                if self._identity.name == self._leader.name:
                    aligned = self._lead(advance)
                    return Agreed(aligned.rows, session, bytes_moved=aligned.bytes_moved)
                return self._follow(advance)
            except AlignmentRefused as error:
                raise InvalidArgument(f"the alignment was refused: {error}") from error
            except (AlignmentError, PeerLost, PeerTimeout) as error:
                if not left:
                    raise PeerLost(f"the alignment failed {_ATTEMPTS} times, at last because {error}") from error
                self._log.warning("the alignment was interrupted, it begins again", reason=str(error))
                backoff.wait()
        raise AssertionError("unreachable")

    # the label client ----------------------------------------------------------------------------

    def _arrive(self, channel: Channel, hello: Mapping[str, Any]) -> None:
        name = name_of(channel.peer)
        if name not in self._names or hello.get("kind") != self._kind:
            channel.answer(refused=f"kind = {hello.get('kind')}: {self._identity.name} aligns for {self._kind} here")
            return
        for option, mine in self._terms.items():
            other = hello.get(_field(option))
            if other != mine:
                both = f"{name} has {option} {printable(str(other), 80)}, {self._identity.name} has {mine}"
                channel.answer(refused=f"{both}: they must agree")
                self._log.error("a client differs in what all must have chosen alike", reason=both)
                return
        if hello.get("id_form") != self._id_form:
            channel.answer(
                refused=f"{name} writes ids in {printable(str(hello.get('id_form')))} form, {self._identity.name} in "
                f"{self._id_form} "
                "form, so that the same person could have two: [id] rule = 'verbatim' in columns.toml must be at all "
                "clients "
                "or at none"
            )
            return
        if self._agreed is not None:
            channel.answer(
                refused=f"{self._identity.name} has aligned its rows already: if {name} has lost what it kept of that, "
                "start all clients with --align-again"
            )
            return
        channel.answer(ok=True)
        with self._changed:
            if self._agreed is not None:  # meanwhile: it hangs up, and the next call is told so
                return
            self._door.keep(channel)
            earlier = self._arrived.pop(name, None)
            self._arrived[name] = channel
            self._changed.notify_all()
        if earlier is not None:
            earlier.close()

    def _lead(self, advance: Advance) -> Alignment:
        members = self._names[:-1]
        with self._changed:
            while missing := [name for name in members if name not in self._arrived]:
                for name in missing:
                    self._waiting.on(name, "to align rows")
                self._tell_who_is_missing(missing)
                self._changed.wait(_SIGN)
            self._waiting.over()
            self._members = {name: self._arrived.pop(name) for name in members}
        try:
            for channel in self._members.values():
                channel.send({"begin": True})
            self._count()
            links = {name: channel.connection for name, channel in self._members.items()}
            name = self._identity.name
            return align_as_leader(self._ids, links, name=name, advance=advance, **self._how)
        except BaseException:
            self._hang_up()
            raise

    @property
    def _how(self) -> dict[str, Any]:
        """What is the same for leader and members."""
        return {
            "matching": self._identity.config.run.matching,
            "pad_to": self._pad_to,
            "minimum": self._minimum,
            "context": f"{self._kind} {self._identity.configuration}",
            "folder": self._state,
            "timeout": _PATIENCE,
        }

    @property
    def _tls(self) -> PeerTls:
        """How the members recognise each other, through the leader."""
        credentials = self._identity.credentials
        pins = {
            name_of(peer): (pin, *(e.fingerprint for e in (credentials.earlier.get(peer),) if e and not e.over))
            for peer, pin in credentials.pinned.items()
        }
        return PeerTls(lambda server_side: tls_context(credentials, server_side=server_side), pins)

    def _tell_who_is_missing(self, missing: list[str]) -> None:
        """To those who are here: they wait, too. Whoever is gone again has to call once more."""
        for name, channel in list(self._arrived.items()):
            try:
                channel.send({"missing": ",".join(missing)})
            except RefmpcError:
                channel.close()
                del self._arrived[name]

    def _announce(self, agreed: Agreed) -> None:
        if len(self._names) == 1 or self._identity.name != self._leader.name:
            return
        try:
            for channel in self._members.values():
                channel.send({"session": agreed.session, "rows": len(agreed.rows)})
                channel.receive_one_of(ALIGNED)
        except RefmpcError as error:
            self._log.warning("a client may not have learnt the name of the session", reason=str(error))
        self._hang_up()

    def _hang_up(self) -> None:
        for channel in self._members.values():
            channel.close()

    # the other clients ---------------------------------------------------------------------------

    def _follow(self, advance: Advance) -> Agreed:
        with self._call_leader() as channel:
            self._wait_for_all(channel)
            self._count()
            name = self._identity.name
            link = channel.connection
            aligned = align_as_member(
                self._ids, link, name=name, clients=self._names, advance=advance, tls=self._tls, **self._how
            )
            message, _ = channel.receive_one_of({"session": LEADS["session"]})
            agreed = Agreed(aligned.rows, message["session"], bytes_moved=aligned.bytes_moved)
            require(message.get("rows") == len(agreed.rows), "aligned rows", message.get("rows"), str(len(agreed.rows)))
            self._save(agreed)
            channel.send({"ok": True})
            return agreed

    def _wait_for_all(self, channel: Channel) -> None:
        """Until every client has called the leader, which says meanwhile who has not."""
        while True:
            message, _ = channel.receive_one_of(LEADS, timeout=_SILENCE)
            missing = [name for name in self._names if name in message.get("missing", "").split(",")]
            for wait in self._waiting.now:
                if wait.whom not in missing:
                    self._waiting.over(wait.whom)
            if message.get("begin") is True:
                return
            for name in missing:
                self._waiting.on(name, "to align rows")

    def _meeting_place(self) -> tuple[str, int]:
        """Where the leading client listens."""
        address = self._leader.alignment_address
        require(
            address is not None,
            f"[[client]] {self._leader.name}: alignment",
            "",
            "host:port where the label client listens while ids are matched",
        )
        assert address is not None
        return address

    def _call_leader(self) -> Channel:
        address = self._meeting_place()
        backoff = Backoff()
        while True:
            try:
                timeout = self._identity.config.run.timeout
                channel, _ = call(
                    self._identity,
                    self._leader.name,
                    address,
                    "align",
                    timeout=timeout,
                    kind=self._kind,
                    id_form=self._id_form,
                    **{_field(option): value for option, value in self._terms.items()},
                )
                self._waiting.over()
                return channel
            except (PeerLost, PeerTimeout) as error:
                self._waiting.on(self._leader.name, f"to align rows: {error}")
            except Refused as error:
                if not error.later:
                    raise
                self._waiting.on(self._leader.name, str(error))
            backoff.wait()

    def kept(self) -> Agreed | None:
        """An earlier alignment of the same ids for the same purpose, if there was one."""
        return self._load()

    def forget(self) -> None:
        """The alignment served its purpose: the next call aligns anew."""
        self._file.unlink(missing_ok=True)

    # disk ----------------------------------------------------------------------------------------

    def _earlier(self) -> list[list[int]]:
        """When this client has aligned for this purpose, and how many ids: each time tells which of them the others
        have. May be bounded (``most``)."""
        times: list[list[int]] = read_json(self._times) if self._times.exists() else []
        require(
            self._most is None or len(times) < self._most,
            f"alignments for {self._kind}",
            len(times) + 1,
            f"at most {self._most}",
            f"each with another list reveals more about the others' people; if all agree to one more, remove "
            f"{self._times}",
        )
        return times

    def _count(self) -> None:
        """All clients are there: it begins, and counts once, however often it is interrupted meanwhile."""
        if not self._counted:
            self._counted, times = True, [*self._earlier(), [round(time.time()), len(self._ids)]]
            write_json(self._times, times)
            self._log.info("aligns", alignment=len(times), ids=len(self._ids))

    def _save(self, agreed: Agreed) -> None:
        facts = {"rows": agreed.rows, "session": np.array(agreed.session), "ids": np.array(self._tag)}
        write_arrays(self._file, facts, private=True, sealed=True)

    def _load(self) -> Agreed | None:
        if not self._file.exists():
            return None
        try:
            kept = read_arrays(self._file)
        except Damaged as error:
            way_out = "bring it back from a backup, or start all clients with --align-again"
            raise Damaged(self._file, error.why, way_out) from None
        if str(kept["ids"]) != self._tag:
            self._log.warning("the ids in the file have changed since they were aligned: aligning again")
            return None
        return Agreed(kept["rows"], str(kept["session"]), from_disk=True)


def _field(option: str) -> str:
    """Under which name an option is in the first message."""
    return option.removeprefix("--").replace("-", "_")


def _tag_of(ids: Sequence[str], terms: Mapping[str, Any]) -> str:
    """By what an alignment that was kept is recognised: these ids, in this order, for this purpose."""
    data, offsets = bytes_and_offsets(arrow_ids(ids))
    hashed = hashlib.sha256(len(ids).to_bytes(8, "little"))
    hashed.update(offsets.data)
    hashed.update(data.data)
    hashed.update("\0".join(f"{name} {value}" for name, value in terms.items()).encode())
    return hashed.hexdigest()
