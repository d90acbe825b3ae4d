"""The kernels of the matching of rows: Python's integers and numba give the same words."""

import hashlib

import numpy as np
import pytest

from accel import backend
from accel.reference import oprf as reference

M, LINES, COUNT = 700, 896, 400


@pytest.fixture
def words():
    rng = np.random.default_rng(31)
    return lambda *shape: rng.integers(0, 2**64, shape, dtype=np.uint64)


def cases(words):
    """Arguments by kernel; those that are written are arrays, which are compared afterwards."""
    rng = np.random.default_rng(7)
    lengths = np.r_[1, 127, 128, 129, 256, 300, rng.integers(1, 40, COUNT - 6)]
    offsets = np.r_[3, 3 + np.cumsum(lengths)]
    data = rng.integers(0, 256, offsets[-1] + 5, dtype=np.uint8)
    records, key, delta = words(COUNT, 5), words(2), words(8)
    records[17] = records[11]  # two that cannot both be peeled
    columns = np.empty((COUNT, 3), np.int32)
    degree, met = np.zeros(M, np.int32), np.zeros(M, np.int32)
    order, own = np.zeros(COUNT, np.int32), np.zeros(COUNT, np.int32)
    done = reference.peel(records, M, columns, degree, met, order, own)
    assert COUNT - done == 2
    store, tables, code = words(LINES, 8), np.empty((6, 256, 8), np.uint64), words(16, 256, 8)
    reference.dense_tables(store, M, tables)
    tags = words(COUNT, 2)
    return {
        "hash_into_bins": (data, offsets, 5, key, np.zeros((3, COUNT, 5), np.uint64), np.zeros(3, np.int64)),
        "oracle": (words(COUNT, 8), key, np.zeros((COUNT, 4), np.uint64)),
        "peel": (
            records,
            M,
            np.empty((COUNT, 3), np.int32),
            degree,
            met,
            np.zeros(COUNT, np.int32),
            np.zeros(COUNT, np.int32),
        ),
        "fill_back": (records, words(COUNT, 2), columns, order, own, done, M, words(LINES, 2)),
        "decode_values": (records, words(LINES, 2), M, words(COUNT, 2)),
        "dense_tables": (store, M, np.empty((6, 256, 8), np.uint64)),
        "decode_rows": (records, store, M, tables, delta, code, np.empty((COUNT, 8), np.uint64)),
        "code_into": (words(COUNT, 2), code, words(COUNT + 3, 8)),
        "transpose_bits": (words(512, 3), np.empty((192, 8), np.uint64)),
        "key_rows": (words(COUNT, 8), words(COUNT, 8), delta),
        "check_sums": (words(COUNT, 8), words(COUNT - 128, 2), np.empty((128, 8), np.uint64)),
        "match_tags": (
            tags,
            np.concatenate([words(9, 2), tags[::3]]),
            np.empty(1024, np.int64),
            np.empty(143, np.int64),
        ),
    }


@pytest.mark.parametrize("name", reference.__all__)
def test_python_and_numba_give_the_same_words(words, name):
    given = cases(words)[name]
    results = []
    for kernels in (backend("numpy"), backend("numba")):
        taken = [value.copy() if isinstance(value, np.ndarray) else value for value in given]
        returned = getattr(kernels, name)(*taken)
        if (
            name == "peel"
        ):  # in which order is free: what counts is what is left, and that every column is free when it is taken
            columns, order, own = taken[2], taken[5][:returned].tolist(), taken[6][:returned].tolist()
            left = set(range(COUNT)) - set(order)
            for place, (i, c) in enumerate(zip(order, own, strict=True)):
                assert c in columns[i] and not any(c in columns[later] for later in [*order[place + 1 :], *left])
            taken = [columns, np.array(sorted(left))]
        if name == "match_tags":
            taken = taken[3:]
        results.append((returned, taken))
    (one, these), (other, those) = results
    assert one == other
    for this, that in zip(these, those, strict=True):
        assert np.array_equal(this, that)


def test_a_full_bin_is_named_and_records_are_the_hash_of_the_library(words):
    data, offsets = np.frombuffer(b"".join(b"%03d" % i for i in range(50)), np.uint8).copy(), np.arange(0, 151, 3)
    key = words(2)
    for kernels in (backend("numpy"), backend("numba")):
        records, filled = np.zeros((1, 20, 5), np.uint64), np.zeros(1, np.int64)
        assert kernels.hash_into_bins(data, offsets, 0, key, records, filled) == 0 and filled[0] == 20
        expected = bytearray(hashlib.blake2b(b"007", key=key.tobytes()).digest()[:40])
        expected[28:32] = (7).to_bytes(4, "little")  # the row, in place of what its bin follows from
        assert records[0, 7].tobytes() == expected
