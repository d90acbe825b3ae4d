"""A client's way to the three servers: what it sends is kept by all three before it counts as sent, whatever breaks.

``UplinkTransport`` is what a client program talks to. A message goes to the three servers and is acknowledged by each
when it is on its disk; a few messages (``WINDOW`` bytes) may be under way at a time, so that nobody waits for a disk or
a link. If a connection breaks, the client calls again, asks what each server has kept, and sends the rest once more;
the same if the client itself was started again, in which case messages that all three have are not sent once more. Each
server alone learns shares, which are uniform; two sharings of the same rows are independent of each other.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from protocols.log import Log
from protocols.net.backoff import Backoff
from protocols.net.server_calls import SERVERS, Delivered, ServerCalls
from protocols.net.spool import START, chain
from protocols.net.wire import Identity, Refused
from refmpc.core.errors import HandshakeError, PeerLost, PeerTimeout, RefmpcError
from refmpc.net.framing import Peer

__all__ = ["WINDOW", "UplinkTransport", "UploadLost"]

WINDOW = 32 << 20  # bytes of messages that servers have not acknowledged


class UploadLost(RefmpcError):
    """The servers do not have what they had acknowledged: the upload must begin again from what they have."""


@dataclass
class _Piece:
    """A message that not all servers have acknowledged."""

    operation: str
    token: str
    parts: Mapping[Peer, list[np.ndarray]]

    @property
    def size(self) -> int:
        return sum(part.nbytes for parts in self.parts.values() for part in parts)


class UplinkTransport(ServerCalls):
    """One session of one client. Messages that all three servers have, from an earlier life of the client, are not sent
    again."""

    def __init__(self, identity: Identity, log: Log, *, anew: bool = False, **options: Any):
        super().__init__(identity, log, **options)
        self._anew = anew  # what the servers have is of other columns than these
        self.bytes_sent = self.frames_sent = 0
        self.seconds_waiting = 0.0
        self._digests = [START]  # after 0, 1, … messages, those under way too
        self._pieces: dict[int, _Piece] = {}  # under way, by number
        self._next = 0  # number of the program's next message
        self._complete = False
        self._sealed: set[int] = set()
        self._results: Delivered | None = None
        self._interruptions = Backoff(longest=60.0)
        self.resumed = self._meet_servers(first=True)

    # sending -------------------------------------------------------------------------------------

    def exchange(
        self,
        operation: str,
        sends: Mapping[Peer, list[np.ndarray]],
        receives: Mapping[Peer, list[np.ndarray]],
        code: int = 0,
    ) -> None:
        """As every transport. A message to the servers is under way when this returns; ``complete`` waits for all."""
        if sends:
            self._send(operation, sends)
        if receives:
            self._receive(operation, receives)

    def _send(self, operation: str, messages: Mapping[Peer, list[np.ndarray]]) -> None:
        index, self._next = self._next, self._next + 1
        if index < self.resumed or self._complete:
            return  # kept by all three servers in an earlier life of this client
        piece = _Piece(operation, secrets.token_hex(16), messages)
        self._pieces[index] = piece
        self._digests.append(chain(self._digests[-1], piece.token))
        self._persist(lambda: self._post(index))
        while self._pieces and sum(each.size for each in self._pieces.values()) > WINDOW:
            self._persist(self._acknowledgements)

    def _persist(self, work: Callable[[], None]) -> None:
        """Do it; whatever breaks, call the servers again, and send what they lack."""
        while True:
            try:
                work()
                return
            except (PeerLost, PeerTimeout, Refused) as error:
                if isinstance(error, Refused) and not error.later:
                    raise
                first = min(self._pieces, default=self._next)
                self._log.warning("an upload was interrupted", reason=str(error), kept=first)
                self._interruptions.wait()  # a server that fails at once must not be flooded
            self._meet_servers()
            work = self._resend

    def _resend(self) -> None:
        for index in sorted(self._pieces):
            self._post(index)
        while self._pieces:
            self._acknowledgements()

    def _post(self, index: int) -> None:
        piece = self._pieces[index]
        for server in SERVERS:
            head = {"message": index, "operation": piece.operation, "token": piece.token}
            self._channels[server].send(head, piece.parts[server])

    def _acknowledgements(self) -> None:
        """Acknowledgements of the oldest message under way: it is on the disk of each server."""
        for server in SERVERS:
            self._channels[server].receive()
        self._interruptions.reset()
        self._kept(min(self._pieces))

    def _kept(self, index: int) -> None:
        piece = self._pieces.pop(index)
        self.bytes_sent += piece.size
        self.frames_sent += len(piece.parts)

    def complete(self) -> None:
        """Everything was sent: the servers keep it as it is, and may begin."""
        while self._pieces:
            self._persist(self._acknowledgements)
        while not self._complete:
            self._persist(self._seal)
        self._hang_up()

    def _seal(self) -> None:
        if self._complete:
            return
        while self._pieces:
            self._acknowledgements()
        for server in SERVERS:
            if server not in self._sealed:
                self._channels[server].send({"complete": self._next, "digest": self._digests[-1]})
                self._channels[server].receive()
        self._complete = True

    def _meet_servers(self, *, first: bool = False) -> int:
        """Call the servers until all three answer; all go on from what each of them has. Returns how many messages."""
        backoff = Backoff()
        while True:
            self._hang_up()
            try:
                begin = self._agree(first)
                self._waiting.over("the servers")
                return begin
            except (PeerLost, PeerTimeout) as error:
                self._waiting.on("the servers", str(error))
            except Refused as error:
                if not error.later:
                    raise
                self._waiting.on("the servers", str(error))
            backoff.wait()

    def _agree(self, first: bool) -> int:
        answers = {server: self._call(server, "upload") for server in SERVERS}
        for server, answer in answers.items():
            self._compare(server, answer.get("parameters"))
        self._sealed = {server for server in SERVERS if answers[server]["complete"]}
        begin: int = min(answer["kept"] for answer in answers.values())
        if self._anew and first:
            return self._start_again(first)
        if len(self._sealed) == 3:
            self._complete = True
            self._pieces.clear()
            return begin
        acknowledged = min(self._pieces, default=len(self._digests) - 1)
        if not first and begin < acknowledged:
            raise UploadLost(f"a server has {begin} messages only, {acknowledged} were acknowledged")
        found = {str(answers[server]["digest"]) for server in self._sealed}
        for server in set(SERVERS) - self._sealed:
            self._channels[server].send({"from": begin})
            found.add(str(self._channels[server].receive()[0]["digest"]))
        if len(found) > 1 or (not first and (begin >= len(self._digests) or found != {self._digests[begin]})):
            return self._start_again(first)
        if first:
            self._digests = [*[""] * begin, found.pop()]
        for index in [index for index in self._pieces if index < begin]:
            self._kept(index)
        return begin

    def _start_again(self, first: bool) -> int:
        """The servers hold different sharings (an upload of this client was mixed up with an earlier one)."""
        if self._sealed:
            raise HandshakeError(
                "the servers have already closed this client's upload, and it differs: either the columns are not "
                "those shared before (use that file and those options), or a server has lost its state "
                "(start a new run)"
            )
        for server in SERVERS:
            self._channels[server].send({"from": 0})
            self._channels[server].receive()
        if not first:
            raise UploadLost("the servers held different uploads of this client, and threw them away")
        return 0

    # receiving -----------------------------------------------------------------------------------

    def _receive(self, operation: str, receives: Mapping[Peer, list[np.ndarray]]) -> None:
        if self._results is None:
            self.complete()
            self._results = self._fetch()
        self._results.exchange(operation, {}, receives)

    def abort(self, reason: str) -> None:
        """A client that fails may come back: the servers need no reason."""
        self._hang_up()

    def close(self) -> None:
        self._hang_up()
