"""What coalitions of clients can do with what they see while rows are matched: a dictionary of 10^4 phone numbers.

Servers see nothing of it, so every coalition below may have all three with it. For each that must learn nothing there
is one that has one secret more: it must learn everything, or the attack would be too weak to show anything.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from accel import kernels
from tests.vfl.alignment.exchange import Exchange, silent
from vfl.alignment import AlignmentRefused, ot
from vfl.alignment.ids import arrow_ids
from vfl.alignment.okvs import Bins, Shape, store_values
from vfl.alignment.oprf import (
    CODE,
    Columns,
    Evaluator,
    Holder,
    Uniform,
    function_values,
    message_parts,
    rows_of_the_check,
)

SPACE = 10_000
NOTHING, EVERYTHING = np.zeros(8, np.uint64), np.full(8, 2**64 - 1, np.uint64)


def phones(numbers: Iterable[int]) -> list[str]:
    return [f"+49170{number:07d}" for number in numbers]


class Seen:
    """Every function of a run, by (evaluator, holder), with the secrets of both; and the salt."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.evaluators: dict[tuple[int, int], Any] = {}
        self.deltas: dict[tuple[int, int], np.ndarray] = {}
        self.salt, seen = b"", self

        class SeenEvaluator(Evaluator):
            def __init__(self, pairs: Any, label: bytes, shape: Shape):
                super().__init__(pairs, label, shape)
                self.pairs = pairs

            def extend(self, number: int, drawn: Any, store: np.ndarray, records: np.ndarray) -> Any:
                self.store = store.copy()
                found, message = super().extend(number, drawn, store, records)
                self.message = message.copy()
                return found, message

        class SeenHolder(Holder):
            pass

        class SeenBins(Bins):
            def __init__(self, ids: Any, salt: bytes, *others: Any):
                super().__init__(ids, salt, *others)
                seen.salt = salt

        exchange = ot._exchange_keys

        def exchanged(run: Any, evaluates: list[int], holds: list[int]) -> Any:
            evaluators, holders = yield from exchange(run, evaluates, holds)
            self.evaluators |= {(run.me, other): each for other, each in evaluators.items()}
            self.deltas |= {(other, run.me): each._delta for other, each in holders.items()}
            return evaluators, holders

        for name, value in (("Evaluator", SeenEvaluator), ("Holder", SeenHolder), ("Bins", SeenBins)):
            monkeypatch.setattr(ot, name, value)
        monkeypatch.setattr(ot, "_exchange_keys", exchanged)

    @property
    def dictionary(self) -> np.ndarray:
        """Records of all phone numbers there are."""
        return Bins(arrow_ids(phones(range(SPACE))), self.salt, Shape(SPACE, 1), None, silent)[0]

    def guesses(self, pair: tuple[int, int], delta: np.ndarray) -> np.ndarray:
        """F of the pair at every number, as an evaluator computes it who takes ``delta`` for the holder's: right at its
        own ids for any, and everywhere for the right one (so that is what the holder can compute)."""
        evaluator, records = self.evaluators[pair], self.dictionary
        shape, store = evaluator._shape, evaluator.store
        coded = np.zeros((shape.lines, 8), np.uint64)
        kernels.code_into(store, CODE, coded)
        own = _lines(records, _rows([pair[0] for pair in evaluator.pairs], shape), shape, NOTHING)
        wrong = _lines(records, coded, shape, EVERYTHING)  # zero where the store has the number
        found = np.empty((SPACE, 4), np.uint64)
        kernels.oracle(own ^ (wrong & delta), np.frombuffer(evaluator._label[:16], np.uint64).copy(), found)
        return found

    def in_store(self, pair: tuple[int, int], pads: bool) -> set[int]:
        """The numbers that fit what the evaluator has sent; ``pads``: with its streams, which no holder has."""
        evaluator = self.evaluators[pair]
        rows = message_parts(evaluator.message, evaluator._shape)[0].copy()
        for bit in (0, 1) if pads else ():
            rows ^= _rows([keys[bit] for keys in evaluator.pairs], evaluator._shape)
        return _numbers(~_lines(self.dictionary, rows, evaluator._shape, EVERYTHING).any(axis=1))


def _rows(keys: Sequence[bytes], shape: Shape) -> np.ndarray:
    rows = np.empty((shape.lines, 8), np.uint64)
    kernels.transpose_bits(Columns(keys, shape).draw(), rows)
    return rows


