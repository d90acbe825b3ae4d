"""What can go wrong between parties. Every message names the peer and the operation."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

__all__ = [
    "HandshakeError",
    "NotRecordable",
    "OutOfStep",
    "PartyFailed",
    "PeerAborted",
    "PeerLost",
    "PeerTimeout",
    "RangeError",
    "RefmpcError",
    "ReleaseRefused",
]


class RefmpcError(RuntimeError):
    """Base class of all errors of the 3PC library."""


class PeerLost(RefmpcError):
    """A peer closed its connection or died."""


class PeerTimeout(RefmpcError):
    """A peer sent nothing, or took nothing, for the whole time-out."""


class PeerAborted(RefmpcError):
    """A peer met an error of its own and said so before it ended."""


class OutOfStep(RefmpcError):
    """A peer runs another operation, or its message has another length, than this party expects."""


class HandshakeError(RefmpcError):
    """A connection was refused before anything secret was sent: certificate, version, role or parameters."""


class ReleaseRefused(RefmpcError):
    """A value was about to be opened that the running protocol never declared as a release."""


class RangeError(RefmpcError):
    """Debug mode found a value outside the domain of an operation."""


class NotRecordable(RefmpcError):
    """A recorded step did something that cannot be done again: a release, a message to a client, a plain array."""


class PartyFailed(RefmpcError):
    """Raised by ``refmpc.run`` in the caller: the root cause first. ``tracebacks`` has each failed party's own."""

    tracebacks: Mapping[Hashable, str] = {}
