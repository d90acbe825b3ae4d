"""Kernels of random allocation: both backends draw the same, and the law of the free slots is the hypergeometric one."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from scipy.stats import chisquare

import accel
from vfl.dp.allocation import Padding, allocation_every_epoch


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


def test_both_backends_draw_the_same_losses():
    allocation = allocation_every_epoch(Padding(190, 7, 30), 9)
    results = []
    for name in ("numpy", "numba"):
        present, absent = np.empty(300), np.empty(300)
        accel.backend(name).allocation_losses(
            5, 40, 9, 7, 30, allocation.free, 1.3, *allocation.counts_table, *allocation.cells(1.3), present, absent
        )
        results.append((present, absent))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-11, atol=1e-11)


def test_samples_do_not_depend_on_how_they_are_cut(kernels):
    allocation = allocation_every_epoch(Padding(190, 7, 30), 2)
    whole, parts = np.empty((2, 40)), np.empty((2, 40))
    tables = 1.3, *allocation.counts_table, *allocation.cells(1.3)
    kernels.allocation_losses(5, 0, 2, 7, 30, allocation.free, *tables, *whole)
    for first in (0, 10, 30):
        part = parts[:, first : {0: 10, 10: 30, 30: 40}[first]]
        kernels.allocation_losses(5, first, 2, 7, 30, allocation.free, *tables, *part)
    np.testing.assert_array_equal(whole, parts)


def test_likelihood_ratios_have_mean_one(kernels):
    """E_Q dP/dQ = 1 and E_P dQ/dP = 1: the table of lognormals keeps means, and the own bin has the size-biased law."""
    allocation = allocation_every_epoch(Padding(60, 5, 14), 2)
    present, absent = np.empty(40_000), np.empty(40_000)
    kernels.allocation_losses(
        3, 0, 2, 5, 14, allocation.free, 1.5, *allocation.counts_table, *allocation.cells(1.5), present, absent
    )
    for ratio in (np.exp(absent), np.exp(-present)):
        assert abs(ratio.mean() - 1) < 4.5 * ratio.std() / np.sqrt(len(ratio))
