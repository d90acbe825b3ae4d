"""Kernels called from a table: the same results as from Python, and nothing else than that is taken into one."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

import accel
from accel.compiled.calls import CallTable, Composed

kernels = accel.backend("numba")
WORDS = np.arange(43, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def outside(array: np.ndarray) -> tuple[int, int]:
    """No array lies in an input."""
    return -1, 0


def test_calls_of_a_table_do_what_python_does_in_order() -> None:
    random = np.random.default_rng(1).integers(0, 256, 400, dtype=np.uint8)
    small, low, packed = np.zeros(43, np.uint8), np.zeros(43, np.uint64), np.zeros(65, np.uint8)
    table = CallTable()
    kernels.add_low(WORDS, WORDS, 12, low)
    kernels.uniform_below(random, 11, small)
    kernels.pack_into(low, 12, packed)
    expected = [array.copy() for array in (low, small, packed)]
    assert table.add(kernels.add_low, [WORDS, WORDS, 12, low])
    assert table.add(kernels.uniform_below, [random, 11, small], small.size)
    assert table.add(kernels.pack_into, [low, 12, packed])
    table.finish(outside)
    arrays: list[np.ndarray] = [low, small, packed]
    for array in arrays:
        array.fill(77)
    assert table.run(0, len(table)) == len(table)
    for array, as_before in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(array, as_before)


def test_a_call_that_returns_another_number_is_where_the_table_stops() -> None:
    random = np.zeros(8, np.uint8)  # of which too few are left for 43 values
    small, low = np.zeros(43, np.uint8), np.zeros(43, np.uint64)
    kernels.uniform_below(random, 11, small)
    kernels.add_low(WORDS, WORDS, 12, low)
    low.fill(0)
    table = CallTable()
    assert table.add(kernels.uniform_below, [random, 11, small], small.size)
    assert table.add(kernels.add_low, [WORDS, WORDS, 12, low])
    table.finish(outside)
    assert table.run(0, 2) == 0 and not low.any()
    assert table.run(1, 2) == 2 and low.any()


def test_a_kernel_that_raises_is_where_the_table_stops() -> None:
    @njit(nogil=True)
    def refuse(x, out):
        if x[0] == 0:
            raise ValueError("zero")
        out[0] = x[0]

    x, out = np.ones(1, np.uint64), np.zeros(1, np.uint64)
    refuse(x, out)
    table = CallTable()
    assert table.add(refuse, [x, out])
    table.finish(outside)
    assert table.run(0, 1) == 1
    x[0] = 0
    assert table.run(0, 1) == 0


def test_inputs_are_bound_by_their_address() -> None:
    both, out = np.stack([WORDS, WORDS + np.uint64(1)]), np.zeros(43, np.uint64)
    kernels.add_low(both[0], both[1], 64, out)
    table = CallTable()
    assert table.add(kernels.add_low, [both[0], both[1], 64, out])

    def origin(array: np.ndarray) -> tuple[int, int]:
        if not np.may_share_memory(array, both):
            return -1, 0
        return 5, array.__array_interface__["data"][0] - both.__array_interface__["data"][0]

    ((index, (places, offsets)),) = table.finish(origin).items()
    assert index == 5
    other = both * np.uint64(3)
    table.bind(places, offsets, other.__array_interface__["data"][0])
    assert table.run(0, 1) == 1
    np.testing.assert_array_equal(out, other[0] + other[1])


def test_what_is_computed_beforehand_is_not_taken() -> None:
    """A composed kernel that copies an argument would see the copy's old numbers ever after."""
    out = np.zeros(43, np.uint64)
    copying = Composed(lambda x, y: [(kernels.add_low, (x.copy(), x, 64, y))])
    copying(WORDS, out)
    table = CallTable()
    assert not table.add(copying, [WORDS, out]) and len(table) == 0
    apart = np.zeros((2, 86, 30), np.uint64)[:, ::2]  # the same of a kernel of ours: rows that are not in one piece
    turned, held = np.zeros((10, 30), np.uint64), np.zeros((43, 10), np.uint64)
    kernels.matmul_held(apart[:, :, ::2], 0, turned[:, :15].copy(), held)
    assert not table.add(kernels.matmul_held, [apart[:, :, ::2], 0, turned[:, :15].copy(), held])


def test_a_call_from_which_nothing_is_compiled_is_not_taken() -> None:
    table, out = CallTable(), np.zeros(43, np.uint64)
    assert not table.add(np.copyto, [out, WORDS])
    assert not table.add(kernels.add_low, [WORDS, WORDS, np.float32(1), out])  # no such types
    assert not table.add(kernels.uniform_below, [out.view(np.uint8), 11, out.view(np.uint8)])  # its number is ignored


@pytest.mark.parametrize("shape", [(43,), (5, 7), (9, 4)])
def test_local_kernels_take_every_layout(shape: tuple[int, ...]) -> None:
    reference = accel.backend("numpy")
    words = np.random.default_rng(2).integers(0, 2**63, (2, *shape), dtype=np.uint64)
    layouts = [words, np.asfortranarray(words[0])[None].repeat(2, axis=0), words[:, ::-1]]
    for x, y in layouts:
        for name in ("subtract", "xor"):
            found, expected = np.zeros(shape, np.uint64), np.zeros(shape, np.uint64)
            getattr(kernels, name)(x, y, found)
            getattr(reference, name)(x, y, expected)
            np.testing.assert_array_equal(found, expected)
        for name, arguments in (("negate", ()), ("copy", ()), ("shift_right", (28,)), ("multiply", (np.uint64(5),))):
            found, expected = np.zeros(shape, np.uint64), np.zeros(shape, np.uint64)
            getattr(kernels, name)(x, *arguments, found)
            getattr(reference, name)(x, *arguments, expected)
            np.testing.assert_array_equal(found, expected)
