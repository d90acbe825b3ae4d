"""What a server does for clients that call, each in a thread of its own: takes uploads in, keeps those who stay, hands
out."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from accel.errors import InvalidArgument
from accel.files import Damaged
from accel.validate import require
from protocols.federation.read import FederationConfig
from protocols.log import Log
from protocols.net.live_channels import BEAT
from protocols.net.spool import Spool
from protocols.net.wire import SIGNS, TRAINING, UPLOADS, Channel, Refused, check_message
from protocols.run.hosts.planning import StillPlanning
from protocols.run.hosts.sessions import Session, SessionStore
from protocols.state.audit_log import AuditLog
from protocols.state.disk import NoRoom, explain, require_room
from refmpc.net.framing import name_of

__all__ = ["Reception"]


class Reception:
    """The calls of clients at server ``number``. ``keep`` leaves a channel open when its call returns
    (``Door.keep``)."""

    def __init__(
        self,
        config: FederationConfig,
        number: int,
        store: SessionStore,
        audit: AuditLog,
        log: Log,
        keep: Callable[[Channel], None],
        stop: threading.Event,
    ):
        self.config, self._number = config, number
        self._store, self._audit, self._log, self._keep, self._stop = store, audit, log, keep, stop
        self._uploading: dict[tuple[str, str], Channel] = {}
        self._lock = threading.Lock()

    def _session_of(self, channel: Channel, hello: Mapping[str, Any], *, live: bool = False) -> Session:
        """The session that a client names in its first message; refuses in a sentence."""
        try:
            require(channel.peer in {c.name for c in self.config.clients}, "caller", name_of(channel.peer), "a client")
            stays = hello.get("kind") == TRAINING and self.config.run.layers is not None
            way = "live" if stays else "upload"
            require(live == stays, "purpose", hello.get("purpose"), f"{way!r} for this with {self.config.run.protocol}")
            session = self._store.open(hello, name_of(channel.peer))
            session.note_people(name_of(channel.peer), hello.get("people"))
        except InvalidArgument as error:
            channel.answer(refused=str(error))
            raise Refused(str(error)) from None
        except StillPlanning as error:
            channel.answer(refused=f"server-{self._number} {error}; it can be asked again", later=True)
            raise Refused(f"not yet: this server {error}") from None
        except OSError as error:
            channel.answer(refused=self._disk_in_words(), later=True)
            self._log.error("a session cannot begin: the client is asked to wait", **explain(error))
            raise Refused("this server's disk") from error
        return session

    def _disk_in_words(self) -> str:
        return f"server-{self._number} cannot write to its disk, which is full or broken: its operator must act"

    @contextlib.contextmanager
    def _alone(self, session: Session, channel: Channel) -> Iterator[None]:
        """One upload of a client at a time; a client that has come back ends its own earlier call."""
        key = session.name, name_of(channel.peer)
        with self._lock:
            earlier = self._uploading.get(key)
            self._uploading[key] = channel
        if earlier is not None:
            earlier.cut()
        with session.locks[key[1]]:
            try:
                yield
            finally:
                with self._lock:
                    if self._uploading.get(key) is channel:
                        del self._uploading[key]

    def take_upload(self, channel: Channel, hello: Mapping[str, Any]) -> None:
        """Keep a client's messages one by one, each acknowledged when it is on disk. Memory: one message."""
        session = self._session_of(channel, hello)
        client = name_of(channel.peer)
        spool = session.spools[client]
        with self._alone(session, channel):
            try:
                if not (spool.complete or session.done):
                    require_room(session.directory, session.task.upload_bytes(client, self._number, spool.count))
            except NoRoom as error:
                self._log.error("no room for an upload: the client is asked to wait", client=client, **explain(error))
                channel.answer(refused=self._disk_in_words(), later=True)
                return
            channel.answer(
                ok=True,
                parameters=session.task.plan.public_parameters(),
                kept=spool.count,
                digest=spool.digest,
                complete=spool.complete or session.done,
            )
            try:
                while not (spool.complete or session.done):
                    self._take_message(session, client, spool, channel)
            except InvalidArgument as error:
                words = f"{client} sent something that does not fit: {error}"
                channel.refuse(words)
                raise Refused(words) from None
            except OSError as error:  # most of all a full disk: nothing was acknowledged, the client keeps it
                self._log.error(
                    "an upload cannot be kept: the client is asked to wait", client=client, **explain(error)
                )
                channel.refuse(self._disk_in_words(), later=True)
        with self._store.changed:
            self._store.changed.notify_all()

    def _take_message(self, session: Session, client: str, spool: Spool, channel: Channel) -> None:
        message, payload = channel.receive(session.task.largest_message)
        require(client in session.joined, "session", session.name[:8], "the one that this client came with last")
        total = session.task.messages_of(client)
        form = check_message(message, UPLOADS)
        if form == "from":
            begin = message["from"]
            require(begin <= spool.count, "from", begin, f"0 to {spool.count}")
            spool.cut(begin)
            channel.send({"digest": spool.digest})
            self._log.info("upload begins", client=client, session=session.name[:8], kept=begin, of=total)
        elif form == "message":
            number = message["message"]
            require(number == spool.count < total, "message", number, f"{spool.count} of {total}")
            expected, shape = session.task.message_of(client, number, self._number)
            way_out = f"all columns that federation.toml names for {client}, and no others"
            require(
                len(payload) == expected, f"bytes of message {number}", len(payload), f"{expected}, {shape}", way_out
            )
            require_room(session.directory, len(payload))
            spool.append(str(message.get("operation")), str(message.get("token")), payload)
            channel.send({"kept": spool.count})
        else:
            require(
                message["complete"] == spool.count == total,
                "complete",
                message["complete"],
                f"{total}, of which {spool.count} are here",
            )
            require(
                message["digest"] == spool.digest,
                "digest",
                message["digest"][:16] + "…",
                "that of the messages kept here",
            )
            spool.seal()
            channel.send({"sealed": spool.count})
            self._audit.append("upload complete", client=client, session=session.name, digest=spool.digest)
            self._log.info("upload complete", client=client, session=session.name[:8], messages=spool.count)

    def take_in(self, channel: Channel, hello: Mapping[str, Any]) -> None:
        """A client that stays: signs of life until an attempt begins, whose connection this is from then on."""
        session = self._session_of(channel, hello, live=True)
        channel.answer(ok=True, parameters=session.task.plan.public_parameters(), done=session.done)
        self._log.info("a client is here", client=name_of(channel.peer), session=session.name[:8])

        def sign() -> dict[str, Any]:
            if session.failed:
                return {"refused": session.failed}
            return {
                "progress": session.progress,
                "complete": session.complete,
                "missing": session.missing,
                "done": session.done,
            }

        if session.guests.wait(channel, sign):
            self._keep(channel)

    def _unknown_session(self, hello: Mapping[str, Any]) -> str:
        """For a client that was promised something here: what must have happened, and the way out."""
        name = str(hello.get("session"))[:8]
        return (
            f"server-{self._number} knows nothing of session {name}: its state was lost, or it was started with "
            "another --state. Its operator can start it again with the state it had. If that is lost, its shares are "
            "lost too: change [federation] name in federation.toml everywhere and begin a new run"
        )

    def hand_out(self, channel: Channel, hello: Mapping[str, Any]) -> None:
        """A client waits for its result: signs of life until it is there, then its shares, until it has them."""
        session = self._store.get(hello.get("session"))
        client = name_of(channel.peer)
        if session is None or client not in session.task.receivers:
            lost = self._unknown_session(hello)
            channel.answer(refused=lost)
            raise Refused(f"{client} asks for a session that is not here")
        channel.answer(ok=True)
        while not self._stop.is_set():
            if session.failed:
                channel.refuse(session.failed)
                return
            try:
                found = session.result(client)
            except Damaged as error:
                self._log.error("a result cannot be handed out", client=client, reason=str(error))
                channel.refuse(f"server-{self._number}: {error}")
                return
            if found is None:
                channel.send({"progress": session.progress, "complete": session.complete, "missing": session.missing})
                check_message(channel.receive()[0], SIGNS)
                with self._store.changed:
                    self._store.changed.wait(BEAT)
                continue
            head, payload = found
            channel.send(head, [payload])
            return

    def note_taken(self, channel: Channel, hello: Mapping[str, Any]) -> None:
        """A client has all three parts of its result."""
        session, client = self._store.get(hello.get("session")), name_of(channel.peer)
        if session is None or client not in session.task.receivers:
            channel.answer(refused=self._unknown_session(hello))
            return
        if not session.done:
            channel.answer(refused="this session is not done")
            return
        self._audit.append("result taken", client=client, session=session.name)
        self._log.info("a client has its result", client=client, session=session.name[:8])
        channel.answer(ok=True)
        session.note_taken(client)  # last: the server may end now
        with self._store.changed:
            self._store.changed.notify_all()
