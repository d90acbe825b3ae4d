"""Openings of all kinds, one after the other, for the tests of what is repeated of them."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

import refmpc
from tests.refmpc.harness import packed

CALLS = 4  # of one opening: the first is recorded
OPENS_RELEASES = {"sums": "a test", "others": "a test"}
OPENED = [(300, 39, "sums"), (7, 39, "sums"), (300, 39, "others"), (300, 20, "sums")]  # each a program of its own


def six(party, count):
    """A column of 1 + 2 + 3."""
    shares = [np.full((count, 1), place + 1, dtype=np.uint64) for place in (party.id, party.next)]
    return refmpc.ArithmeticTensor(party, np.stack(shares), 0)


def opens(party, around):
    """Openings of all kinds in turn, ``around`` each of them, between operations that draw."""
    x = six(party, 300)
    results: list[Any] = []
    for turn in range(11):
        count, bits, release = OPENED[turn % len(OPENED)]
        party.step = turn // 3
        words = refmpc.matmul_opening(x[:count], x[:1], bits)
        with around(party):
            opened = party.complete(refmpc.open_words(party, words.reshape(-1), bits, release))
        x = party.complete(refmpc.multiply(x, x))
        results += [opened, packed(x)]
    programs = [len(step._programs) for step in party._repeated.values()]
    releases = [(release.name, release.elements, release.receiver) for release in party.ledger.releases]
    return results, party.operations, releases, programs, id(party.transport)


@contextlib.contextmanager
def nothing(party):
    yield
