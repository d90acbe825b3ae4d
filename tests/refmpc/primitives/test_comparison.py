"""Signs, comparisons, maxima and ReLU against numpy's, at full width and on fewer bits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import refmpc
from refmpc.core.party import SMALL
from tests.refmpc.harness import Secret, dealers, layouts, opened, random_signed, seeds, shapes


@given(shape=shapes, seed=seeds, layout=layouts, begun=dealers)
def test_the_sign_is_exact_over_the_whole_ring(shape, seed, layout, begun):
    values = random_signed(seed, shape, bits=63)
    got = opened(lambda party, x: refmpc.is_negative(x), Secret(values, layout=layout), seed=seed, begun=begun)
    assert got.words.shape == shape
    assert np.array_equal(got.words, values < 0)


@pytest.mark.parametrize("high_bit", [*range(1, 18), 31, 32, 47, 62, 63])
def test_the_sign_is_exact_at_every_width_up_to_the_edges_of_its_domain(high_bit):
    top = 2**high_bit
    edges = [0, -1, 1, top - 1, -top, -top + 1, top // 2, -(top // 2)]
    values = random_signed(high_bit, (300,), bits=high_bit, edges=[e for e in edges if -top <= e < top] * 8)
    for begun in range(3):
        got = opened(lambda party, x: refmpc.is_negative(x, high_bit=high_bit), Secret(values), seed=begun, begun=begun)
        assert np.array_equal(got.words, values < 0)


@given(data=st.data(), seed=seeds, begun=dealers)
def test_a_short_comparison_errs_only_just_below_zero(data, seed, begun):
    """Domain −2^high ≤ x ≤ 2^high − 2^low: sure for x ≥ 0 and x ≤ −2^low, open in between."""
    high = data.draw(st.integers(2, 63))
    low = data.draw(st.integers(1, high - 1))
    top, step = 2**high, 2**low
    values = random_signed(
        seed, (400,), bits=high, edges=[0, 1, step, -step, step - 1, -step - 1, -top, top - step] * 6
    )
    values = np.minimum(values, top - step)
    got = opened(lambda party, x: refmpc.is_negative(x, low, high), Secret(values), seed=seed, begun=begun)
    sure = (values >= 0) | (values <= -step)
    assert np.array_equal(got.words[sure], (values < 0)[sure])


def test_the_topmost_values_are_outside_the_domain_of_a_short_comparison():
    """Why the domain ends at 2^high − 2^low: dropping low bits may round up, past the sign bit."""
    values = np.full(3000, 2**16 - 1)
    assert opened(lambda party, x: refmpc.is_negative(x, 4, 16), Secret(values)).words.any()
    assert not opened(lambda party, x: refmpc.is_negative(x, 4, 16), Secret(values - 15)).words.any()


@pytest.mark.parametrize(
    "low, high, said", [(0, 64, "high_bit"), (0, 0, "high_bit"), (5, 5, "low_bit"), (-1, 5, "low")]
)
def test_the_compared_bits_are_checked(low, high, said):
    with pytest.raises(refmpc.PartyFailed, match=said):
        opened(lambda party, x: refmpc.is_negative(x, low, high), Secret([1]))


@given(shape=shapes, seed=seeds, begun=dealers, close=st.booleans())
def test_the_comparison_operators_agree_with_numpy(shape, seed, begun, close):
    a = random_signed(seed, shape, bits=61)
    b = a + np.random.default_rng(seed).integers(-1, 2, shape) if close else random_signed(seed + 1, shape, bits=61)
    got = opened(
        lambda party, x, y: [x < y, x > y, x <= y, x >= y, x < 7, x >= np.int64(-3), np.int64(5) > x],
        Secret(a),
        Secret(b),
        seed=seed,
        begun=begun,
    )
    for result, want in zip(got, [a < b, a > b, a <= b, a >= b, a < 7, a >= -3, a < 5], strict=True):
        assert np.array_equal(result.words, want)


def test_tensors_of_different_scales_compare_by_value():
    got = opened(lambda party, x, y: x < y, Secret([3 << 4, 3 << 4], 4), Secret([(3 << 20) + 1, 3 << 20], 20))
    assert got.words.tolist() == [1, 0]


@given(shape=shapes, seed=seeds, layout=layouts, begun=dealers)
def test_relu_keeps_what_is_positive(shape, seed, layout, begun):
    values = random_signed(seed, shape, bits=63)
    got = opened(lambda party, x: refmpc.relu(x), Secret(values, 9, layout=layout), seed=seed, begun=begun)
    assert np.array_equal(got.signed, np.maximum(values, 0))
    assert got.scale == 9


@given(seed=seeds, low=st.integers(1, 10))
def test_a_short_relu_is_off_by_less_than_its_resolution(seed, low):
    values = np.minimum(random_signed(seed, (500,), bits=20), 2**20 - 2**low)
    got = opened(lambda party, x: refmpc.relu(x, low, 20), Secret(values), seed=seed)
    below = np.maximum(values, 0) - got.signed
    assert below.min() >= 0 and below.max() < 2**low


@given(
    seed=seeds,
    shape=st.sampled_from([(1,), (2,), (10,), (3, 1), (3, 5), (4, 7), (2, 3, 4), (0, 3), (700, 10)]),
    data=st.data(),
)
def test_the_maximum_along_any_axis_is_exact(seed, shape, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1).filter(lambda a: shape[a] > 0))
    values = random_signed(seed, shape, bits=61)
    got = opened(lambda party, x: refmpc.maximum(x, axis=axis), Secret(values, 3), seed=seed)
    assert np.array_equal(got.signed, values.max(axis=axis))
    assert got.scale == 3


@given(seed=seeds, entries=st.integers(2, 11))
def test_a_short_maximum_is_an_entry_close_to_the_largest(seed, entries):
    low, levels = 6, int(np.ceil(np.log2(entries)))
    values = random_signed(seed, (60, entries), bits=14)
    got = opened(lambda party, x: refmpc.maximum(x, low_bit=low, high_bit=16), Secret(values), seed=seed).signed
    assert (values == got[:, np.newaxis]).any(axis=1).all()
    below = values.max(axis=1) - got
    assert below.min() >= 0 and below.max() < levels * 2**low


def test_the_maximum_of_nothing_is_refused():
    with pytest.raises(refmpc.PartyFailed, match="entries along axis 1 = 0"):
        opened(lambda party, x: refmpc.maximum(x, axis=1), Secret(np.zeros((2, 0), np.int64)))


@pytest.mark.parametrize("size", [1, 65, SMALL - 1, SMALL, SMALL + 1])
def test_both_ways_to_find_the_sign_agree(size):
    values = random_signed(size, (size,), bits=63)
    for begun in range(3):
        fast, tree = opened(
            lambda party, x: [
                party.complete(refmpc.is_negative(x)),
                party.complete(refmpc.is_negative_by_carry_tree(x)),
            ],
            Secret(values),
            begun=begun,
        )
        assert np.array_equal(fast.words, tree.words)


def test_holders_bits_of_a_comparison_are_fair_coins():
    """β is uniform whatever the secret, so neither the dealer's bit nor the holders' tells the sign."""
    for value in (5, -5):
        got = opened(lambda party, x: refmpc.is_negative(x), Secret(np.full(3 * SMALL, value)), insecure_seed=1)
        for held in got.shares:
            for part in np.split(held, 3):
                assert abs(part.mean() - 0.5) < 5 * 0.5 / SMALL**0.5
