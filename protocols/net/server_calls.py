"""A client's calls to the three servers about one session, and the result that it fetches when they have one.

Servers keep a client's result until it comes for it. Each has one part, uniform on its own, and only parts of one and
the same attempt belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from protocols.log import Log
from protocols.net.backoff import Backoff
from protocols.net.waiting import Waiting
from protocols.net.wire import Channel, Identity, Refused, call
from refmpc.core.errors import HandshakeError, OutOfStep, PeerLost, PeerTimeout, RefmpcError
from refmpc.net.framing import Peer, name_of, printable

__all__ = ["SERVERS", "Beat", "CurvePoint", "Delivered", "ServerCalls"]

SERVERS = range(3)

Beat = Callable[[Mapping[str, Any]], None]
CurvePoint = tuple[int, float, float]  # epoch, accuracy, loss


class ServerCalls:
    """One session of one client. ``on_beat`` gets what the servers say while the client waits; ``people`` is a keyed
    tag of whose data it shares."""

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
        people: str | None = None,
        on_beat: Beat = lambda progress: None,
    ):
        self._identity, self._log = identity, log
        self._facts = {"kind": kind, "session": session, "rows": rows, "output": output, "people": people}
        self._parameters = parameters
        self._largest_result = largest_result
        self._on_beat = on_beat
        self.timeout = identity.config.run.timeout  # of a program: it may wait for a result as long as training takes
        self._channel_timeout = identity.config.run.timeout  # of a call: servers give signs of life all the time
        self._channels: dict[int, Channel] = {}
        self._waiting = Waiting(log)
        self.curve: tuple[CurvePoint, ...] = ()  # on public rows, as the three servers tell it with the result

    def _compare(self, server: int, theirs: Any) -> None:
        """Refuse a server whose plan differs: before anything is shared with it."""
        difference = self._identity.difference(server, theirs, self._parameters)
        if difference:
            raise HandshakeError(difference)

    def _fetch(self) -> Delivered:
        """Wait for the three servers' parts of the same attempt."""
        backoff = Backoff()
        while True:
            self._hang_up()
            try:
                for server in SERVERS:
                    self._call(server, "result")
                results = self._wait_for_results()
                if len({str(head["attempt"]) for head, _ in results.values()}) == 1:
                    self._waiting.over()
                    self.curve = self._curve_of([head for head, _ in results.values()])
                    return Delivered(results)
                self._waiting.on(
                    "the servers", "they are between two attempts: their results do not belong together yet"
                )
            except (PeerLost, PeerTimeout) as error:
                self._waiting.on("the servers", str(error))
            backoff.wait()

    def _curve_of(self, heads: Sequence[Mapping[str, Any]]) -> tuple[CurvePoint, ...]:
        """What all three say of the public rows; nothing if one of them says something else."""
        told = [head.get("curve") or [] for head in heads]
        try:
            curves = [tuple((int(epoch), float(right), float(loss)) for epoch, right, loss in one) for one in told]
        except (TypeError, ValueError):
            curves = [(), ((0, 0.0, 0.0),)]
        if any(curve != curves[0] for curve in curves):
            reason = "the servers do not tell the same: it is left out of the model's file"
            self._log.warning("the learning curve on public rows", reason=reason)
            return ()
        return curves[0]

    def _wait_for_results(self) -> dict[int, tuple[dict[str, Any], bytearray]]:
        """All servers give signs of life at the same pace, so they are listened to in turn."""
        results: dict[int, tuple[dict[str, Any], bytearray]] = {}
        while len(results) < 3:
            for server in set(SERVERS) - results.keys():
                message, payload = self._channels[server].receive(limit=self._largest_result)
                if "progress" not in message:
                    results[server] = message, payload
                    continue
                if server == min(set(SERVERS) - results.keys()):
                    self._heed(message)
                self._channels[server].send({"waiting": True})
        return results

    def _heed(self, beat: Mapping[str, Any]) -> None:
        """A server's sign of life: what it is doing, and whom everybody waits for."""
        self._waiting.over("the servers")
        missing = [printable(str(name), 40) for name in beat.get("missing") or ()]
        for wait in self._waiting.now:
            if wait.whom not in missing:
                self._waiting.over(wait.whom)
        for name in missing:
            self._waiting.on(name, "the servers cannot begin without it")
        self._on_beat(beat)

    def confirm(self) -> None:
        """Tell the servers that this client has its result, and has kept it: they may forget it now, and end."""
        self._hang_up()
        for server in SERVERS:
            try:
                self._call(server, "taken")
            except RefmpcError as error:  # the result is here; the server only goes on listening
                self._log.warning("a server could not be told that the result arrived", reason=str(error))
        self._hang_up()

    def _call(self, server: int, purpose: str) -> dict[str, Any]:
        address = self._identity.config.addresses[server]
        try:
            channel, answer = call(
                self._identity, server, address, purpose, timeout=self._channel_timeout, **self._facts
            )
        except Refused as error:
            if error.later:
                raise PeerLost(str(error)) from error
            raise
        self._channels[server] = channel
        return answer

    def _hang_up(self) -> None:
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()


class Delivered:
    """A result as a transport: a program receives from it, in the order in which the servers' program sent."""

    def __init__(self, results: Mapping[int, tuple[Mapping[str, Any], bytearray]]):
        self._waiting = {server: _split(head, payload) for server, (head, payload) in results.items()}
        self.timeout = 0.0
        self.bytes_sent = self.frames_sent = 0
        self.seconds_waiting = 0.0

    def exchange(
        self,
        operation: str,
        sends: Mapping[Peer, list[np.ndarray]],
        receives: Mapping[Peer, list[np.ndarray]],
        code: int = 0,
    ) -> None:
        """As every transport, but there is nobody to send to."""
        if sends:
            raise OutOfStep(f"'{operation}' would send to servers that have finished")
        for server, parts in receives.items():
            waiting = self._waiting[int(str(server))]
            name, words = waiting.pop(0) if waiting else ("nothing", b"")
            if name != operation or len(words) != sum(part.nbytes for part in parts):
                raise OutOfStep(f"{name_of(server)} has {name!r} with {len(words)} bytes, '{operation}' is expected")
            at = 0
            for part in parts:
                part.reshape(-1).view(np.uint8)[:] = np.frombuffer(words[at : at + part.nbytes], dtype=np.uint8)
                at += part.nbytes

    def abort(self, reason: str) -> None:
        """Nobody listens."""

    def close(self) -> None:
        """Nothing is open."""


def _split(head: Mapping[str, Any], payload: bytearray) -> list[tuple[str, bytes]]:
    found, at = [], 0
    for operation, size in head["messages"]:
        found.append((str(operation), bytes(payload[at : at + size])))
        at += size
    return found
