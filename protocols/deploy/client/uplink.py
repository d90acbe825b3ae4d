"""A client's way to the three servers: what it sends is kept by all three before it counts as sent, whatever breaks.

``UplinkTransport`` is what a client program talks to. A message goes to the three servers and is acknowledged by each when
it is on its disk. If a connection breaks, the client calls again, asks what each server has kept, and goes on from there;
the same if the client itself was started again, in which case messages that all three have are not sent once more.
Each server alone learns shares, which are uniform; two sharings of the same rows are independent of each other.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np

from protocols.deploy.client.server_calls import SERVERS, Delivered, ServerCalls
from protocols.deploy.net.backoff import Backoff
from protocols.deploy.net.wire import Identity
from protocols.deploy.records.log import Log
from protocols.deploy.server.spool import START, chain
from refmpc.core.errors import HandshakeError, PeerLost, PeerTimeout, RefmpcError
from refmpc.net.framing import Peer

__all__ = ["UplinkTransport", "UploadLost"]


class UploadLost(RefmpcError):
    """The servers do not have what they had acknowledged: the upload must begin again from what they have."""


class UplinkTransport(ServerCalls):
    """One session of one client. ``kept`` messages, from an earlier life of the client, are not sent again."""

    def __init__(self, identity: Identity, log: Log, *, anew: bool = False, **options: Any):
        super().__init__(identity, log, **options)
        self._anew = anew  # what the servers have is of other columns than these
        self.bytes_sent = self.frames_sent = 0
        self.seconds_waiting = 0.0
        self._digests = [START]  # of what all three servers have kept, after 0, 1, … messages
        self._next = 0  # number of the program's next message
        self._complete = False
        self._sealed: set[int] = set()
        self._results: Delivered | None = None
        self.resumed = self._meet_servers(None)

    # sending -------------------------------------------------------------------------------------

    def exchange(
        self,
        operation: str,
        sends: Mapping[Peer, list[np.ndarray]],
        receives: Mapping[Peer, list[np.ndarray]],
        code: int = 0,
    ) -> None:
        """As every transport. A message to the servers returns when all three have it on disk."""
        if sends:
            self._send(operation, sends)
        if receives:
            self._receive(operation, receives)

    def _send(self, operation: str, messages: Mapping[Peer, list[np.ndarray]]) -> None:
        index, self._next = self._next, self._next + 1
        if index < self.resumed or self._complete:
            return  # kept by all three servers in an earlier life of this client
        token = secrets.token_hex(16)
        while True:
            try:
                for server in SERVERS:
                    head = {"message": index, "operation": operation, "token": token}
                    self._channels[server].send(head, messages[server])
                for server in SERVERS:
                    self._channels[server].receive()
                self._digests.append(chain(self._digests[-1], token))
                break
            except (PeerLost, PeerTimeout) as error:
                self._log.warning("an upload was interrupted", reason=str(error), kept=index)
                if self._meet_servers(chain(self._digests[-1], token)) > index:
                    break
        self.bytes_sent += sum(part.nbytes for parts in messages.values() for part in parts)
        self.frames_sent += len(messages)

    def complete(self) -> None:
        """Everything was sent: the servers keep it as it is, and may begin."""
        while not self._complete:
            try:
                for server in SERVERS:
                    if server not in self._sealed:
                        self._channels[server].send({"complete": self._next, "digest": self._digests[-1]})
                        self._channels[server].receive()
                self._complete = True
            except (PeerLost, PeerTimeout) as error:
                self._log.warning("an upload was interrupted", reason=str(error), kept=self._next)
                self._meet_servers(self._digests[-1])
        self._hang_up()

    def _meet_servers(self, newest: str | None) -> int:
        """Call the servers until all three answer; all go on from what each of them has. Returns how many messages.

        ``newest`` is the digest after the message that was under way; None at the start of this client.
        """
        backoff = Backoff()
        while True:
            self._hang_up()
            try:
                return self._agree(newest)
            except (PeerLost, PeerTimeout) as error:
                self._complain(str(error))
            backoff.wait()

    def _agree(self, newest: str | None) -> int:
        answers = {server: self._call(server, "upload") for server in SERVERS}
        for server, answer in answers.items():
            self._compare(server, answer.get("parameters"))
        self._sealed = {server for server in SERVERS if answers[server]["complete"]}
        begin: int = min(answer["kept"] for answer in answers.values())
        if self._anew and newest is None:
            return self._start_again(newest)
        if len(self._sealed) == 3:
            self._complete = True
            return begin
        if newest is not None and begin < len(self._digests) - 1:
            raise UploadLost(f"a server has {begin} messages only, {len(self._digests) - 1} were acknowledged")
        found = {str(answers[server]["digest"]) for server in self._sealed}
        for server in set(SERVERS) - self._sealed:
            self._channels[server].send({"from": begin})
            found.add(str(self._channels[server].receive()[0]["digest"]))
        if len(found) > 1 or (newest is not None and found != {[*self._digests, newest][begin]}):
            return self._start_again(newest)
        if newest is None:
            self._digests = [*[""] * begin, found.pop()]
        elif begin == len(self._digests):
            self._digests.append(newest)
        return begin

    def _start_again(self, newest: str | None) -> int:
        """The servers hold different sharings (an upload of this client was mixed up with an earlier one)."""
        if self._sealed:
            raise HandshakeError(
                "the servers have closed an upload of this client that cannot be continued: these are other columns than "
                "those shared then (use that file and those options), or a server has lost its state (start a new run)"
            )
        for server in SERVERS:
            self._channels[server].send({"from": 0})
            self._channels[server].receive()
        if newest is not None:
            raise UploadLost("the servers held different uploads of this client, and threw them away")
        return 0

    # receiving -----------------------------------------------------------------------------------

    def _receive(self, operation: str, receives: Mapping[Peer, list[np.ndarray]]) -> None:
        if self._results is None:
            self.complete()
            self._results = self._fetch()
            self._confirm()
        self._results.exchange(operation, {}, receives)

    def abort(self, reason: str) -> None:
        """A client that fails may come back: the servers need no reason."""
        self._hang_up()

    def close(self) -> None:
        self._hang_up()
