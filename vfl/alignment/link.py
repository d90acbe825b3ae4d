"""Runs the alignment over connected sockets: frames of bounded length, deadlines, and a reason when somebody gives up.

The sockets come from the caller, who has authenticated them (mutual TLS between organisations). What crosses them holds
no id even in the clear, but without authentication anybody could take part.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from accel.validate import require, require_real
from vfl.alignment.group import Advance
from vfl.alignment.protocol import AlignmentError, Receive, Send, Steps, Terms, leader, member

__all__ = ["Alignment", "align_as_leader", "align_as_member"]

_HEADER = struct.Struct("<cI")  # kind, length
_GAVE_UP = b"X"
_MAX_REASON = 1000


@dataclass(frozen=True)
class Alignment:
    """``rows[i]`` is this client's row of the i-th common id; the order is public, random and the same at all clients."""

    rows: np.ndarray
    bytes_sent: int
    bytes_received: int

    @property
    def bytes_moved(self) -> int:
        """Both ways."""
        return self.bytes_sent + self.bytes_received


def align_as_leader(
    ids: Sequence[object],
    links: Mapping[str, socket.socket],
    *,
    name: str,
    pad_to: int | None = None,
    timeout: float = 600.0,
    advance: Advance | None = None,
) -> Alignment:
    """Align with the members in ``links`` (in this order, which all clients must know), as the client that compares.

    ``pad_to`` is a public bound on everybody's number of ids and hides the true ones. ``timeout`` bounds the wait for
    any one message: about 0.2 ms an id and client is computing time. ``advance(n)`` is told of every n blinded values.
    """
    terms = Terms((*links, name), pad_to)
    connections = [_Link(link, peer, timeout) for peer, link in links.items()]
    return _run(leader(terms, ids, secrets.token_bytes, advance or _silent), connections)


def align_as_member(
    ids: Sequence[object],
    link: socket.socket,
    *,
    name: str,
    clients: Sequence[str],
    pad_to: int | None = None,
    timeout: float = 600.0,
    advance: Advance | None = None,
) -> Alignment:
    """Align over a link to the leading client, the last of ``clients``; the other arguments as for the leader."""
    terms = Terms(tuple(clients), pad_to)
    return _run(
        member(terms, name, ids, secrets.token_bytes, advance or _silent), [_Link(link, terms.clients[-1], timeout)]
    )


def _silent(count: int) -> None:
    return


def _run(steps: Steps, links: Sequence[_Link]) -> Alignment:
    """Do what the protocol asks for; whoever fails tells the others why before it goes."""
    try:
        answer: bytes | None = None
        while True:
            step = next(steps) if answer is None else steps.send(answer)
            if isinstance(step, Send):
                links[step.to].send(step.kind, step.payload)
                answer = None
            else:
                answer = links[step.source].receive(step)
    except StopIteration as end:
        return Alignment(end.value, sum(link.sent for link in links), sum(link.received for link in links))
    except BaseException as error:
        # other errors (of the own ids, say) may name numbers that are nobody else's business
        reason = str(error) if isinstance(error, AlignmentError) else "it has a problem of its own, see there"
        for link in links:
            link.give_up(reason)
        raise


class _Link:
    """One connected socket, and how long to wait for the other end."""

    def __init__(self, connection: socket.socket, peer: str, timeout: float):
        require_real("timeout", timeout, 0.0, open_low=True)
        require(connection.fileno() >= 0, f"link to {peer!r}", "closed", "a connected socket")
        self._socket = connection
        self._peer = peer
        self._timeout = timeout
        self.sent = self.received = 0

    def send(self, kind: bytes, payload: bytes) -> None:
        self._socket.settimeout(self._timeout)
        try:
            self._socket.sendall(_HEADER.pack(kind, len(payload)))
            self._socket.sendall(payload)
        except OSError as error:
            told = self._their_reason()
            raise told or AlignmentError(f"client {self._peer!r} cannot be sent to: {error}") from error
        self.sent += _HEADER.size + len(payload)

    def receive(self, wanted: Receive) -> bytes:
        """The next message, if it is the one that is due; its length is checked before anything is kept."""
        deadline = time.monotonic() + self._timeout
        kind, length = _HEADER.unpack(self._exactly(_HEADER.size, deadline))
        if kind == _GAVE_UP and length <= _MAX_REASON:
            raise self._reason(self._exactly(length, deadline))
        if kind != wanted.kind or not wanted.low <= length <= wanted.high:
            raise AlignmentError(
                f"client {self._peer!r} sent a message of kind {kind!r} with {length} bytes, due is {wanted.kind!r} with "
                f"{wanted.low} to {wanted.high}: it runs another version or other terms"
            )
        return self._exactly(length, deadline)

    def give_up(self, reason: str) -> None:
        words = reason.encode()[:_MAX_REASON]
        with contextlib.suppress(OSError):
            self._socket.settimeout(1.0)
            self._socket.sendall(_HEADER.pack(_GAVE_UP, len(words)) + words)

    def _exactly(self, count: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                piece = self._socket.recv(min(count - len(data), 1 << 20))
            except TimeoutError as error:
                raise AlignmentError(f"client {self._peer!r} sent nothing for {self._timeout:g} s") from error
            except OSError as error:
                raise AlignmentError(f"the link to client {self._peer!r} broke: {error}") from error
            if not piece:
                raise AlignmentError(f"client {self._peer!r} closed the link before the alignment was complete")
            data += piece
        self.received += count
        return bytes(data)

    def _reason(self, words: bytes) -> AlignmentError:
        text = "".join(c if c.isprintable() else "?" for c in words.decode(errors="replace"))
        return AlignmentError(f"client {self._peer!r} gave up: {text}")

    def _their_reason(self) -> AlignmentError | None:
        """A peer that gave up has closed its end, but may have said why."""
        deadline = time.monotonic() + 1.0
        with contextlib.suppress(OSError, AlignmentError):
            kind, length = _HEADER.unpack(self._exactly(_HEADER.size, deadline))
            if kind == _GAVE_UP and length <= _MAX_REASON:
                return self._reason(self._exactly(length, deadline))
        return None
