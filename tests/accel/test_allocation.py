"""Kernels of random allocation: both backends draw the same, and the law of the free slots is the hypergeometric
one."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from scipy.stats import chisquare

import accel
from vfl.dp.random_allocation.allocation import Padding, allocation_every_epoch


@pytest.fixture(params=["numpy", "numba"])
def kernels(request):
    return accel.backend(request.param)


def drawn(kernels, allocation, count, key=1):
    counts, own = np.empty((count, allocation.bins), dtype=np.int64), np.empty(count, dtype=np.int64)
    kernels.allocate(key, 0, allocation.slots, allocation.free, *allocation.counts_table, counts, own)
    return counts, own


@pytest.mark.parametrize(("records", "bins", "slots"), [(4, 2, 3), (3, 3, 2), (6, 2, 4), (2, 2, 1)])
def test_free_slots_are_a_uniform_subset_and_one_of_them_is_the_record(kernels, records, bins, slots):
    allocation = allocation_every_epoch(Padding(records, bins, slots), 1)
    counts, own = drawn(kernels, allocation, 20_000)
    assert (counts.sum(axis=1) == allocation.free).all() and (counts <= slots).all()
    assert (counts[np.arange(len(own)), own] > 0).all()
    expected: dict[tuple[tuple[int, ...], int], float] = {}
    subsets = list(combinations(range(bins * slots), allocation.free))
    for subset in subsets:
        free = tuple(int(x) for x in np.bincount([slot // slots for slot in subset], minlength=bins))
        for slot in subset:
            at = free, slot // slots
            expected[at] = expected.get(at, 0.0) + 1 / (len(subsets) * allocation.free)
    found = dict.fromkeys(expected, 0)
    for row, j in zip(counts, own, strict=True):
        found[tuple(int(x) for x in row), int(j)] += 1
    observed = [found[at] for at in expected]
    assert chisquare(observed, np.array(list(expected.values())) * len(own)).pvalue > 1e-4


def test_both_backends_draw_the_same_however_they_are_cut():
    allocation = allocation_every_epoch(Padding(190, 7, 30), 9)
    results = []
    for name in ("numpy", "numba"):
        kernels = accel.backend(name)
        counts, own = np.empty((300, 7), dtype=np.int64), np.empty(300, dtype=np.int64)
        for first, end in ((0, 10), (10, 300)):
            kernels.allocate(5, first, 30, allocation.free, *allocation.counts_table, counts[first:end], own[first:end])
        results.append((*counts.T, own))
    np.testing.assert_array_equal(results[0], results[1])
