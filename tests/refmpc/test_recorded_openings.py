"""Openings that are repeated like recorded steps: each is a release of its own, of words that nobody has seen
before."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

import refmpc
from refmpc import OutOfStep, PartyFailed
from refmpc.core.errors import ReleaseRefused
from refmpc.net.framing import ThreadTransport
from tests.refmpc.harness import outputs_of
from tests.refmpc.openings import CALLS, OPENS_RELEASES, opens, six


@pytest.mark.parametrize("parties", ["threads", "processes"])
@pytest.mark.parametrize("count", [1, 7, 300])
def test_an_opening_is_repeated_with_new_words_and_is_a_release_every_time(count, parties, monkeypatch):
    """The same sums with and without recording, in memory that no later opening writes to, and as many releases."""
    found = []
    for recording in ("0", "1"):
        monkeypatch.setenv("REFMPC_RECORD", recording)
        result = refmpc.run(_opens_four_times, [count] * 3, parties=parties, releases={"sums": "a test"}, timeout=20)
        for sums, releases, counters in result.outputs:
            words = np.stack([[_words_of(server, turn, count) for turn in range(CALLS)] for server in range(3)])
            expected = words.astype(np.int64).sum(axis=0)
            assert np.array_equal(sums, (expected + 2**24) % 2**25 - 2**24)
            assert releases == CALLS * count
            assert counters[0] == CALLS
            found.append(counters)
    assert found[:3] == found[3:]


def _words_of(server, turn, count):
    return np.random.default_rng([server, turn]).integers(0, 2**25, count, dtype=np.uint32)


async def _opens_four_times(party, count):
    before, sums = party.ledger.total(), []
    for turn in range(CALLS):
        words = _words_of(party.id, turn, count)
        sums.append(await refmpc.open_words(party, words, 39, "sums"))
        words[:] = 0  # the caller's again
    after = party.ledger.total()
    opened = sum(release.elements for release in party.ledger.releases if release.name == "sums")
    return np.stack(sums), opened, (after.rounds - before.rounds, after.bytes_sent - before.bytes_sent)


def test_an_opening_is_on_the_ledger_before_anything_of_it_is_sent(monkeypatch):
    """Also when it is repeated: whoever is stopped while it sends has noted what it was about to release."""
    exchange = ThreadTransport.exchange

    def watched(self, operation, sends, receives, code=0):
        if operation == "open_words" and sends:
            self.noted.append(len(self.ledger.releases))
        exchange(self, operation, sends, receives, code)

    @contextlib.contextmanager
    def around(party):
        transport: Any = party.transport
        transport.noted, transport.ledger, before = [], party.ledger, len(party.ledger.releases)
        yield
        assert transport.noted == [before + 1]

    monkeypatch.setattr(ThreadTransport, "exchange", watched)
    refmpc.run(opens, [around] * 3, releases=OPENS_RELEASES, timeout=20)


def test_an_undeclared_opening_is_refused_after_many_that_were_declared():
    def program(party):
        for turn in range(5):
            before = party.transport.frames_sent
            words = refmpc.seal(np.zeros(5, dtype=np.uint32))
            party.complete(refmpc.open_words(party, words, 39, "sums" if turn < 4 else "others"))
            assert party.transport.frames_sent > before

    with pytest.raises(PartyFailed, match="release 'others' .* was not declared") as failure:
        outputs_of(program, {"sums": "a test"})
    assert isinstance(failure.value.__cause__, ReleaseRefused)


@pytest.mark.parametrize("kind", ["product", "product and addend", "tensor"])
@pytest.mark.parametrize("count", [1, 9, 300])
def test_the_words_of_an_opening_have_a_new_zero_share_in_every_repetition(kind, count):
    """No server's summand leaves as it is, not the last of them either, and none under the mask of another or an
    earlier one."""

    def program(party):
        x = six(party, count)
        addend = np.full((count, 1), 7, dtype=np.uint64) if kind == "product and addend" else None

        async def words(x, addend):
            opening = (
                refmpc.tensor_opening if kind == "tensor" else lambda x, *rest: refmpc.matmul_opening(x, x[:1], *rest)
            )
            return opening(x, 1, addend)

        step = party.recorded(words)
        found = [refmpc.unseal(party.complete(step(x, addend))).reshape(-1) for _ in range(CALLS)]
        assert len(step._programs) == 1
        return found

    each = np.array(outputs_of(program))
    for server in each:
        assert np.unique(server).size == server.size and np.count_nonzero(server >> np.uint64(32)) == server.size
    factor = {"product": 36, "product and addend": 36 + 21, "tensor": 6}[kind]
    total = each.sum(axis=0, dtype=np.uint64) << np.uint64(1)
    assert np.all(total - np.uint64(factor - 3) <= np.uint64(6))  # each server cuts a bit


@pytest.mark.parametrize("what", ["release", "bits", "count"])
def test_parties_that_open_something_else_notice_in_a_repetition(what):
    kinds = {"release": (7, 39, "others"), "bits": (7, 38, "sums"), "count": (8, 39, "sums")}

    def program(party):
        for turn in range(6):
            odd = turn % 2 if turn < 4 else party.id == 1
            count, bits, release = kinds[what] if odd else (7, 39, "sums")
            party.complete(refmpc.open_words(party, refmpc.seal(np.zeros(count, dtype=np.uint32)), bits, release))

    with pytest.raises(PartyFailed, match="open_words") as failure:
        outputs_of(program, OPENS_RELEASES)
    assert isinstance(failure.value.__cause__, OutOfStep)


def test_debug_modes_see_every_opening():
    def program(party):
        for _ in range(4):
            words = refmpc.seal(np.full(5, party.id, dtype=np.uint32))
            party.complete(refmpc.open_words(party, words, 39, "sums"))
        return [len(step._programs) for step in party._repeated.values()]

    with pytest.warns(UserWarning, match="insecure_record"):
        result = refmpc.run(program, insecure_record=True, releases={"sums": "a test"}, timeout=20)
    assert result.outputs == [[0]] * 3
    for transcript in result.transcripts:
        assert sum(operation == "open_words" for operation, *_ in transcript) == 2 * 4
