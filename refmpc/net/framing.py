"""Framed messages between parties, and their channels between threads of one process (``refmpc.net.sockets``: over
TCP).

A frame is a 64-byte header (payload length, round number, the operation's name and its code, time of sending) and the
payload: all messages of one round on one link. The code is the checksum of the name plus what the caller passes:
between servers step, operation number and a digest of all public arguments (``refmpc.core.digest``), to and from
clients nothing. Length, round, operation and code are known to the receiver beforehand and compared with the header, so
a party out of step raises and never computes garbage. Payloads go out of, and into, numpy buffers without a copy.
Sending and receiving progress together, so two parties that send at once cannot block each other. Counted are payload
bytes and frames; ``FRAME_OVERHEAD`` bytes a frame come on top on the wire.

A party that fails says why (abort), one that is done says so (goodbye), and both leave the connection so that nothing
they sent before is lost: closing a socket that holds unread data would destroy what is still on its way.
"""

from __future__ import annotations

import functools
import queue
import struct
import time
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from accel.errors import InvalidArgument
from refmpc.core.errors import OutOfStep, PeerAborted, PeerLost, PeerTimeout
from refmpc.net.emulation import PROFILES, NetworkProfile, ReceivingLine

__all__ = [
    "FRAME_OVERHEAD",
    "Framing",
    "Peer",
    "ThreadTransport",
    "Transport",
    "as_bytes",
    "listed",
    "name_of",
    "named",
    "printable",
    "thread_links",
    "title",
]

Peer = Hashable  # 0, 1, 2 for the servers, a name for a client

_NAME_BYTES = 40
HEADER = struct.Struct(f"<QIIQ{_NAME_BYTES}s")
FRAME_OVERHEAD = HEADER.size
# payload lengths that no real frame has; the round number of an abort is the length of the reason that follows
ABORT, GOODBYE = 2**64 - 1, 2**64 - 2
ABORT_BYTES = 600
GRACE = 0.3  # seconds in which a peer that gave up at the same moment may still say why


def title(peer: Peer) -> str:
    """How sentences call a participant: by its name, a client as such."""
    return name_of(peer) if isinstance(peer, int) else f"client {peer!r}"


def name_of(peer: Peer) -> str:
    """The one name of a participant, in files, logs and folders: ``server-0``, or a client's own."""
    return f"server-{peer}" if isinstance(peer, int) else str(peer)


def listed(names: Iterable[str]) -> str:
    """Several names in a sentence: "a", "a and b", "a, b and c"."""
    every = list(names)
    return " and ".join([", ".join(every[:-1]), every[-1]] if len(every) > 1 else every)


