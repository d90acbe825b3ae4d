"""Kernels of input checks, numpy and numba: sums and parities of random subsets, squares of rows."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.accel.test_kernels import both, garbage, random_words


@both
@pytest.mark.parametrize("lanes", [1, 8])
@pytest.mark.parametrize("columns", [1, 7, 8, 9, 16, 23])
@pytest.mark.parametrize("rows", [0, 1, 31, 32, 33, 70])
def test_subset_sums_are_what_they_say(kernels, rows, columns, lanes):
    """Number by number, at and around the edges of blocks, with columns before and behind that do not count."""
    first, behind, count = 3, 2, 41
    x = random_words(rows, rows, first + columns + behind)
    groups = -(-columns // lanes)
    picks = random_words(columns, -(-rows // 32) * groups, count).astype(np.uint32)
    out = garbage(count, lanes)
    want = out.copy()
    for i, j in itertools.product(range(rows), range(columns)):
        taken = picks[i // 32 * groups + j // lanes] >> np.uint32(i % 32) & np.uint32(1)
        want[:, j % lanes] += np.where(taken == 1, x[i, first + j], np.uint64(0))
    kernels.subset_sums(x, first, first + columns, picks, out)
    assert (out == want).all()


@both
@given(seed=st.integers(0, 2**31), rows=st.integers(0, 9), columns=st.integers(1, 9), first=st.integers(0, 3))
def test_square_sums_are_summands_of_squared_norms(kernels, seed, rows, columns, first):
    shares = [random_words(seed + place, rows, first + columns + 1) for place in range(3)]
    total = np.zeros(rows, dtype=np.uint64)
    for place in range(3):
        own = np.empty(rows, dtype=np.uint64)
        kernels.square_sums(shares[place], shares[(place + 1) % 3], first, first + columns, own)
        total += own
    numbers = (shares[0] + shares[1] + shares[2])[:, first : first + columns]
    assert total.tolist() == [sum(int(number) ** 2 for number in row) % 2**64 for row in numbers]


@both
@given(seed=st.integers(0, 2**31), count=st.integers(0, 40))
def test_parities_are_those_of_chosen_bits(kernels, seed, count):
    coins = random_words(seed, count)
    bits, parities = (random_words(seed + 1, count) & np.uint64(0xFF)).astype(np.uint8), np.zeros(1, np.uint64)
    kernels.subset_parities(bits, coins, parities)
    expected = 0
    for bit, coin in zip(bits, coins, strict=True):
        expected ^= int(coin) if bit & 1 else 0
    assert int(parities[0]) == expected
