"""The door's policy by itself: who is sent away when there is a crowd."""

from __future__ import annotations

import socket

from refmpc.net.admission import Admission, Caller


def callers(door: Admission, *hosts: str) -> list[Caller]:
    return [door.enter(socket.socket(), host) for host in hosts]


def test_the_oldest_of_the_host_with_most_callers_has_to_go():
    door = Admission(strangers=3)
    first, _, third, fourth = everybody = callers(door, "quiet", "crowd", "crowd", "other")
    assert [caller.sent_away for caller in everybody] == [False, True, False, False]
    door.leave(first)
    door.leave(third)
    more = callers(door, "quiet", "quiet")
    assert not any(caller.sent_away for caller in [*more, fourth])
    for caller in [*everybody, *more]:
        caller.connection.close()


def test_those_sent_away_count_until_they_have_gone():
    door = Admission(strangers=2)
    everybody = callers(door, *["crowd"] * 4)
    assert door.is_full and [caller.sent_away for caller in everybody] == [True, True, False, False]
    door.leave(everybody[0])
    assert not door.is_full
    for caller in everybody:
        caller.connection.close()


def test_tls_around_one_who_was_sent_away_is_hung_up_as_well():
    door = Admission(strangers=1)
    old, _ = everybody = callers(door, "crowd", "crowd")
    here, there = socket.socketpair()
    replaced = old.connection
    door.replace(old, here)
    assert there.recv(1) == b""  # hung up
    door.close()
    late = door.enter(socket.socket(), "late")
    assert late.sent_away
    for connection in (here, there, replaced, late.connection, *(caller.connection for caller in everybody)):
        connection.close()
