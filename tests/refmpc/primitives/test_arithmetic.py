"""Products of shared tensors against Python's own integers modulo 2^64."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import refmpc
from tests.refmpc.harness import (
    SIZES,
    Secret,
    dealers,
    evaluate,
    layouts,
    opened,
    random_signed,
    seeds,
    shapes,
    sizes,
    words,
)

pairs_of_shapes = st.one_of(
    shapes.map(lambda shape: (shape, shape)),
    st.sampled_from([((3,), ()), ((), (4,)), ((2, 3), (3,)), ((1, 3), (2, 1)), ((2, 1, 3), (4, 1)), ((0,), (1,))]),
)


@given(pair=pairs_of_shapes, seed=seeds, layout=layouts, begun=dealers)
def test_multiply_is_exact_in_the_ring(pair, seed, layout, begun):
    a, b = random_signed(seed, pair[0]), random_signed(seed + 1, pair[1])
    got = opened(
        lambda party, x, y: refmpc.multiply(x, y),
        Secret(a, 5, layout=layout),
        Secret(b, 7, layout="plain"),
        seed=seed,
        begun=begun,
    )
    want = words(a) * words(b)
    assert got.words.shape == np.broadcast_shapes(*pair)
    assert np.array_equal(got.words, want)
    assert got.scale == 12


@given(seed=seeds, rows=st.integers(0, 4), length=st.integers(0, 9), flat=st.booleans(), layout=layouts)
def test_dot_sums_along_the_last_axis(seed, rows, length, flat, layout):
    shape = (length,) if flat else (rows, length)
    a, b = random_signed(seed, shape), random_signed(seed + 1, (length,))
    got = opened(lambda party, x, y: refmpc.dot(x, y), Secret(a, layout=layout), Secret(b), seed=seed)
    assert got.words.shape == shape[:-1]
    assert np.array_equal(got.words, (words(a) * words(b)).sum(axis=-1, dtype=np.uint64))


MATMUL_SHAPES = [
    ((2, 3), (3, 4)),
    ((3,), (3,)),
    ((3,), (3, 2)),
    ((2, 3), (3,)),
    ((1, 1), (1, 1)),
    ((0, 3), (3, 2)),
    ((2, 0), (0, 3)),
    ((5, 2, 3), (5, 3, 4)),
    ((2, 2, 3), (3, 4)),
    ((2, 3), (2, 3, 4)),
    ((2, 3), (5, 3, 4)),
    ((3,), (2, 3, 4)),
    ((2, 4, 3), (3,)),
    ((2, 1, 2, 3), (4, 3, 2)),
    ((80, 3), (3, 80)),  # enough outputs for three dealers
]


@pytest.mark.parametrize("shapes_", MATMUL_SHAPES, ids=str)
@pytest.mark.parametrize("layout", ["plain", "transposed", "strided"])
def test_matmul_follows_numpy_in_every_shape(shapes_, layout):
    a, b = (random_signed(i, shape) for i, shape in enumerate(shapes_))
    secrets = Secret(a, 4, layout=layout), Secret(b, 6, layout=layout)
    exact, cut = opened(
        lambda party, x, y: [
            party.complete(refmpc.matmul(x, y)),
            party.complete(refmpc.matmul_truncate(x[..., :], y, 5)),
        ],
        *secrets,
        begun=1,
    )
    with np.errstate(over="ignore"):
        want = np.asarray(words(a) @ words(b))
    assert exact.words.shape == cut.words.shape == want.shape
    assert np.array_equal(exact.words, want)
    assert (exact.scale, cut.scale) == (10, 5)


@given(seed=seeds, pair=st.sampled_from(MATMUL_SHAPES), bits=st.integers(1, 30), begun=dealers)
def test_truncated_matmul_is_off_by_at_most_one_unit(seed, pair, bits, begun):
    a, b = (random_signed(seed + i, shape, bits=28) for i, shape in enumerate(pair))
    got = opened(
        lambda party, x, y: refmpc.matmul_truncate(x, y, bits), Secret(a, 15), Secret(b, 15), seed=seed, begun=begun
    )
    error = got.signed - (np.asarray(a @ b) >> bits)
    assert error.min(initial=0) >= 0 and error.max(initial=0) <= 1
    assert got.scale == 30 - bits


@given(seed=seeds, size=sizes, bits=st.sampled_from([1, 8, 16, 31, 33, 62]), begun=dealers, layout=layouts)
def test_truncated_products_are_off_by_at_most_one_unit(seed, size, bits, begun, layout):
    a, b = random_signed(seed, (size,), bits=31), random_signed(seed + 1, (size,), bits=31)
    got = opened(
        lambda party, x, y: refmpc.multiply_truncate(x, y, bits),
        Secret(a, 31, layout=layout),
        Secret(b, 31),
        seed=seed,
        begun=begun,
    )
    error = got.signed - ((a * b) >> bits)
    assert error.min(initial=0) >= 0 and error.max(initial=0) <= 1
    assert got.scale == 62 - bits


@given(seed=seeds, rows=st.integers(0, 5), length=st.integers(1, 6), bits=st.integers(1, 20))
def test_truncated_dot_is_off_by_at_most_one_unit(seed, rows, length, bits):
    a, b = random_signed(seed, (rows, length), bits=25), random_signed(seed + 1, (length,), bits=25)
    got = opened(lambda party, x, y: refmpc.dot_truncate(x, y, bits), Secret(a, 10), Secret(b, 10), seed=seed)
    error = got.signed - ((a * b).sum(axis=-1) >> bits)
    assert error.min(initial=0) >= 0 and error.max(initial=0) <= 1


def test_integers_stay_integers_under_a_truncated_product():
    got = opened(lambda party, x, y: refmpc.multiply_truncate(x, y, 4), Secret([32, -48]), Secret([16, 1]))
    assert got.scale == 0 and got.signed.tolist() == [32, -3]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fused", ["multiply_truncate", "dot_truncate", "matmul_truncate"])
def test_each_partys_addend_goes_into_the_product(size, fused):
    """Addends at the product's scale, one per party, one of them absent: their sum is truncated with the product."""
    a, b = random_signed(size, (size, 1), bits=28), random_signed(size + 1, (1, 1), bits=28)
    noise = random_signed(size + 2, (2, size), bits=60, edges=[2**60 - 1, -(2**60)])

    def program(party, x, y):
        own = None if party.id == 1 else noise[party.id // 2]
        if fused == "matmul_truncate":
            return refmpc.matmul_truncate(x, y, 16, addend=None if own is None else own.reshape(size, 1))
        if fused == "dot_truncate":
            return refmpc.dot_truncate(x, y, 16, addend=own)
        return refmpc.multiply_truncate(x[:, 0], y[0, 0], 16, addend=own)

    got = opened(program, Secret(a, 10), Secret(b, 10))
    error = got.signed.reshape(-1) - (((a * b)[:, 0] + noise[0] + noise[1]) >> 16)
    assert error.min(initial=0) >= 0 and error.max(initial=0) <= 1


@pytest.mark.parametrize(
    "addend, said",
    [
        (np.zeros(3, dtype=np.int64), "addend.shape = (3,): must be the shape of the product, (2,)"),
        (np.zeros(2), "addend.dtype = dtype('float64'): must be int64 or uint64 ring words"),
    ],
)
def test_an_addend_that_does_not_fit_is_refused(addend, said):
    with pytest.raises(refmpc.PartyFailed) as failure:
        opened(lambda party, x: refmpc.multiply_truncate(x, x, 4, addend=addend), Secret([1, 2], 8))
    assert said in str(failure.value)


@pytest.mark.parametrize("bits", [0, 21, 63])
def test_a_product_cannot_lose_more_bits_than_its_scale_has(bits):
    with pytest.raises(refmpc.PartyFailed, match=f"bits = {bits}: must be an integer from 1 to 20"):
        opened(lambda party, x: refmpc.multiply_truncate(x, x, bits), Secret([1, 2], 10))


@pytest.mark.parametrize("a, b", [((2, 3), (2, 3)), ((3,), (2,)), ((), (3,)), ((2, 2, 3), (3, 3, 4))])
def test_matmul_refuses_shapes_that_do_not_match(a, b):
    with pytest.raises(refmpc.PartyFailed, match=r"matmul operands|broadcast"):
        opened(lambda party, x, y: refmpc.matmul(x, y), Secret(np.zeros(a, np.int64)), Secret(np.zeros(b, np.int64)))


def test_shares_of_a_product_are_fresh():
    """Multiplying the same shares twice gives the same secret under different shares."""
    run = evaluate(
        lambda party, x: [party.complete(refmpc.multiply(x, x)), party.complete(refmpc.multiply(x, x))],
        Secret(np.arange(100)),
    )
    first, second = run.opened
    assert np.array_equal(first.words, second.words)
    for party in range(3):
        assert not (first.shares[party] == second.shares[party]).any()
