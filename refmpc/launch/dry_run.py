"""``dry_run``: what a program costs, counted by running it at one party after the other, with nobody at the other end.

Messages go to a transport that counts them, and what a party expects arrives as zeros. Which messages follow, and how
long they are, depends on public shapes and scales only, never on values; so the counters are those of a real run,
exactly, while the values are meaningless and thrown away. It takes the computing time of three parties and no round
trip.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from refmpc.core.ledger import Counters
from refmpc.core.primitive import Cost
from refmpc.launch.participants import Options, play_party
from refmpc.net.emulation import network_profile
from refmpc.net.framing import Peer, as_bytes

__all__ = ["CountingTransport", "dry_run"]


class CountingTransport:
    """Channels to nobody: counts what is sent, fills what is expected with zeros."""

    def __init__(self) -> None:
        self.timeout = 0.0
        self.bytes_sent = 0
        self.frames_sent = 0
        self.seconds_waiting = 0.0

    def exchange(
        self,
        operation: str,
        sends: Mapping[Peer, list[np.ndarray]],
        receives: Mapping[Peer, list[np.ndarray]],
        code: int = 0,
    ) -> None:
        """Count one frame per peer, and let zeros arrive."""
        for payload in sends.values():
            self.bytes_sent += sum(part.nbytes for part in payload)
            self.frames_sent += 1
        for parts in receives.values():
            for part in parts:
                as_bytes(part, writable=True)[:] = 0

    def abort(self, reason: str) -> None:
        """Nobody is there to be told."""

    def close(self) -> None:
        """Nothing is open."""


def dry_run(program: Callable[..., Any], *arguments: Any, releases: Mapping[str, str] | None = None) -> dict[str, Cost]:
    """The cost of ``program(party, *arguments)`` in each phase (``main`` outside of any), without set-up.

    ``program`` is one that ``refmpc.run`` takes; all three parties get the same arguments, and secrets are shares of
    anything of the right shape. Bytes are the three servers' payload, rounds those of the party that has the most. A
    program that checks what it received (what peers agreed on, say) finds zeros.
    """
    options = Options(
        timeout=0.0,
        profile=network_profile("loopback"),
        run_id="dry run",
        parameters={},
        releases=dict(releases or {}),
        insecure_seed=0,  # nothing secret is here, and the same call is to be the same computation
        insecure_check_ranges=False,
        insecure_record=False,
    )
    ledgers = [
        play_party(id, CountingTransport(), program, arguments, options, lambda message: None)[1] for id in range(3)
    ]
    found: dict[str, Cost] = {}
    for name in dict.fromkeys(name for ledger in ledgers for name in ledger.phases if name != "set-up"):
        counters = [ledger.phases.get(name, Counters()) for ledger in ledgers]
        found[name] = Cost(max(c.rounds for c in counters), sum(c.bytes_sent for c in counters))
    return found