def _lines(records: np.ndarray, rows: np.ndarray, shape: Shape, delta: np.ndarray) -> np.ndarray:
    tables, found = np.empty((6, 256, 8), np.uint64), np.empty((len(records), 8), np.uint64)
    kernels.dense_tables(rows, shape.sparse, tables)
    kernels.decode_rows(records, rows, shape.sparse, tables, delta, CODE, found)
    return found


def _numbers(which: Any) -> set[int]:
    return set(np.flatnonzero(which).tolist())


def _random_delta() -> np.ndarray:
    return np.frombuffer(secrets.token_bytes(64), np.uint64).copy()


def _sent(run: Exchange, client: int, kind: bytes) -> bytes:
    return b"".join(data for name, data in run.sent[client] if name == kind)


def test_of_two_clients_neither_finds_an_id_that_is_not_common(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    lists = [range(100, 260), range(150)]  # the second is shorter: it evaluates
    run = Exchange([phones(each) for each in lists], None, None, "ot").run()
    assert len(run.rows[0]) == 50
    tags = {row.tobytes() for row in ot._unpack(bytearray(_sent(run, 0, ot.TAGS)))}
    alone = set(lists[0]) - set(lists[1])

    def matched(delta: np.ndarray) -> set[int]:
        guessed = ot._tags(seen.guesses((1, 0), delta))
        return {number for number in alone if guessed[number].tobytes() in tags}

    assert matched(NOTHING) == set() == matched(_random_delta())
    assert matched(seen.deltas[1, 0]) == alone  # with the holder's secret: power
    assert seen.in_store((1, 0), pads=False) == set()
    assert seen.in_store((1, 0), pads=True) == set(lists[1])  # with the evaluator's secrets: power


def test_of_three_clients_no_two_find_an_id_that_is_not_common(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader (2) and a member (0) against the other (1); both members against the leader."""
    seen = Seen(monkeypatch)
    first, second, leader = range(100), range(50, 200), range(20, 120)
    run = Exchange([phones(each) for each in (first, second, leader)], None, None, "ot").run()
    assert len(run.rows[0]) == 50
    records, shape = seen.dictionary, Shape(len(second), 1)
    sent = np.frombuffer(_sent(run, 1, ot.STORE), np.uint64).reshape(-1, 2).copy()
    stored = np.zeros((SPACE, 2), np.uint64)
    kernels.decode_values(records, sent, shape.sparse, stored)

    def found(star: np.ndarray, ring: np.ndarray) -> set[int]:
        """Numbers that fit the store of client 1, with these for its secrets towards the leader and towards client
        0."""
        total = stored.copy()
        for pair, delta in (((2, 1), star), ((1, 0), seen.deltas[1, 0]), ((0, 1), ring)):
            total ^= seen.guesses(pair, delta)[:, :2]
        return _numbers(~total.any(axis=1)) - (set(first) & set(second) & set(leader))

    star, ring = seen.deltas[2, 1], seen.deltas[0, 1]
    for guess in (NOTHING, _random_delta()):
        assert found(guess, guess) == set()
    assert found(NOTHING, ring) == (set(second) & set(leader)) - set(first)  # of whom two lists have in common
    assert found(star, ring) == set(second) - (set(first) & set(leader))
    for pair in ((2, 0), (2, 1), (1, 0), (0, 1)):
        assert seen.in_store(pair, pads=False) == set()
    assert seen.in_store((2, 0), pads=True) == set(leader)


@pytest.mark.parametrize("clients", [2, 3])
def test_messages_are_uniform_whatever_the_lists_are(monkeypatch: pytest.MonkeyPatch, clients: int) -> None:
    """Bytes of what depends on ids, for two inputs: no ids at all, and a full list. Seeds are fixed."""
    for kind in (ot.ROWS, ot.TAGS) if clients == 2 else (ot.ROWS, ot.STORE):
        for count in (1, 3000):
            run = Exchange([phones(range(count))] * clients, None, 5, "ot").run()
            sent = [_sent(run, client, kind) for client in range(clients)]
            tail = 128 * 80 if kind == ot.ROWS else 0  # the sums of the check follow from the rest and the own secrets
            for data in sent:
                body = np.frombuffer(data[: len(data) - tail], np.uint8)
                if len(body):
                    counts = np.bincount(body, minlength=256)
                    assert stats.chisquare(counts).pvalue > 1e-6


def test_a_store_of_random_values_is_uniform_with_cores_too() -> None:
    """Few lines, and ids that no line is free for: the bits of every line, and of every pair of lines, over many
    stores."""

    class Small(Shape):
        sparse = property(lambda self: 40)

    uniform, shape, runs, count = Uniform(lambda size: bytes(size)), Small(16, 1), 1500, 16
    records = uniform.draw(count, 5)
    for one, other in ((0, 1), (0, 2), (3, 4)):
        records[other, 2:4] = records[one, 2:4]
    stores = np.empty((runs, 88), np.uint64)
    for run in range(runs):
        values, store = uniform.draw(count, 2), uniform.draw(88, 2)
        store_values(records, values, shape, store)
        stores[run] = store[:, 0]
        back = values.copy()
        kernels.decode_values(records, store, 40, back)
        assert not back.any()
    bits = (stores & np.uint64(1)).astype(int)
    ones = bits.sum(axis=0)
    pairs = [(bits[:, i] ^ bits[:, j]).sum() for i in range(88) for j in range(i)]
    worst = np.abs(np.array([*ones, *pairs]) - runs / 2).max() / (np.sqrt(runs) / 2)
    assert stats.norm.sf(worst) * 2 * (88 + len(pairs)) > 1e-3


def test_an_evaluator_that_flips_a_bit_is_refused_whenever_it_would_have_learnt_one() -> None:
    """From column i it would learn Δ_i, by whether its own id still matches; then a dictionary."""
    shape, salt, label = Shape(50, 1), secrets.token_bytes(16), secrets.token_bytes(32)
    records = Bins(arrow_ids(phones(range(50))), salt, shape, None, silent)[0]
    uniform, outcomes = Uniform(secrets.token_bytes), []
    for column in range(24):
        pairs = [(secrets.token_bytes(16), secrets.token_bytes(16)) for _ in range(512)]
        delta = secrets.token_bytes(64)
        bit = delta[column // 8] >> (column % 8) & 1
        keys = [pair[delta[i // 8] >> (i % 8) & 1] for i, pair in enumerate(pairs)]
        evaluator, holder = Evaluator(pairs, label, shape), Holder(delta, keys, label, shape, "bank")
        store = uniform.draw(shape.lines, 2)
        store_values(records, np.ascontiguousarray(records[:, :2]), shape, store)
        own, message = evaluator.extend(0, evaluator.draw(), store, records)
        difference, sums, stored = message_parts(message, shape)
        difference[:, 0] ^= np.uint64(1 << column)
        chosen = rows_of_the_check(label, 0, difference)  # its check fits what it sends
        kernels.check_sums(_rows([pair[0] for pair in pairs], shape), chosen, sums)
        kernels.check_sums(store, chosen, stored)
        rows, there = _rows(keys, shape), np.frombuffer(delta, np.uint64).copy()
        kernels.key_rows(rows, difference, there)
        matches = np.array_equal(function_values(records, rows, shape, there, label), own)
        assert matches == (not bit)  # without the check it would know
        try:
            holder.extend(0, holder.draw(), bytearray(message), records)
            refused = False
        except AlignmentRefused as error:
            assert "client 'bank' failed the consistency check of bin 0" in str(error)
            refused = True
        assert refused == bool(bit)
        outcomes.append(refused)
    assert {True, False} == set(outcomes)


def test_no_key_is_used_twice_wherever_an_attempt_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another list under the same streams would give away where the stores differ."""
    used: list[bytes] = []
    drawn = Columns.__init__

    def noted(self: Any, keys: Sequence[bytes], shape: Shape) -> None:
        used.extend(keys)
        drawn(self, keys, shape)

    monkeypatch.setattr(Columns, "__init__", noted)
    lists = [phones(range(30)), phones(range(10, 30))]
    whole = sum(map(len, Exchange(lists, None, None, "ot").run().sent))
    assert len(used) == 3 * 512  # the holder's are half of the evaluator's
    for messages in range(1, whole + 1):
        used.clear()
        Exchange(lists, None, None, "ot").run(messages)
        before = set(used)
        used.clear()
        again = Exchange([lists[0][1:], lists[1]], None, None, "ot").run()
        assert len(again.rows[0]) == 20 and before.isdisjoint(used)


@pytest.mark.parametrize("clients", [2, 3])
def test_a_count_below_the_minimum_is_all_that_anybody_is_told(clients: int) -> None:
    lists = [phones(range(30))] * (clients - 1) + [phones(range(20, 40))]
    assert all(len(rows) == 10 for rows in Exchange(lists, None, 1, "ot", 10).run().rows)
    stopped = Exchange(lists, None, 1, "ot", 11)
    with pytest.raises(AlignmentRefused, match="10 ids are common, and one client asks for at least 11"):
        stopped.run()
    assert not any(_sent(stopped, client, ot.CHOSEN) for client in range(clients))
