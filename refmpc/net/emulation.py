"""Network profiles: delay and bandwidth that the transport itself imposes, where the kernel has no netem.

The receiver hands a message over no earlier than it would arrive on such a link: a message leaves when the link is
free, takes size/bandwidth to leave, and arrives one delay later. Both ends must share a clock (one host).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from accel.validate import require, require_choice, require_real

__all__ = ["PROFILES", "NetworkProfile", "ReceivingLine", "network_profile"]


@dataclass(frozen=True)
class NetworkProfile:
    """One-way delay in seconds, and bandwidth of each directed link in bytes per second."""

    name: str
    delay: float
    bandwidth: float

    def __post_init__(self) -> None:
        require_real("delay", self.delay, 0)
        require(self.bandwidth > 0, "bandwidth", self.bandwidth, "a positive number of bytes per second")

    @property
    def is_slow(self) -> bool:
        """Whether the profile imposes anything."""
        return self.delay > 0 or self.bandwidth < float("inf")


PROFILES = {
    "loopback": NetworkProfile("loopback", 0.0, float("inf")),
    "lan": NetworkProfile("lan", 1e-3, 1e9 / 8),
    "wan": NetworkProfile("wan", 20e-3, 200e6 / 8),
}


def network_profile(name: str | NetworkProfile) -> NetworkProfile:
    """The profile called ``name`` (a profile of one's own passes through)."""
    if isinstance(name, NetworkProfile):
        return name
    return PROFILES[require_choice("network", name, PROFILES)]


class ReceivingLine:
    """The receiving end of one directed link under a profile."""

    def __init__(self, profile: NetworkProfile):
        self._profile = profile
        self._free_at = 0.0

    def arrival(self, sent_at: float, size: int) -> float:
        """When a message of ``size`` bytes sent at ``sent_at`` is here. Messages of a link queue."""
        self._free_at = max(self._free_at, sent_at) + size / self._profile.bandwidth
        return self._free_at + self._profile.delay

    def wait_for_arrival(self, sent_at: float, size: int) -> float:
        """Sleep until a message sent at ``sent_at`` (monotonic seconds) would be here; returns the seconds slept."""
        remaining = self.arrival(sent_at, size) - time.monotonic()
        if remaining <= 0 or not self._profile.is_slow:
            return 0.0
        time.sleep(remaining)
        return remaining
