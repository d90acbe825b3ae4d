"""The three servers meet: connections between all of them, one session that all hold, every public parameter compared.

A session is something to compute (a training, a request for predictions). Each server offers those it is ready for, on
every connection as soon as it is made. Whoever has the offers of both others takes the first session that all hold and
says so, together with its parameters and with the three nonces it has seen: all begin only if all have seen the same
three. A connection that breaks is made again on its own, so servers may come in any order, and again. Nothing is
computed before.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from protocols.log import Log
from protocols.net.backoff import Backoff
from protocols.net.waiting import Waiting
from protocols.net.wire import Channel, Identity, call
from protocols.state.audit_log import AuditLog
from protocols.version import software_version
from refmpc.core.errors import HandshakeError, RefmpcError
from refmpc.net.framing import Peer, name_of, printable

__all__ = ["DONE", "READY", "Different", "Meeting", "Met"]

READY, DONE = "ready", "done"
_MEETING = 20.0  # seconds for the others to come
_COMMIT = 5.0  # seconds for them to say what they take, once they have come
_PAUSES = 0.2, 1.0  # seconds between two calls, and between two meetings, at first and at most
_WAKE = 1.0  # seconds after which a server that has not come is told that it is needed


class Different(HandshakeError):
    """Servers hold a session with different parameters."""

    def __init__(self, text: str, session: str):
        super().__init__(text)
        self.session = session


class _Left(Exception):
    """A server has ended the meeting, to begin another."""


@dataclass(frozen=True)
class Met:
    """The outcome of a meeting."""

    session: str
    attempt: str  # the same at the three servers, fresh for every attempt
    connections: dict[Peer, socket.socket]
    heads: dict[Peer, tuple[str, int]]  # of the others' audit logs, to be noted


@dataclass
class _Talk:
    """A connection to another server, and what it has offered on it."""

    channel: Channel
    offer: dict[str, Any] = field(default_factory=dict)
    since: float = field(default_factory=time.monotonic)


class Meeting:
    """Meetings of one server with the two others, as often as needed."""

    def __init__(self, identity: Identity, log: Log, audit: AuditLog, waiting: Waiting):
        assert isinstance(identity.me, int)
        self._identity, self._me, self._log, self._audit = identity, identity.me, log, audit
        self._others: list[int] = [peer for peer in range(3) if peer != self._me]
        self._arrived: dict[int, Channel] = {}
        self._lock = threading.Lock()
        self._woken = self._closed = False
        self._waiting = waiting
        self._came: set[int] = set()  # to this meeting, even if they have left it again
        self._between = Backoff(*_PAUSES)
        self._software = software_version()

    def arrive(self, channel: Channel) -> None:
        """A server with a higher number has called; the newest call counts."""
        assert isinstance(channel.peer, int)
        with self._lock:
            older = channel if self._closed else self._arrived.pop(channel.peer, None)
            if not self._closed:
                self._arrived[channel.peer] = channel
        if older is not None:
            older.close()

    def wake(self) -> None:
        """A server with a lower number waits for this one."""
        self._woken = True

    @property
    def somebody_waits(self) -> bool:
        """Whether another server has called since the last meeting."""
        return bool(self._arrived) or self._woken

    def close(self) -> None:
        """Let those go who wait, and who come later."""
        with self._lock:
            self._closed = True
            for channel in self._arrived.values():
                channel.close()
            self._arrived.clear()

    def hold(
        self,
        offers: Callable[[], Mapping[str, str]],
        parameters: Callable[[str], Mapping[str, Any]],
        over: Callable[[], bool],
    ) -> Met | None:
        """Meet once; None if it came to nothing (a peer is not there, or holds no common session), to be tried again.

        ``offers`` maps sessions to READY or DONE; ``parameters`` are the public parameters of one; ``over`` says
        whether this server need not meet anybody any more.
        """
        self._woken = False
        self._came.clear()
        talks: dict[int, _Talk] = {}
        offer = {
            "offers": dict(offers()),
            "nonce": secrets.token_hex(16),
            "software": self._software,
            "head": self._audit.head,
            "count": self._audit.count,
        }
        try:
            if self._gather(talks, offer, over):
                met = self._commit(talks, offer, parameters)
                if met is not None:
                    self._between.reset()
                    talks.clear()  # their connections are the attempt's now
                    return met
        except Different:
            raise
        except RefmpcError as error:
            self._log.warning("the servers could not meet", reason=str(error))
        finally:
            for talk in talks.values():
                talk.channel.close()
        self._between.wait()
        return None

    # offers --------------------------------------------------------------------------------------

    def _gather(self, talks: dict[int, _Talk], offer: Mapping[str, Any], over: Callable[[], bool]) -> bool:
        """Talk with both others and hear their offers."""
        begun = time.monotonic()
        again = dict.fromkeys(self._others, begun)  # when a peer is called, or rung, next
        calls = {peer: Backoff(*_PAUSES) for peer in self._others}
        again |= {peer: begun + _WAKE for peer in self._others if peer > self._me}
        while time.monotonic() < begun + _MEETING and not over():
            with self._lock:
                arrived, self._arrived = self._arrived, {}
            for peer, channel in arrived.items():
                if peer in talks:  # it has begun anew
                    talks[peer].channel.close()
                self._begin(talks, peer, channel, offer)
            for peer in self._others:
                if peer not in talks and time.monotonic() >= again[peer]:
                    again[peer] = time.monotonic() + (calls[peer].next_pause() if peer < self._me else 5 * _WAKE)
                    called = self._call(peer, "party" if peer < self._me else "wake")
                    if called is not None and peer < self._me:
                        self._begin(talks, peer, called, offer)
                    elif called is not None:
                        called.close()
            self._listen(talks)
            if len(talks) == 2 and all(talk.offer for talk in talks.values()):
                return True
        for peer in self._others:
            if peer not in self._came and not over():
                self._waiting.on(name_of(peer), "it has not come to the meeting")
        return False

    def _begin(self, talks: dict[int, _Talk], peer: int, channel: Channel, offer: Mapping[str, Any]) -> None:
        channel.timeout = _COMMIT
        try:
            channel.send(offer)
            talks[peer] = _Talk(channel)
        except RefmpcError:
            channel.close()
            talks.pop(peer, None)

    def _listen(self, talks: dict[int, _Talk]) -> None:
        """Take offers that have arrived; drop connections that have ended."""
        poll = select.poll()
        for talk in talks.values():
            poll.register(talk.channel.connection, select.POLLIN)
        ready = {number for number, _ in poll.poll(50)}
        for peer, talk in list(talks.items()):
            if talk.channel.connection.fileno() not in ready:
                if not talk.offer and time.monotonic() > talk.since + _COMMIT:  # it is busy, or died silently
                    talk.channel.close()
                    del talks[peer]
                continue
            try:
                if talk.offer:  # what it takes may be here already, to be read later; or its end
                    self._require_open(talk.channel)
                else:
                    message, _ = talk.channel.receive()
                    good = isinstance(message.get("offers"), dict) and isinstance(message.get("nonce"), str)
                    if not good:
                        raise HandshakeError(f"{name_of(peer)} sent no offer of sessions: it runs another version")
                    self._require_same_software(peer, message.get("software"))
                    talk.offer = message
                    self._came.add(peer)
                    self._waiting.over(name_of(peer))
            except _Left:  # it waits for the third as we do, and will call again: not worth a word
                talk.channel.close()
                del talks[peer]
            except (RefmpcError, OSError) as error:
                self._waiting.on(name_of(peer), str(error))
                talk.channel.close()
                del talks[peer]

    def _require_same_software(self, peer: int, theirs: Any) -> None:
        """Two versions may compute differently, so they do not compute together: the one waits until the other is there
        too."""
        if theirs != self._software:
            raise HandshakeError(
                f"{name_of(peer)} runs ppvfl {printable(str(theirs), 80)}, this server {self._software}: the three "
                f"must run the same; "
                "what is kept stays, and they go on when they do"
            )

    def _require_open(self, channel: Channel) -> None:
        channel.connection.settimeout(1.0)
        if not socket.socket.recv(channel.connection, 1, socket.MSG_PEEK):  # below TLS: is there anything at all?
            raise _Left
        time.sleep(0.02)

    def _call(self, peer: int, purpose: str) -> Channel | None:
        """Servers call lower numbers only; one that has nothing to do itself must be told that another needs it
        (wake)."""
        try:
            channel, _ = call(self._identity, peer, self._identity.config.addresses[peer], purpose, timeout=_COMMIT)
        except RefmpcError as error:  # also a refusal: its operator may put it right, and this server goes on waiting
            self._waiting.on(name_of(peer), str(error))
            return None
        return channel

    # agreement -----------------------------------------------------------------------------------

    def _commit(
        self, talks: Mapping[int, _Talk], mine: Mapping[str, Any], parameters: Callable[[str], Mapping[str, Any]]
    ) -> Met | None:
        """Take the first session that all hold, if all take it in the same meeting."""
        every = [mine, *(talk.offer for talk in talks.values())]
        nonces = sorted(offer["nonce"] for offer in every)
        offered = [offer["offers"] for offer in every]
        common = sorted(name for name in set.intersection(*map(set, offered)) if READY in {o[name] for o in offered})
        if not common:
            return None
        session = common[0]
        own = parameters(session)
        for talk in talks.values():
            talk.channel.send({"takes": session, "nonces": nonces, "parameters": dict(own)})
        differences = []
        for peer, talk in talks.items():
            message, _ = talk.channel.receive()
            if message.get("takes") != session or message.get("nonces") != nonces:
                return None  # it met an earlier life of the third
            differences.append(self._identity.difference(peer, message.get("parameters"), own))
        if any(differences):  # whichever it is, each of the three sees at least one
            raise Different(next(filter(None, differences)), session)
        heads: dict[Peer, tuple[str, int]] = {}
        for peer, talk in talks.items():
            with contextlib.suppress(TypeError, ValueError):
                heads[peer] = str(talk.offer.get("head"))[:64], int(talk.offer.get("count", 0))
        attempt = hashlib.sha256(" ".join([session, *nonces]).encode()).hexdigest()[:32]
        return Met(session, attempt, {peer: talk.channel.connection for peer, talk in talks.items()}, heads)
