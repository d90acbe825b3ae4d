"""Timing inside a run: every repetition starts in step at all parties, and the slowest party counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import refmpc
from refmpc.core.party import Party
from refmpc.core.rounds import Round

__all__ = ["Case", "Measurement", "measure_cases"]


@dataclass(frozen=True)
class Case:
    """One thing to measure: ``prepare(party)`` makes the arguments, ``call(*arguments)`` is the protocol."""

    prepare: Callable[[Party], tuple[Any, ...]]
    call: Callable[..., Coroutine[Any, Any, Any]]
    elements: int


@dataclass(frozen=True)
class Measurement:
    """Best time over repetitions (slowest party each), exact rounds, exact bytes of all parties."""

    seconds: float
    rounds: int
    bytes: int
    elements: int

    @property
    def bytes_per_element(self) -> float:
        """Bytes of all parties per element."""
        return self.bytes / self.elements


def in_step(party: Party) -> None:
    """A one-byte round with both neighbours, so that all parties start together."""
    round_ = Round("in step")
    token = np.zeros(1, dtype=np.uint8)
    for send, expect in ((round_.send_next, round_.expect_next), (round_.send_previous, round_.expect_previous)):
        send(token)
        expect(1, np.uint8)
    party.deliver(round_)


def _program(party: Party, job: tuple[Mapping[str, Case], int]) -> dict[str, tuple[list[float], int, int]]:
    cases, repeat = job
    found = {}
    for name, case in cases.items():
        arguments = case.prepare(party)
        party.complete(case.call(*arguments))  # compile, fill caches
        times = []
        for _ in range(repeat):
            in_step(party)
            before = party.ledger.total()
            begun = time.perf_counter()
            party.complete(case.call(*arguments))
            times.append(time.perf_counter() - begun)
        after = party.ledger.total()
        found[name] = times, after.rounds - before.rounds, after.bytes_sent - before.bytes_sent
    return found


def measure_cases(cases: Mapping[str, Case], repeat: int = 5, network: str = "loopback") -> dict[str, Measurement]:
    """Measure all cases in one run of three processes."""
    job = (dict(cases), repeat)
    result = refmpc.run(_program, [job] * 3, parties="processes", network=network, timeout=300)
    found = {}
    for name, case in cases.items():
        rows = [output[name] for output in result.outputs]
        seconds = min(max(times) for times in zip(*(row[0] for row in rows), strict=True))
        found[name] = Measurement(seconds, rows[0][1], sum(row[2] for row in rows), case.elements)
    return found
