"""A client's way to the three servers: what it sends is kept by all three before it counts as sent, whatever breaks.

``UplinkTransport`` is what a client program talks to. A message goes to the three servers and is acknowledged by each when
it is on its disk. If a connection breaks, the client calls again, asks what each server has kept, and goes on from there;
the same if the client itself was started again, in which case messages that all three have are not sent once more.
Each server alone learns shares, which are uniform; two sharings of the same rows are independent of each other.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from protocols.deploy.log import Log
from protocols.deploy.spool import START, chain
from protocols.deploy.wire import Channel, Identity, Refused, call, name_of
from refmpc.errors import HandshakeError, OutOfStep, PeerLost, PeerTimeout, RefmpcError
from refmpc.transport import Peer

__all__ = ["UplinkTransport", "UploadLost"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0  # seconds before a server is called again
_QUIET = 30.0  # seconds between two lines on a server that does not answer
_SERVERS = range(3)

Beat = Callable[[Mapping[str, Any]], None]


class UploadLost(RefmpcError):
    """The servers do not have what they had acknowledged: the upload must begin again from what they have."""


class UplinkTransport:
    """One session of one client. ``kept`` messages, from an earlier life of the client, are not sent again."""

    def __init__(
        self,
        identity: Identity,
        log: Log,
        *,
        kind: str,
        session: str,
        rows: int,
        output: str | None = None,
        parameters: Mapping[str, Any],
        largest_result: int,
        anew: bool = False,
        on_beat: Beat = lambda progress: None,
    ):
        self._identity, self._log = identity, log
        self._facts = {"kind": kind, "session": session, "rows": rows, "output": output}
        self._parameters = parameters
        self._largest_result = largest_result
        self._anew = anew  # what the servers have is of other columns than these
        self._on_beat = on_beat
        self.timeout = identity.config.run.timeout
        self.bytes_sent = self.frames_sent = 0
        self.seconds_waiting = 0.0
        self._channels: dict[int, Channel] = {}
        self._digests = [START]  # of what all three servers have kept, after 0, 1, … messages
        self._next = 0  # number of the program's next message
        self._complete = False
        self._sealed: set[int] = set()
        self._results: list[list[tuple[str, bytes]]] | None = None
        self._complained: dict[str, float] = {}
        self.resumed = self._meet_servers(None)

    # sending -------------------------------------------------------------------------------------

    def exchange(
        self, operation: str, sends: Mapping[Peer, list[np.ndarray]], receives: Mapping[Peer, list[np.ndarray]]
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
                for server in _SERVERS:
                    head = {"message": index, "operation": operation, "token": token}
                    self._channels[server].send(head, messages[server])
                for server in _SERVERS:
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
                for server in _SERVERS:
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
        pause = _FIRST_PAUSE
        while True:
            self._hang_up()
            try:
                return self._agree(newest)
            except (PeerLost, PeerTimeout) as error:
                self._complain(str(error))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _agree(self, newest: str | None) -> int:
        answers = {server: self._call(server, "upload", self._facts) for server in _SERVERS}
        for server, answer in answers.items():
            self._compare(server, answer.get("parameters"))
        self._sealed = {server for server in _SERVERS if answers[server]["complete"]}
        begin = min(answer["kept"] for answer in answers.values())
        if self._anew and newest is None:
            return self._start_again(newest)
        if len(self._sealed) == 3:
            self._complete = True
            return begin
        if newest is not None and begin < len(self._digests) - 1:
            raise UploadLost(f"a server has {begin} messages only, {len(self._digests) - 1} were acknowledged")
        found = {str(answers[server]["digest"]) for server in self._sealed}
        for server in set(_SERVERS) - self._sealed:
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
        for server in _SERVERS:
            self._channels[server].send({"from": 0})
            self._channels[server].receive()
        if newest is not None:
            raise UploadLost("the servers held different uploads of this client, and threw them away")
        return 0

    def _compare(self, server: int, theirs: Any) -> None:
        """Refuse a server whose plan differs: before anything is shared with it."""
        difference = self._identity.difference(server, theirs, self._parameters)
        if difference:
            raise HandshakeError(difference)

    # receiving -----------------------------------------------------------------------------------

    def _receive(self, operation: str, receives: Mapping[Peer, list[np.ndarray]]) -> None:
        if self._results is None:
            self.complete()
            self._results = self._fetch()
        for server, parts in receives.items():
            waiting = self._results[int(str(server))]
            name, words = waiting.pop(0) if waiting else ("nothing", b"")
            if name != operation or len(words) != sum(part.nbytes for part in parts):
                raise OutOfStep(f"{name_of(server)} has {name!r} with {len(words)} bytes, '{operation}' is expected")
            at = 0
            for part in parts:
                part.reshape(-1).view(np.uint8)[:] = np.frombuffer(words[at : at + part.nbytes], dtype=np.uint8)
                at += part.nbytes

    def _fetch(self) -> list[list[tuple[str, bytes]]]:
        """Wait for the three servers' parts of one and the same attempt, and tell them that they arrived."""
        pause = _FIRST_PAUSE
        while True:
            self._hang_up()
            try:
                for server in _SERVERS:
                    self._call(server, "result", self._facts)
                results = self._wait_for_results()
                attempts = {str(head["attempt"]) for head, _ in results.values()}
                if len(attempts) == 1:
                    self._confirm(attempts.pop())
                    return [_split(*results[server]) for server in _SERVERS]
                self._complain("the servers are between two attempts: their results do not belong together yet")
            except (PeerLost, PeerTimeout) as error:
                self._complain(str(error))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _wait_for_results(self) -> dict[int, tuple[dict[str, Any], bytearray]]:
        """All servers give signs of life at the same pace, so they are listened to in turn."""
        results: dict[int, tuple[dict[str, Any], bytearray]] = {}
        while len(results) < 3:
            for server in set(_SERVERS) - results.keys():
                message, payload = self._channels[server].receive(limit=self._largest_result)
                if "progress" not in message:
                    results[server] = message, payload
                    continue
                if server == min(set(_SERVERS) - results.keys()):
                    self._on_beat(message)
                self._channels[server].send({"waiting": True})
        return results

    def _confirm(self, attempt: str) -> None:
        self._hang_up()
        for server in _SERVERS:
            try:
                self._call(server, "taken", {**self._facts, "attempt": attempt})
            except RefmpcError as error:  # the result is here; the server only goes on listening
                self._log.warning("a server could not be told that the result arrived", reason=str(error))
        self._hang_up()

    # calls ---------------------------------------------------------------------------------------

    def _call(self, server: int, purpose: str, facts: Mapping[str, Any]) -> dict[str, Any]:
        address = self._identity.config.addresses[server]
        try:
            channel, answer = call(self._identity, server, address, purpose, timeout=self.timeout, **facts)
        except Refused as error:
            if error.later:
                raise PeerLost(str(error)) from error
            raise
        self._channels[server] = channel
        self._complained.pop(name_of(server), None)
        return answer

    def _complain(self, why: str) -> None:
        now = time.monotonic()
        if now - self._complained.get(why, -_QUIET) >= _QUIET:
            self._complained[why] = now
            self._log.warning("waiting for a server", reason=why)

    def _hang_up(self) -> None:
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    def abort(self, reason: str) -> None:
        """A client that fails may come back: the servers need no reason."""
        self._hang_up()

    def close(self) -> None:
        self._hang_up()


def _split(head: Mapping[str, Any], payload: bytearray) -> list[tuple[str, bytes]]:
    found, at = [], 0
    for operation, size in head["messages"]:
        found.append((str(operation), bytes(payload[at : at + size])))
        at += size
    return found
