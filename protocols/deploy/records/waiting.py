"""Who is missing, said in one way by everybody who waits: at once, when it changes, and now and then."""

from __future__ import annotations

import time
from collections.abc import Iterable

from protocols.deploy.records.log import Log
from refmpc.net.framing import Peer, listed, name_of

__all__ = ["QUIET", "Waiting"]

QUIET = 30.0  # seconds between two equal lines on those who are waited for


class Waiting:
    """The lines of one participant on others who are not there: ``waiting``, ``missing`` and the reason, if one is known.

    ``silent``: seconds from now in which nothing is said, because nobody can be there yet.
    """

    def __init__(self, log: Log, silent: float = 0.0):
        self._log, self._from = log, time.monotonic() + silent
        self._said: dict[tuple[tuple[Peer, ...], str], float] = {}

    def say(self, missing: Iterable[Peer], reason: str = "") -> None:
        """``missing`` are waited for; the same is not said twice within QUIET."""
        peers, now = tuple(missing), time.monotonic()
        if now < self._from or now - self._said.get((peers, reason), -QUIET) < QUIET:
            return
        self._said[peers, reason] = now
        facts = ({"missing": listed(map(name_of, peers))} if peers else {}) | ({"reason": reason} if reason else {})
        (self._log.warning if reason else self._log.info)("waiting", **facts)

    def here(self, peer: Peer) -> None:
        """``peer`` has come: should it go again, that is said at once."""
        self._said = {key: when for key, when in self._said.items() if peer not in key[0]}
