"""Kernels of ``order`` do not branch on secrets, in the code that LLVM makes of them; and the check finds those that
do."""

import numpy as np
import pytest
from numba import njit, types

from accel.compiled import order
from tests.accel.branches import optimised, secret_branches

WORDS, SMALL, LINE, SMALL_LINE = types.uint64[:, ::1], types.uint8[:, ::1], types.uint64[::1], types.uint8[::1]
NUMBER, FLAG = types.int64, types.boolean
KINDS = {
    "order_shuffle": (SMALL, SMALL),
    "order_deal": (WORDS, SMALL, NUMBER, NUMBER, SMALL),
    "order_reply": (WORDS, SMALL, SMALL, SMALL, SMALL, SMALL_LINE, NUMBER, NUMBER, FLAG, SMALL),
    "order_place": (WORDS, SMALL, WORDS, WORDS, NUMBER, WORDS),
    "order_decide": (SMALL, SMALL, NUMBER, WORDS, WORDS, NUMBER, WORDS, LINE),
    "order_pick": (WORDS, WORDS, NUMBER, LINE),
}


def test_every_kernel_of_order_is_looked_at():
    assert set(KINDS) == set(order.__all__)


@pytest.mark.parametrize("name", KINDS)
def test_no_jump_of_order_depends_on_what_lies_in_its_arrays(name):
    assert secret_branches(optimised(getattr(order, name), *KINDS[name])) == []


@njit
def _chosen_by_jumps(digit, values, out):
    for p in range(out.size):
        zero, one, two, which = values[0, p], values[1, p], values[2, p], digit[p]
        low = one if which == 1 else zero
        out[p] = two if which >= 2 else low + out[p - 1]


@njit
def _stops_at_zero(tests, prime, out):
    for p in range(out.size):
        for t in range(tests.shape[0]):
            if tests[t, p] % prime == 0:
                out[p] = 1
                break


@njit
def _divides_by_a_secret(words, out):
    for p in range(out.size):
        out[p] = words[p] // (words[p] >> np.uint64(60))  # numba asks first whether it is zero


@njit
def _calls_only_for_some(words, out):
    for p in range(out.size):
        if words[p] & np.uint64(1):
            _chosen_by_jumps(out, words.view(np.uint8).reshape(8, -1), out)


@pytest.mark.parametrize(
    ("planted", "kinds"),
    [
        (_stops_at_zero, (SMALL, NUMBER, SMALL_LINE)),
        (_divides_by_a_secret, (LINE, LINE)),
        (_calls_only_for_some, (LINE, SMALL_LINE)),
    ],
)
def test_a_planted_branch_is_found(planted, kinds):
    assert secret_branches(optimised(planted, *kinds))


@njit
def _by_shapes_and_flags(words, leads, count, out):
    for p in range(min(out.size, count)):
        out[p] = words[p] if leads else np.uint64(0) - words[p]
        out[p] += np.uint64(words[p] > np.uint64(5))


def test_branches_on_sizes_flags_and_numbers_are_none():
    assert secret_branches(optimised(_by_shapes_and_flags, LINE, FLAG, NUMBER, LINE)) == []
