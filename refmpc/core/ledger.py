"""The release ledger: what a run opened, under which claim, and what it cost, phase by phase.

Opened are only values masked by a uniform ring element inside a primitive, and *releases*. A release is declared
beforehand, by name and with the claim that covers it; anything else is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from refmpc.core.errors import ReleaseRefused

__all__ = ["Counters", "Ledger", "Release"]


@dataclass
class Counters:
    """One party's counts: payload bytes and frames sent and rounds taken part in (exact), seconds in the phase, and of
    these the seconds spent waiting for others."""

    rounds: int = 0
    bytes_sent: int = 0
    frames_sent: int = 0
    seconds: float = 0.0
    seconds_waiting: float = 0.0


@dataclass(frozen=True, slots=True)  # one a step, where weights are open
class Release:
    """One opened value: its name, number of elements, receiver and the claim that covers it."""

    name: str
    elements: int
    receiver: str
    claim: str


@dataclass
class Ledger:
    """Declared claims, releases made, and counters by phase."""

    declared: dict[str, str] = field(default_factory=dict)
    releases: list[Release] = field(default_factory=list)
    phases: dict[str, Counters] = field(default_factory=dict)

    def declare(self, releases: Mapping[str, str]) -> None:
        """Allow releases: name → the claim (or the reason) that covers each."""
        for name, claim in releases.items():
            if not claim:
                raise ReleaseRefused(f"release {name!r} is declared with an empty claim: say what covers it")
            self.declared[name] = claim

    def record(self, name: str, elements: int, receiver: str) -> None:
        """Note a release that is about to be opened; refuse it if it was not declared."""
        if name not in self.declared:
            known = ", ".join(map(repr, self.declared)) or "none"
            raise ReleaseRefused(
                f"release {name!r} ({elements} elements to {receiver}) was not declared; declared are: {known}. "
                "Declare it together with the claim that covers it"
            )
        self.releases.append(Release(name, elements, receiver, self.declared[name]))

    def total(self) -> Counters:
        """Counters over all phases."""
        total = Counters()
        for phase in self.phases.values():
            total.rounds += phase.rounds
            total.bytes_sent += phase.bytes_sent
            total.frames_sent += phase.frames_sent
            total.seconds += phase.seconds
            total.seconds_waiting += phase.seconds_waiting
        return total

    def to_json(self) -> str:
        """The whole ledger as JSON; it holds names and sizes, never values."""
        return json.dumps(asdict(self), indent=2)
