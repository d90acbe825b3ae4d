"""What a server keeps of its clients: the messages each has sent, on disk before they are acknowledged.

So a client may go away and come back, and the servers can begin an attempt of the training anew without any client.
A message is a client's share for this server (uniform on its own) behind a line that names it. Every message carries a
random token, the same at the three servers; the chain of tokens tells whether the three hold the same sharing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from accel.files import private_folder, write_bytes
from refmpc.core.errors import OutOfStep
from refmpc.net.framing import Peer
from refmpc.net.sockets import SocketTransport

__all__ = ["START", "Spool", "SpoolTransport", "chain", "publish", "published"]

START = hashlib.sha256(b"ppvfl upload").hexdigest()
_COMPLETE = "complete.json"


def chain(digest: str, token: str) -> str:
    """The digest of a sequence of messages, one more than ``digest`` stands for."""
    return hashlib.sha256(f"{digest} {token}".encode()).hexdigest()


class Spool:
    """The messages of one client at one server, numbered from 0."""

    def __init__(self, directory: Path):
        private_folder(directory)
        self._directory = directory
        self._digests = [START]  # after 0, 1, … messages
        while (file := self._file(self.count)).exists():
            with file.open("rb") as handle:
                self._digests.append(chain(self._digests[-1], json.loads(handle.readline())["token"]))

    @property
    def count(self) -> int:
        """Messages kept."""
        return len(self._digests) - 1

    @property
    def digest(self) -> str:
        """Of the tokens of all messages kept."""
        return self._digests[-1]

    @property
    def complete(self) -> bool:
        """Whether the client has said that it has sent everything; nothing is changed from then on."""
        return (self._directory / _COMPLETE).exists()

    def cut(self, count: int) -> None:
        """Forget all but the first ``count`` messages: the servers had not all kept the others."""
        while self.count > count:
            self._file(self.count - 1).unlink()
            self._digests.pop()

    def append(self, operation: str, token: str, payload: bytes | bytearray) -> None:
        """Keep the next message; on disk when this returns."""
        head = json.dumps({"token": token, "operation": operation}).encode() + b"\n"
        write_bytes(self._file(self.count), head, payload, private=True)
        self._digests.append(chain(self.digest, token))

    def seal(self) -> None:
        """The client has sent everything."""
        write_bytes(
            self._directory / _COMPLETE,
            json.dumps({"messages": self.count, "digest": self.digest}).encode(),
            private=True,
        )

    def read(self, index: int, operation: str, parts: list[np.ndarray]) -> None:
        """Message ``index`` into the arrays that a program expects."""
        size = sum(part.nbytes for part in parts)
        if index >= self.count:
            raise OutOfStep(f"the program expects message {index} of '{operation}', the client sent {self.count}")
        file = self._file(index)
        with file.open("rb") as handle:
            head = json.loads(handle.readline())
            rest = file.stat().st_size - handle.tell()
            if head["operation"] != operation or rest != size:
                raise OutOfStep(
                    f"message {index} of the client is '{head['operation']}' with {rest} bytes, "
                    f"the program expects '{operation}' with {size}"
                )
            for part in parts:
                handle.readinto(part.reshape(-1).view(np.uint8).data)

    def _file(self, index: int) -> Path:
        return self._directory / f"{index:08d}.message"


class SpoolTransport:
    """A server's channels during an attempt: sockets to the other servers, and for the clients what they left before.

    What the program sends to a client is collected in ``outbox`` and published when the program has ended.
    """

    def __init__(self, servers: SocketTransport, spools: Mapping[str, Spool]):
        self._servers = servers
        self._spools = spools
        self._read: dict[str, int] = dict.fromkeys(spools, 0)
        self.outbox: dict[str, list[tuple[str, bytes]]] = {name: [] for name in spools}
        self._to_clients = 0
        self.timeout = servers.timeout

    @property
    def bytes_sent(self) -> int:
        """To servers, and for clients."""
        return self._servers.bytes_sent + self._to_clients

    @property
    def frames_sent(self) -> int:
        """To servers, and for clients."""
        return self._servers.frames_sent + sum(map(len, self.outbox.values()))

    @property
    def seconds_waiting(self) -> float:
        """For servers."""
        return self._servers.seconds_waiting

    def exchange(
        self,
        operation: str,
        sends: Mapping[Peer, list[np.ndarray]],
        receives: Mapping[Peer, list[np.ndarray]],
        code: int = 0,
    ) -> None:
        """As every transport: send and receive one message per named peer."""
        for peer, parts in sends.items():
            if isinstance(peer, str):
                words = b"".join(np.ascontiguousarray(part).tobytes() for part in parts)
                self.outbox[peer].append((operation, words))
                self._to_clients += len(words)
        to_servers: dict[Peer, list[np.ndarray]] = {p: parts for p, parts in sends.items() if isinstance(p, int)}
        from_servers: dict[Peer, list[np.ndarray]] = {p: parts for p, parts in receives.items() if isinstance(p, int)}
        if to_servers or from_servers:
            self._servers.timeout = self.timeout
            self._servers.exchange(operation, to_servers, from_servers, code)
        for peer, parts in receives.items():
            if isinstance(peer, str):
                self._spools[peer].read(self._read[peer], operation, parts)
                self._read[peer] += 1

    def prepare(
        self, operation: str, sends: Mapping[Peer, list[np.ndarray]], receives: Mapping[Peer, list[np.ndarray]]
    ) -> Callable[[int], None]:
        """A round of a recorded step, with the other servers alone (a message for a client is no part of such a step)."""
        carry_out = self._servers.prepare(operation, sends, receives)

        def prepared(code: int) -> None:
            self._servers.timeout = self.timeout
            carry_out(code)

        return prepared

    def abort(self, reason: str) -> None:
        self._servers.abort(reason)

    def close(self) -> None:
        self._servers.close()


def publish(directory: Path, client: str, attempt: str, messages: list[tuple[str, bytes]]) -> None:
    """Keep a client's result until it comes for it."""
    private_folder(directory)
    head = {"attempt": attempt, "messages": [[operation, len(words)] for operation, words in messages]}
    write_bytes(
        directory / f"{client}.result",
        json.dumps(head).encode() + b"\n",
        *(words for _, words in messages),
        private=True,
    )


def published(directory: Path, client: str) -> tuple[dict[str, Any], bytes] | None:
    """What was published for a client, or None."""
    file = directory / f"{client}.result"
    if not file.exists():
        return None
    head, _, payload = file.read_bytes().partition(b"\n")
    return json.loads(head), payload
