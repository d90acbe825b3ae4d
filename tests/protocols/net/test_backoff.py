"""Pauses between calls: they grow, stay bounded, and differ between callers."""

from __future__ import annotations

from protocols.net.backoff import Backoff


def test_pauses_double_up_to_the_longest_and_begin_again():
    backoff = Backoff(first=1.0, longest=6.0)
    for whole in (1.0, 2.0, 4.0, 6.0, 6.0):
        assert whole / 2 <= backoff.next_pause() <= whole
    backoff.reset()
    assert backoff.next_pause() <= 1.0


def test_two_callers_do_not_keep_pace():
    one, other = Backoff(), Backoff()
    assert [one.next_pause() for _ in range(5)] != [other.next_pause() for _ in range(5)]
