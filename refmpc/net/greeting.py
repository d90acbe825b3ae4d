"""The greeting: what two participants say to each other before anything is computed, and how it is compared."""

from __future__ import annotations

import hmac
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accel.errors import InvalidArgument
from accel.validate import require
from refmpc.net.framing import Peer, printable, title
from refmpc.net.tls import MAX_MESSAGE

__all__ = ["PROTOCOL_VERSION", "Greeting", "first_difference", "must_agree"]

PROTOCOL_VERSION = 2  # since 2: tests of ``order`` lie test by test


@dataclass(frozen=True)
class Greeting:
    """What must be equal at both ends before anything is computed. ``run`` is also the shared secret of a run whose
    channels are plain loopback sockets: only its participants know it."""

    run: str = field(repr=False)
    parameters: Mapping[str, Any]

    def __post_init__(self) -> None:
        try:
            size = len(json.dumps(self.plain()))
        except (TypeError, ValueError) as error:
            raise InvalidArgument(
                f"parameters cannot be compared between parties, they must be plain JSON: {error}"
            ) from None
        require(size <= MAX_MESSAGE // 2, "size of parameters", size, f"at most {MAX_MESSAGE // 2} bytes of JSON")

    def plain(self) -> dict[str, Any]:
        """The parameters as the other end sees them."""
        return json.loads(json.dumps(dict(self.parameters)))

    def words(self, sender: Peer, receiver: Peer) -> dict[str, Any]:
        """What the sender says to the receiver."""
        return {
            "version": PROTOCOL_VERSION,
            "from": sender,
            "to": receiver,
            "run": self._proof(sender, receiver),
            "parameters": self.plain(),
        }

    def _proof(self, sender: Peer, receiver: Peer) -> str:
        """Shows that the sender knows the run without saying it to somebody who does not."""
        words = json.dumps(["refmpc", PROTOCOL_VERSION, sender, receiver]).encode()
        return hmac.digest(self.run.encode(), words, "sha256").hex()

    def compare(self, theirs: Mapping[str, Any], peer: Peer, me: Peer) -> tuple[bool, str]:
        """Whether what ``peer`` said to ``me`` comes from a participant of this run, and a sentence on the first field
        that differs."""

        def differs(name: str, got: str, want: str) -> str:
            theirs_and_ours = (
                f"{title(peer)} has {name} = {printable(got, 200)}, {title(me)} has {printable(want, 200)}"
            )
            return f"{theirs_and_ours}: {must_agree(got, want)}"

        version = theirs.get("version")
        if version != PROTOCOL_VERSION:
            return False, differs("version", repr(version), repr(PROTOCOL_VERSION))
        for name, want in (("from", peer), ("to", me)):
            if theirs.get(name) != want:
                shown = printable(f"{theirs.get('from')!r} to {theirs.get('to')!r}", 200)
                return False, f"{title(peer)} greets as {shown}: wrong addresses"
        if not hmac.compare_digest(str(theirs.get("run", "")).encode(), self._proof(peer, me).encode()):
            return False, f"{title(peer)} belongs to another run than {title(me)}: start all parties of a run together"
        parameters = theirs.get("parameters")
        different = first_difference(parameters if isinstance(parameters, dict) else {}, self.parameters)
        if different:
            name, got, want = different
            return True, differs(f"parameter {name!r}", got, want)
        return True, ""


_REAL = re.compile(r"-?\d+(?:\.\d+(?:e[+-]?\d+)?|e[+-]?\d+)")
_LAST_DIGITS = 1e-9  # relative: what libraries and processors may differ by, and no choice of a user does


def must_agree(got: str, want: str) -> str:
    """What to do about two values of a parameter. Equality is exact on purpose: a bound that differs in its last digit
    may become another integer in the ring. Who has only other libraries or another processor is told so."""
    skeletons = [_REAL.sub("#", text) for text in (got, want)]
    numbers = [[float(number) for number in _REAL.findall(text)] for text in (got, want)]
    same_kind = skeletons[0] == skeletons[1] and numbers[0] != numbers[1]
    if same_kind and all(math.isclose(*pair, rel_tol=_LAST_DIGITS) for pair in zip(*numbers, strict=True)):
        return (
            "they differ in the last digits only, as libraries or processors do: install the same versions on both "
            "sides, "
            "on processors of one kind"
        )
    return "they must agree"


def first_difference(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """The first public parameter that is not exactly equal: its name, their value and ours as JSON; None if all agree.

    JSON writes a number so that it reads back to the last bit, and 1 and 1.0 differently: texts are equal if and only
    if values are. Parameters that agree nearly would still be two plans, each with a fingerprint of its own.
    """
    sides = (json.loads(json.dumps(dict(side))) for side in (theirs, mine))  # tuples are lists on the wire
    got, want = ({name: json.dumps(value, sort_keys=True) for name, value in side.items()} for side in sides)
    for name in sorted({*got, *want}):
        if got.get(name) != want.get(name):
            return name, got.get(name, "missing"), want.get(name, "missing")
    return None
