"""Clients that stay: the live channels of a session at one server, for protocols in which clients take part in every
step.

A client calls all three servers and waits; each gives it signs of life. When a server holds a channel of every client
it offers the session to the two others, and when the three have met for an attempt
(``protocols.run.hosts.server_sync``) each tells every client the attempt's name. A client that was told the same name
by all three says so to each, and only then shares anything. From then on the channel belongs to the attempt: the
program's frames, no other message. Whatever breaks ends the attempt for everybody; clients call again, the servers meet
again, and the program resumes from what is on the disks.

Who sees what: a live channel is TLS between pinned certificates like every call, so nobody else can take a client's
place. A server sees shares, which are uniform, and what it sends itself: its own third of each masked opening. A client
sees the names of attempts (hashes of random numbers), who is waited for, and the sums of the three servers' words for
it: its own noised gradients, and the model. A second channel of a client ends its first: the client is who it proves to
be, and a dead connection must not keep it out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from protocols.net.wire import SIGNS, Channel, check_message
from refmpc.core.errors import HandshakeError, PeerLost
from refmpc.net.framing import Peer, listed, name_of
from refmpc.net.sockets import SocketTransport

__all__ = ["BEAT", "HANDOVER", "Guests", "LiveTransport"]

BEAT = 2.0  # seconds between two signs of life to a client that waits
HANDOVER = 10.0  # seconds in which a client must say that all three servers have named the attempt
_RESULT = ("open_to_client", "reveal_to_client")  # the last of each to a client: what its training ends with


class _Guest:
    """A client that waits at this server, in the thread of its call."""

    def __init__(self, channel: Channel):
        self.channel = channel
        self.attempt = ""  # the one it is to take part in
        self.ready = self.gone = False


class Guests:
    """The live channels of one session: at most one of each client."""

    def __init__(self, clients: Iterable[str]):
        self._names = tuple(clients)
        self._waiting: dict[str, _Guest] = {}
        self._playing: dict[str, Channel] = {}  # the channels of the attempt that runs
        self._changed = threading.Condition()

    @property
    def missing(self) -> list[str]:
        """Clients that are not here, neither waiting nor in an attempt."""
        with self._changed:
            return [name for name in self._names if name not in self._waiting and name not in self._playing]

    def notify(self) -> None:
        """There is something to tell those who wait."""
        with self._changed:
            self._changed.notify_all()

    # the thread of a call ------------------------------------------------------------------------

    def wait(self, channel: Channel, sign: Callable[[], Mapping[str, Any]]) -> bool:
        """Signs of life until an attempt begins: true if the channel is the attempt's now. ``sign`` makes one; a
        refusal in it is the last."""
        guest, name = _Guest(channel), name_of(channel.peer)
        with self._changed:
            before = self._waiting.get(name)
            earlier = self._playing.get(name) if before is None else before.channel
            self._waiting[name] = guest
        if earlier is not None:
            earlier.cut()
        try:
            while not guest.attempt:
                message = sign()
                channel.send(message)
                if "refused" in message:
                    return False
                check_message(channel.receive()[0], SIGNS)
                with self._changed:
                    if not guest.attempt:
                        self._changed.wait(BEAT)
            channel.send({"attempt": guest.attempt})
            answer, _ = channel.receive(timeout=HANDOVER)
            check_message(answer, SIGNS)
            if answer.get("takes") != guest.attempt:
                raise HandshakeError(f"{name} answered for another attempt than the one that this server named")
            with self._changed:
                guest.ready = not guest.gone
                return guest.ready
        finally:
            with self._changed:
                guest.gone = not guest.ready
                if self._waiting.get(name) is guest and guest.gone:
                    del self._waiting[name]
                self._changed.notify_all()

    # the thread that computes --------------------------------------------------------------------

    def gather(self, attempt: str) -> dict[Peer, Any]:
        """The connections of all clients, each of which has been told the attempt's name by all three servers."""
        until = time.monotonic() + 1.5 * HANDOVER
        with self._changed:
            guests = dict(self._waiting)
            if len(guests) == len(self._names):
                for guest in guests.values():
                    guest.attempt = attempt
                self._changed.notify_all()
                while not all(guest.ready for guest in guests.values()) and time.monotonic() < until:
                    if any(guest.gone for guest in guests.values()):
                        break
                    self._changed.wait(until - time.monotonic())
            here = {name for name, guest in guests.items() if guest.ready and self._waiting.get(name) is guest}
            away = [name for name in self._names if name not in here]
            for name, guest in guests.items():
                guest.gone = guest.gone or not guest.ready  # too late: its thread lets it go
                if self._waiting.get(name) is guest:
                    del self._waiting[name]
            self._playing = {name: guests[name].channel for name in here}
        for guest in [guests[name] for name in guests.keys() - here]:
            (
                guest.channel.close if guest.ready else guest.channel.cut
            )()  # cut: its thread still uses it, and closes it
        if away:
            self.let_go()
            raise PeerLost(f"{listed(away)} did not come to the attempt")
        return {name: channel.connection for name, channel in self._playing.items()}

    def let_go(self) -> None:
        """The attempt has ended, well or not."""
        with self._changed:
            playing, self._playing = self._playing, {}
        for channel in playing.values():
            channel.close()


class LiveTransport(SocketTransport):
    """The sockets of an attempt, to servers and clients alike. Remembers what each client is told last, its result: if
    it dies before it has read that, it can still fetch it, when the others have left."""

    def __init__(self, connections: Mapping[Peer, Any], timeout: float):
        super().__init__(connections, timeout)
        self._last: dict[str, dict[str, bytes]] = {str(peer): {} for peer in connections if isinstance(peer, str)}

    def exchange(
        self,
        operation: str,
        sends: Mapping[Peer, list[np.ndarray]],
        receives: Mapping[Peer, list[np.ndarray]],
        code: int = 0,
    ) -> None:
        """As every transport."""
        if operation in _RESULT:
            for peer, parts in sends.items():
                if isinstance(peer, str):
                    self._last[peer][operation] = b"".join(np.ascontiguousarray(part).tobytes() for part in parts)
        super().exchange(operation, sends, receives, code)

    @property
    def outbox(self) -> dict[str, list[tuple[str, bytes]]]:
        """By client: the last layer gradient, then the model."""
        return {name: [(word, last[word]) for word in _RESULT if word in last] for name, last in self._last.items()}
