"""What a protocol of the alignment is made of: messages, public terms, and a count that all accept before rows are
named.

A protocol is a generator: it yields ``Send`` and ``Receive`` and returns this client's rows in the common order. It has
no sockets, and no randomness but what it is given; ``vfl.alignment.link`` runs it. Clients are numbered as in
``Terms.clients``; the last one leads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np

from accel.errors import PpvflError
from accel.validate import require, require_choice, require_integer

__all__ = [
    *("MATCHINGS", "Advance", "AlignmentError", "AlignmentRefused", "Randomness", "Receive", "Send", "Steps", "Terms"),
    *("hear_count", "matching_costs", "permutation", "show", "tell_count"),
]

MATCHINGS = ("ot", "ecdh")
VERSION = 3
MAX_IDS = {"ot": 2**32 - 1, "ecdh": 10_000_000}
COUNT = b"C"


class AlignmentError(PpvflError, RuntimeError):
    """The alignment cannot go on; the text names the client and holds no id."""


class AlignmentRefused(AlignmentError):
    """As ``AlignmentError``, and it is not tried again."""


@dataclass(frozen=True)
class Send:
    """Send a message to the client of this number."""

    to: int
    kind: bytes
    payload: bytes | memoryview


@dataclass(frozen=True)
class Receive:
    """Wait for a message of this kind, of ``low`` to ``high`` bytes, from the client of this number."""

    source: int
    kind: bytes
    low: int
    high: int


Steps = Generator[Send | Receive, bytearray, np.ndarray]
Part = Generator[Send | Receive, bytearray, None]
Randomness = Callable[[int], bytes]
Advance = Callable[[int], None]


@dataclass(frozen=True)
class Terms:
    """Public, and compared before anything else. The last of ``clients`` leads. ``context``: what else they have agreed
    on, as text."""

    clients: tuple[str, ...]
    pad_to: int | None = None
    matching: str = "ot"
    context: str = ""

    def __post_init__(self) -> None:
        require(len(self.clients) >= 2, "clients", self.clients, "at least two names, the leading client last")
        require(len(set(self.clients)) == len(self.clients), "clients", self.clients, "different names")
        require_choice("matching", self.matching, MATCHINGS)
        if self.pad_to is not None:
            require_integer("pad_to", self.pad_to, 1, MAX_IDS[self.matching])

    def encoded(self) -> bytes:
        facts = {"version": VERSION, "matching": self.matching, "clients": self.clients, "pad_to": self.pad_to}
        return json.dumps({**facts, "context": self.context}).encode()

    def padded(self, count: int) -> int:
        """How long a list of ``count`` ids is made; refuses one that is too long."""
        limit = MAX_IDS[self.matching] if self.pad_to is None else self.pad_to
        way_out = "raise pad_to at all clients" if self.pad_to is not None else "align in parts"
        require(count <= limit, "number of ids", count, f"at most {limit}", way_out)
        return self.pad_to or count

    def compare(self, theirs: bytes, name: str) -> None:
        """Refuse other terms than these, and name both."""
        if theirs != self.encoded():
            shown = show(theirs[:300].decode(errors="replace"))
            raise AlignmentError(
                f"client {name!r} has the terms {shown}, this client {self.encoded().decode()}: make them equal"
            )


def show(text: str) -> str:
    """Somebody else's text without what a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in text)


def permutation(randomness: Randomness, count: int) -> np.ndarray:
    """A uniform permutation: the order of random 64-bit keys."""
    return np.argsort(np.frombuffer(randomness(8 * count), dtype=np.uint64), kind="stable")


def tell_count(terms: Terms, me: int, count: int, minimum: int) -> Part:
    """The client that has compared: tell all others how many ids are common. Each may stop here, before it is told
    which."""
    others = [i for i in range(len(terms.clients)) if i != me]
    for i in others:
        yield Send(i, COUNT, count.to_bytes(8, "little"))
    _accept(count, minimum)
    for i in others:
        yield Receive(i, COUNT, 0, 0)


def hear_count(source: int, minimum: int, limit: int) -> Generator[Send | Receive, bytearray, int]:
    """The others hear the number of common ids, which must not be below the minimum of this client."""
    count = int.from_bytes((yield Receive(source, COUNT, 8, 8)), "little")
    if count > limit:
        raise AlignmentRefused(f"{count} common ids were announced, but this client's list has {limit}")
    _accept(count, minimum)
    yield Send(source, COUNT, b"")
    return count


def _accept(count: int, minimum: int) -> None:
    if count < minimum:
        raise AlignmentRefused(
            f"{count} ids are common, and one client asks for at least {minimum}: it stops before anybody is told "
            f"which they are"
        )


def matching_costs(matching: str, clients: int) -> tuple[float, float]:
    """How many times the work of two clients, and bytes an id over the leader's link."""
    members = clients - 1
    if matching == "ecdh":  # every client blinds every list; two move three lists of 32 bytes, and three of positions
        return clients * clients / 4, 108 * clients * members / 2
    if clients == 2:
        return 1.0, 102.0
    # an encoding a client, and a function for each ordered pair of members and each member with the leader (measured
    # for 2 to 4)
    return 0.2 * clients + 0.6 * members * members, 170.0 * members * (members - 1) + 118.0 * members