def printable(text: str, limit: int = ABORT_BYTES) -> str:
    """Text that came from a peer, fit to be shown: no control characters, not too long."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:limit])


@functools.lru_cache(maxsize=1024)
def named(operation: str) -> tuple[int, bytes]:
    """How an operation appears in a header: the checksum of its name, and the beginning of it."""
    name = operation.encode()
    return zlib.crc32(name), name[:_NAME_BYTES]


class Transport(Protocol):
    """What a party needs of its channels."""

    timeout: float

    @property
    def bytes_sent(self) -> int: ...

    @property
    def frames_sent(self) -> int: ...

    @property
    def seconds_waiting(self) -> float: ...

    def exchange(
        self,
        operation: str,
        sends: Mapping[Peer, list[np.ndarray]],
        receives: Mapping[Peer, list[np.ndarray]],
        code: int = 0,
    ) -> None: ...

    def abort(self, reason: str) -> None: ...

    def close(self) -> None: ...


class Framing:
    """Round numbers, counters and the check of headers: the part that all transports share."""

    def __init__(self, peers: Iterable[Peer], timeout: float, profile: NetworkProfile):
        self.timeout = timeout
        self.places: dict[Peer, int] = {peer: place for place, peer in enumerate(dict.fromkeys(peers))}
        # in arrays, because compiled rounds count too
        self.counts = np.zeros((len(self.places), 2), dtype=np.int64)  # frames to and from every peer
        self.totals = np.zeros(3, dtype=np.int64)  # bytes and frames sent, nanoseconds waited
        self._lines = {peer: ReceivingLine(profile) for peer in self.places} if profile.is_slow else {}
        self._code = 0  # of the frames of the present exchange, on top of the operation's name
        self._said_why = False  # whether the peers were told that this party gives up

    @property
    def bytes_sent(self) -> int:
        """Bytes of payloads."""
        return int(self.totals[0])

    @property
    def frames_sent(self) -> int:
        """To all peers."""
        return int(self.totals[1])

    @property
    def seconds_waiting(self) -> float:
        """For frames of peers."""
        return float(self.totals[2]) * 1e-9

    def _require_participants(self, peers: Iterable[Peer]) -> None:
        for peer in peers:
            if peer not in self.places:
                known = ", ".join(map(title, self.places))
                raise InvalidArgument(f"{title(peer)} takes no part in this run; this party is connected with: {known}")

    def begin(self, code: int) -> None:
        """An exchange under this code begins."""
        self._code = code

    def count_sent(self, peer: Peer, size: int) -> int:
        """Count a frame to a peer; returns its number."""
        self.totals[:2] += size, 1
        self.counts[self.places[peer], 0] += 1
        return self.sent_to(peer)

    def sent_to(self, peer: Peer) -> int:
        """How many frames went to a peer."""
        return int(self.counts[self.places[peer], 0])

    def expected_message(self, peer: Peer) -> int:
        """The number of the next frame from a peer."""
        return int(self.counts[self.places[peer], 1]) + 1

    def count_received(self, peer: Peer) -> None:
        """Count a frame from a peer."""
        self.counts[self.places[peer], 1] += 1

    def count_waiting(self, seconds: float) -> None:
        """Count time in which nothing was to be done."""
        self.totals[2] += round(seconds * 1e9)

    def _header(self, peer: Peer, operation: str, payload: list[np.ndarray]) -> bytes:
        size = sum(part.nbytes for part in payload)
        number = self.count_sent(peer, size)
        code, name = named(operation)
        return HEADER.pack(size, number, (code + self._code) & 0xFFFFFFFF, time.monotonic_ns(), name)

    def _check(self, peer: Peer, operation: str, header: bytes, size: int) -> float:
        """Compare a header with what is expected; returns the time of sending."""
        got_size, got_round, got_code, sent_ns, got_name = HEADER.unpack(header)
        expected_round = self.expected_message(peer)
        if got_size == GOODBYE:
            raise OutOfStep(
                f"{title(peer)} has ended its program after {got_round} messages, "
                f"this party expects message {expected_round} of '{operation}'"
            )
        code, name = named(operation)
        same_code = got_code == (code + self._code) & 0xFFFFFFFF
        if got_round != expected_round or not (same_code or got_name.rstrip(b"\0") == name):
            theirs = printable(got_name.rstrip(b"\0").decode(errors="replace"))
            raise OutOfStep(
                f"{title(peer)} is out of step: it sent message {got_round} of '{theirs}', "
                f"this party expects message {expected_round} of '{operation}'"
            )
        if got_size != size:
            raise OutOfStep(
                f"{title(peer)} sent {got_size} bytes in '{operation}' (message {got_round}), this party expects "
                f"{size}: the parties run on different shapes or parameters"
            )
        if not same_code:
            raise OutOfStep(
                f"{title(peer)} is out of step in '{operation}' (message {got_round}): its step, its number of "
                "operations or its public arguments (shapes, scales, ranges, tables, public numbers, order) differ"
            )
        return sent_ns * 1e-9

    def _wait_for_arrival(self, peer: Peer, sent_at: float, size: int) -> None:
        if self._lines:
            self.count_waiting(self._lines[peer].wait_for_arrival(sent_at, size))

    def _timed_out(self, peers: Iterable[Peer], operation: str, doing: str) -> PeerTimeout:
        names = listed(f"{title(peer)} (message {self.expected_message(peer)})" for peer in peers)
        return PeerTimeout(
            f"{names} {doing} in '{operation}' for {self.timeout:g} s: it hangs, is stopped or its network is down"
        )

    def _aborted(self, peer: Peer, operation: str, reason: str) -> PeerAborted:
        return PeerAborted(f"{title(peer)} gave up while this party was in '{operation}': {printable(reason)}")

    def _lost(self, peer: Peer, operation: str) -> PeerLost:
        return PeerLost(
            f"{title(peer)} closed the connection in '{operation}' (message {self.expected_message(peer)}): "
            "it died or was killed"
        )


class ThreadTransport(Framing):
    """Channels between threads of one process: one queue per directed link."""

    def __init__(
        self,
        outgoing: Mapping[Peer, queue.SimpleQueue[Any]],
        incoming: Mapping[Peer, queue.SimpleQueue[Any]],
        timeout: float,
        profile: NetworkProfile = PROFILES["loopback"],
    ):
        super().__init__(outgoing, timeout, profile)
        self._outgoing = dict(outgoing)
        self._incoming = dict(incoming)

    def exchange(
        self,
        operation: str,
        sends: Mapping[Peer, list[np.ndarray]],
        receives: Mapping[Peer, list[np.ndarray]],
        code: int = 0,
    ) -> None:
        """Send and receive one frame per named peer. All ends of a frame pass the same ``code``. The other thread gets
        copies: it may read them after this one has gone on, and a recorded step writes to the same memory again."""
        self._code = code
        self._require_participants((*sends, *receives))
        for peer, payload in sends.items():
            copies = [part.copy() for part in payload]
            self._outgoing[peer].put((self._header(peer, operation, copies), copies))
        for peer, parts in receives.items():
            begun = time.monotonic()
            try:
                header, payload = self._take(peer, operation)
            finally:
                self.count_waiting(time.monotonic() - begun)
            size = sum(part.nbytes for part in parts)
            sent_at = self._check(peer, operation, header, size)
            self.count_received(peer)
            self._wait_for_arrival(peer, sent_at, size)
            _copy(payload, parts)

    def prepare(
        self, operation: str, sends: Mapping[Peer, list[np.ndarray]], receives: Mapping[Peer, list[np.ndarray]]
    ) -> Callable[[int], None]:
        """An exchange to be carried out many times, each under its own code."""
        return functools.partial(self.exchange, operation, sends, receives)

    def _take(self, peer: Peer, operation: str) -> tuple[bytes, Any]:
        link = self._incoming[peer]
        try:
            header, payload = link.get(timeout=self.timeout)
        except queue.Empty:
            late = self._timed_out([peer], operation, "sent nothing")
            self.abort(str(late))
            try:  # the peer may have waited just as long for another one, and name it
                header, payload = link.get(timeout=GRACE)
            except queue.Empty:
                raise late from None
            if header is not None:
                raise late from None
        if header is None:
            raise self._aborted(peer, operation, payload)
        return header, payload

    def abort(self, reason: str) -> None:
        """Tell every peer that this party ends."""
        if not self._said_why:
            self._said_why = True
            for link in self._outgoing.values():
                link.put((None, reason))

    def close(self) -> None:
        """Say goodbye; the queues go with the run."""
        if not self._said_why:
            for peer, link in self._outgoing.items():
                link.put((HEADER.pack(GOODBYE, self.sent_to(peer), 0, 0, b""), []))


def _copy(payload: list[np.ndarray], parts: list[np.ndarray]) -> None:
    """Copy a message of the right size into the expected arrays, however it is divided."""
    if [part.nbytes for part in parts] != [part.nbytes for part in payload]:
        payload = np.split(
            np.concatenate([as_bytes(part) for part in payload]), np.cumsum([part.nbytes for part in parts])[:-1]
        )
    for part, message in zip(parts, payload, strict=True):
        as_bytes(part, writable=True)[:] = as_bytes(message)


def thread_links(peers: Iterable[Peer]) -> Callable[[Peer], tuple[dict[Peer, Any], dict[Peer, Any]]]:
    """Queues between all ``peers``; the result gives one peer's (outgoing, incoming)."""
    names = list(peers)
    links: dict[tuple[Peer, Peer], queue.SimpleQueue[Any]] = {
        (a, b): queue.SimpleQueue() for a in names for b in names if a != b
    }

    def ends(me: Peer) -> tuple[dict[Peer, Any], dict[Peer, Any]]:
        return {b: links[me, b] for b in names if b != me}, {b: links[b, me] for b in names if b != me}

    return ends


def as_bytes(array: np.ndarray, writable: bool = False) -> Any:
    """The memory of an array as bytes."""
    if writable:
        require_contiguous(array)
    return array.reshape(-1).view(np.uint8)


def require_contiguous(array: np.ndarray) -> None:
    """Refuse an array that cannot receive: reading it as bytes would make a copy, and what arrives would be lost."""
    if not array.flags.c_contiguous:
        raise InvalidArgument(
            f"an array of shape {array.shape} and strides {array.strides} cannot receive: not contiguous"
        )
