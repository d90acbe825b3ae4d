"""What a training will cost and claim, before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from protocols.plan.run_plan import Plan
from protocols.run.report import estimate as estimated
from protocols.run.report import size_in_words

__all__ = ["Estimate", "estimate_of"]


@dataclass(frozen=True)
class Estimate:
    """One training: steps, what the servers send, how long the network alone takes over a LAN and a WAN, and the claim.

    Rounds are exact. With open weights bytes are a bound: a step of small weights sends less, with one output about
    half."""

    steps: int
    rounds: int
    bytes: int
    upload_bytes: int
    memory_per_server: int
    seconds_lan: float
    seconds_wan: float
    epsilon: float
    delta: float
    claim: str

    def __str__(self) -> str:
        return (
            f"{self.steps:,} steps, {self.rounds:,} rounds, {size_in_words(self.bytes)} between the servers,"
            f" {size_in_words(self.upload_bytes)} from the clients, {size_in_words(self.memory_per_server)} a "
            f"server; network"
            f" alone {self.seconds_lan:.1f} s over a LAN, {self.seconds_wan:.0f} s over a WAN.\n{self.claim}"
        )


def estimate_of(plan: Plan) -> Estimate:
    """From a dry run of one step."""
    found = estimated(plan)
    return Estimate(
        steps=plan.schedule.num_steps,
        rounds=int(found["rounds"]),
        bytes=int(found["bytes"]),
        upload_bytes=int(found["upload_bytes"]),
        memory_per_server=int(found["memory_per_server"]),
        seconds_lan=found["seconds_lan"],
        seconds_wan=found["seconds_wan"],
        epsilon=plan.claim.epsilon,
        delta=plan.claim.delta,
        claim=plan.claim.headline(),
    )
