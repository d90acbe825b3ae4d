"""What can go wrong between parties. Every message names the peer and the operation."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from accel.errors import PpvflError

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
    "SharesDiffer",
]


class RefmpcError(PpvflError, RuntimeError):
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


class SharesDiffer(RefmpcError):
    """Two servers sent a client different words of a share that both hold: its result is not used."""


class RangeError(RefmpcError):
    """Debug mode found a value outside the domain of an operation."""


class NotRecordable(RefmpcError):
    """A recorded step did something that cannot be done again: a release, a message to a client, a plain array."""


class PartyFailed(RefmpcError):
    """Raised by ``refmpc.run`` in the caller. Its text is the root cause first, then who ended too, and, as the last
    part, ``root_traceback``; ``summary`` is without. ``tracebacks`` has each failed party's own."""

    tracebacks: Mapping[Hashable, str] = {}

    def __init__(self, sentence: str, root_traceback: str = ""):
        super().__init__(sentence, root_traceback)
        self.sentence, self.root_traceback = sentence, root_traceback

    def __str__(self) -> str:
        return f"{self.sentence}\n\n{self.root_traceback}" if self.root_traceback else self.sentence

    @property
    def summary(self) -> str:
        return "\n".join([self.sentence, *getattr(self, "__notes__", ())])
