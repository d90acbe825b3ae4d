"""What a server keeps of its clients: the messages each has sent, on disk before they are acknowledged.

So a client may go away and come back, and the servers can begin an attempt of the training anew without any client.
A message is a client's share for this server (uniform on its own) behind a line that names it. Every message carries a
random token, the same at the three servers; the chain of tokens tells whether the three hold the same sharing.

Every file is sealed (``accel.files``), so bit rot here is this server's, and no client is blamed for it. In an upload
that goes on, a damaged message and those after it count as not kept, and the client sends them again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from accel.files import (
    Damaged,
    naming,
    private_folder,
    read_bytes,
    read_json,
    sealed_size,
    write_bytes,
    write_json,
)
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
        self._directory = directory
        self._digests = [START]  # after 0, 1, … messages
        while (file := self._file(self.count)).exists():
            try:
                if not self.complete:
                    read_bytes(file)
                with file.open("rb") as handle:
                    self._digests.append(chain(self._digests[-1], str(_head(file, handle)["token"])))
            except Damaged:
                if self.complete:
                    raise
                break
        if self.complete and read_json(directory / _COMPLETE) != self._facts:
            for file in sorted(directory.glob("*.message")):
                read_bytes(file)
            raise Damaged(directory / _COMPLETE, f"its messages are others than the {self.count} that lie beside it")

    @property
    def count(self) -> int:
        """Messages kept."""
        return len(self._digests) - 1

    @property
    def digest(self) -> str:
        """Digest of the tokens of all messages kept."""
        return self._digests[-1]

    @property
    def complete(self) -> bool:
        """Whether the client has said that it has sent everything; nothing is changed from then on."""
        return (self._directory / _COMPLETE).exists()

    @property
    def _facts(self) -> dict[str, Any]:
        return {"messages": self.count, "digest": self.digest}

    def discard(self) -> None:
        """Forget everything: the client shares its rows in another session."""
        shutil.rmtree(self._directory, ignore_errors=True)
        del self._digests[1:]

    def cut(self, count: int) -> None:
        """Forget all but the first ``count`` messages: the servers had not all kept the others."""
        while self.count > count:
            self._file(self.count - 1).unlink()
            self._digests.pop()

    def append(self, operation: str, token: str, payload: bytes | bytearray) -> None:
        """Keep the next message; on disk when this returns."""
        head = json.dumps({"token": token, "operation": operation}).encode() + b"\n"
        private_folder(self._directory)
        write_bytes(self._file(self.count), head, payload, private=True, sealed=True)
        self._digests.append(chain(self.digest, token))

    def seal(self) -> None:
        """The client has sent everything."""
        write_json(self._directory / _COMPLETE, self._facts)

    def read(self, index: int, operation: str, parts: list[np.ndarray]) -> None:
        """Message ``index`` into the arrays that a program expects."""
        size = sum(part.nbytes for part in parts)
        if index >= self.count:
            raise OutOfStep(f"the program expects message {index} of '{operation}', the client sent {self.count}")
        file = self._file(index)
        if not file.exists():
            raise Damaged(file, "it is missing")
        with naming(file), file.open("rb") as handle:
            end = sealed_size(file, handle)
            handle.seek(0)
            head = _head(file, handle)
            rest = end - handle.tell()
            if head["operation"] != operation:
                raise OutOfStep(
                    f"message {index} of the client is '{head['operation']}', the program expects '{operation}'"
                )
            if rest != size:
                raise Damaged(file, f"it holds {rest} bytes of '{operation}', {size} are expected")
            for part in parts:
                handle.readinto(part.reshape(-1).view(np.uint8).data)

    def _file(self, index: int) -> Path:
        return self._directory / f"{index:08d}.message"


def _head(file: Path, handle: BinaryIO) -> dict[str, Any]:
    """The line that names a message."""
    try:
        head = json.loads(handle.readline())
        return {name: head[name] for name in ("token", "operation")}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Damaged(file, "its first line does not name it") from None


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
        """A round of a recorded step, with the other servers alone (a message for a client is no part of such a
        step)."""
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
        sealed=True,
    )


def published(directory: Path, client: str) -> tuple[dict[str, Any], bytes] | None:
    """What was published for a client, or None."""
    file = directory / f"{client}.result"
    if not file.exists():
        return None
    head, _, payload = read_bytes(file).partition(b"\n")
    try:
        found = json.loads(head)
        size = sum(int(size) for _, size in found["messages"])
    except (ValueError, KeyError, TypeError):
        raise Damaged(file, "its first line does not name it") from None
    if len(payload) != size:
        raise Damaged(file, f"it holds {len(payload)} bytes, {size} are expected")
    return found, payload
