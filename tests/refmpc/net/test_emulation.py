"""Network profiles: when a message would be here, and that a run on such a network takes as long."""

from __future__ import annotations

import time

import numpy as np
import pytest

import refmpc
from refmpc.net import emulation as network
from refmpc.net.emulation import PROFILES, NetworkProfile, ReceivingLine, network_profile


class Clock:
    """Time that passes only in sleep."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(network, "time", clock)
    return clock


@pytest.mark.parametrize("name", ["lan", "wan"])
def test_rounds_cost_one_delay_each_and_bytes_their_share_of_the_bandwidth(clock, name):
    profile = PROFILES[name]
    line = ReceivingLine(profile)
    for _ in range(50):
        line.wait_for_arrival(clock.now, 1000)
    assert clock.now - 100 == pytest.approx(50 * (profile.delay + 1000 / profile.bandwidth))


def test_messages_of_one_link_queue_behind_each_other(clock):
    line = ReceivingLine(NetworkProfile("slow", 0.5, 100.0))
    assert line.arrival(100.0, 100) == pytest.approx(101.5)
    assert line.arrival(100.0, 100) == pytest.approx(102.5)  # sent at once, leaves when the first has left
    assert line.arrival(110.0, 100) == pytest.approx(111.5)  # the link is free again


def test_a_message_that_is_already_late_is_not_delayed_further(clock):
    line = ReceivingLine(PROFILES["wan"])
    clock.now = 105.0
    assert line.wait_for_arrival(100.0, 1000) == 0.0
    assert clock.now == 105.0


def test_bandwidth_counts_without_a_delay_too(clock):
    line = ReceivingLine(NetworkProfile("narrow", 0.0, 10.0))
    assert line.wait_for_arrival(100.0, 20) == pytest.approx(2.0)


def test_loopback_adds_nothing(clock):
    assert ReceivingLine(PROFILES["loopback"]).wait_for_arrival(clock.now + 5, 10**9) == 0.0


def test_the_profiles_are_those_of_the_paper():
    assert (PROFILES["lan"].delay, PROFILES["lan"].bandwidth) == (1e-3, 125e6)
    assert (PROFILES["wan"].delay, PROFILES["wan"].bandwidth) == (20e-3, 25e6)


def test_an_unknown_network_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="network = 'moon': must be one of 'loopback', 'lan', 'wan'"):
        network_profile("moon")


def test_a_profile_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="delay"):
        NetworkProfile("x", -1.0, 1.0)
    with pytest.raises(ValueError, match="bandwidth"):
        NetworkProfile("x", 1.0, 0.0)


def ping(party, rounds):
    """``rounds`` rounds of 8 bytes, then how long they took and how long of it this party waited."""
    begun, waited = time.monotonic(), party.transport.seconds_waiting
    for _ in range(rounds):
        party._exchange("ping", {party.next: [np.zeros(1)]}, {party.previous: [np.zeros(1)]})
    return time.monotonic() - begun, party.transport.seconds_waiting - waited


@pytest.mark.parametrize("parties", ["threads", "processes"])
def test_a_run_on_a_wan_takes_its_rounds_times_the_delay(parties):
    result = refmpc.run(ping, [10] * 3, parties=parties, network="wan")
    for seconds, waited in result.outputs:
        # the two others can be ahead of a party that begins late, each by one round of the ring
        assert (10 - 3) * 20e-3 <= seconds < 5.0
        assert waited > 0, "time on the wire is time spent waiting"


def test_a_profile_of_ones_own_is_used():
    result = refmpc.run(ping, [6] * 3, network=NetworkProfile("satellite", 0.1, 1e6))
    assert all((6 - 3) * 0.1 <= seconds < 5.0 for seconds, _ in result.outputs)
