"""The three servers meet: connections between all of them, one session that all hold, every public parameter compared.

A session is something to compute (a training, a request for predictions). Each server offers those it is ready for; all
take the first that all three hold. Then they compare its parameters field by field. Nothing is computed before.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from protocols.deploy.audit import AuditLog
from protocols.deploy.log import Log
from protocols.deploy.wire import Channel, Identity, call, name_of
from refmpc.errors import HandshakeError, RefmpcError
from refmpc.transport import Peer

__all__ = ["DONE", "READY", "Different", "Meeting", "Met"]

READY, DONE = "ready", "done"
_PAUSE = 0.3  # seconds between two calls
_OFFER = 15.0  # seconds for the others to come to the meeting once connected
_WAKE = 1.0  # seconds after which a server that has not come is told that it is needed
_QUIET = 30.0  # seconds between two lines in the log on a peer that does not answer


class Different(HandshakeError):
    """Servers hold a session with different parameters."""

    def __init__(self, text: str, session: str):
        super().__init__(text)
        self.session = session


@dataclass(frozen=True)
class Met:
    """The outcome of a meeting."""

    session: str
    attempt: str  # the same at the three servers, fresh for every attempt
    connections: dict[Peer, socket.socket]
    heads: dict[Peer, tuple[str, int]]  # of the others' audit logs, to be noted


class Meeting:
    """Meetings of one server with the two others, as often as needed."""

    def __init__(self, identity: Identity, log: Log, audit: AuditLog):
        assert isinstance(identity.me, int)
        self._audit = audit
        self._identity, self._me, self._log = identity, identity.me, log
        self._others: list[int] = [peer for peer in range(3) if peer != self._me]
        self._arrived: dict[int, Channel] = {}
        self.changed = threading.Condition()
        self._woken = False
        self._complained: dict[int, tuple[str, float]] = {}

    def arrive(self, channel: Channel) -> None:
        """A server with a higher number has called; the newest call counts."""
        assert isinstance(channel.peer, int)
        with self.changed:
            older = self._arrived.pop(channel.peer, None)
            self._arrived[channel.peer] = channel
            self.changed.notify_all()
        if older is not None:
            older.close()

    def wake(self) -> None:
        """A server with a lower number waits for this one."""
        with self.changed:
            self._woken = True

    @property
    def somebody_waits(self) -> bool:
        """Whether another server has called since the last meeting."""
        with self.changed:
            return bool(self._arrived) or self._woken

    def hold(
        self,
        offers: Callable[[], Mapping[str, str]],
        parameters: Callable[[str], Mapping[str, Any]],
        stop: threading.Event,
    ) -> Met | None:
        """Meet once; None if it came to nothing (a peer is not there, or holds no common session), to be tried again.

        ``offers`` maps sessions to READY or DONE; ``parameters`` are the public parameters of one.
        """
        channels: dict[int, Channel] = {}
        with self.changed:
            self._woken = False
        try:
            for peer in self._others:
                channel = self._call(peer) if peer < self._me else self._wait_for(peer, stop)
                if channel is None:
                    return None
                channels[peer] = channel
            met = self._agree(channels, offers(), parameters)
            if met is not None:
                channels.clear()  # their connections are the attempt's now
            return met
        except HandshakeError:
            raise
        except RefmpcError as error:
            self._log.warning("the servers could not meet", reason=str(error))
            return None
        finally:
            for channel in channels.values():
                channel.close()

    def _call(self, peer: int) -> Channel | None:
        address = self._identity.config.addresses[peer]
        try:
            channel, _ = call(self._identity, peer, address, "party", timeout=_OFFER)
            self._complained.pop(peer, None)
            return channel
        except (
            RefmpcError
        ) as error:  # also a refusal: its operator may put it right, and this server need not be restarted
            self._complain(peer, str(error))
        time.sleep(_PAUSE)
        return None

    def _complain(self, peer: int, why: str) -> None:
        before, when = self._complained.get(peer, ("", 0.0))
        if why != before or time.monotonic() - when > _QUIET:
            self._complained[peer] = why, time.monotonic()
            self._log.warning("waiting for a server", peer=name_of(peer), reason=why)

    def _wait_for(self, peer: int, stop: threading.Event) -> Channel | None:
        channel = self._await_arrival(peer, _WAKE, stop)
        if channel is None and not stop.is_set():
            self._ring(peer)
            channel = self._await_arrival(peer, _OFFER, stop)
        if channel is None:
            self._complain(peer, "it has not called")
        else:
            channel.timeout = _OFFER
        return channel

    def _await_arrival(self, peer: int, seconds: float, stop: threading.Event) -> Channel | None:
        until = time.monotonic() + seconds
        with self.changed:
            while peer not in self._arrived and time.monotonic() < until and not stop.is_set():
                self.changed.wait(0.5)
            return self._arrived.pop(peer, None)

    def _ring(self, peer: int) -> None:
        """Servers call lower numbers only: one that has nothing to do itself must be told that another needs it."""
        address = self._identity.config.addresses[peer]
        with contextlib.suppress(RefmpcError):
            call(self._identity, peer, address, "wake", timeout=_OFFER)[0].close()

    def _agree(
        self,
        channels: Mapping[int, Channel],
        mine: Mapping[str, str],
        parameters: Callable[[str], Mapping[str, Any]],
    ) -> Met | None:
        nonce = secrets.token_hex(16)
        offers, nonces = [dict(mine)], [nonce]
        heads: dict[Peer, tuple[str, int]] = {}
        for channel in channels.values():
            channel.send({"offers": dict(mine), "nonce": nonce, "head": self._audit.head, "count": self._audit.count})
        for peer, channel in channels.items():
            message, _ = channel.receive()
            theirs = message.get("offers")
            if not isinstance(theirs, dict) or not isinstance(message.get("nonce"), str):
                raise HandshakeError(f"{name_of(peer)} sent no offer of sessions: it runs another version")
            offers.append(theirs)
            nonces.append(message["nonce"])
            heads[peer] = str(message.get("head"))[:64], int(message.get("count", 0))
        common = sorted(name for name in set.intersection(*map(set, offers)) if READY in {o[name] for o in offers})
        if not common:
            return None
        session = common[0]
        own = parameters(session)
        for channel in channels.values():
            channel.send({"parameters": dict(own)})
        differences = []
        for peer, channel in channels.items():
            message, _ = channel.receive()
            differences.append(self._identity.difference(peer, message.get("parameters"), own))
        if any(differences):  # whichever it is, each of the three sees at least one
            raise Different(next(filter(None, differences)), session)
        attempt = hashlib.sha256(" ".join([session, *sorted(nonces)]).encode()).hexdigest()[:32]
        return Met(session, attempt, {peer: channel.connection for peer, channel in channels.items()}, heads)
