"""Truncation: at most one unit of error over the whole domain, none on multiples, and none on average."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import refmpc
from refmpc.core.party import SMALL
from tests.refmpc.harness import Secret, dealers, layouts, opened, random_signed, seeds, shapes

BITS = [1, 8, 13, 16, 20, 30, 32, 33, 40, 62]
DOMAIN_EDGES = [0, 1, -1, 2**16 + 1, 2**16 - 1, -(2**16) + 1, -(2**16) - 1, 2**40, -(2**40), 2**62 - 1, -(2**62)]


def truncate(bits):
    return lambda party, x: refmpc.truncate(x, bits)


def multiply_truncate(bits):
    """By a shared one: the product is the value itself, so that the whole domain can be reached."""

    async def program(party, x):
        one = refmpc.ArithmeticTensor.zeros(party, x.shape, 0) + 1
        return await refmpc.multiply_truncate(x, one, bits)

    return program


both = pytest.mark.parametrize("kind", [truncate, multiply_truncate])


def near_the_limits(seed: int, count: int, bits: int) -> np.ndarray:
    """Values all over −2^62 ≤ x < 2^62, crowded at its ends, at zero and at multiples of 2^bits."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-(2**62), 2**62, size=count, dtype=np.int64)
    small = rng.integers(0, 2**20, size=count, dtype=np.int64)
    which = np.arange(count) % 5
    values[which == 1] = (2**62 - 1 - small)[which == 1]
    values[which == 2] = (-(2**62) + small)[which == 2]
    values[which == 3] = ((values >> bits) << bits)[which == 3] + (small % 3 - 1)[which == 3]
    values[which == 4] = (small - 2**19)[which == 4]
    return np.clip(values, -(2**62), 2**62 - 1)


@both
@pytest.mark.parametrize("bits", BITS)
def test_the_error_is_at_most_one_unit_over_the_whole_domain(kind, bits):
    values = np.concatenate([DOMAIN_EDGES * 3, near_the_limits(bits, 30_000, bits)])
    for begun in range(3):
        got = opened(kind(bits), Secret(values, 62), seed=bits + begun, begun=begun)
        error = got.signed - (values >> bits)
        assert error.min() >= 0 and error.max() <= 1
        exact = values % 2**bits == 0
        assert not error[exact].any()
        assert got.scale == 62 - bits


@both
@given(shape=shapes, seed=seeds, bits=st.integers(1, 62), layout=layouts, begun=dealers)
def test_every_shape_and_layout_is_truncated_element_by_element(kind, shape, seed, bits, layout, begun):
    values = random_signed(seed, shape, bits=62)
    got = opened(kind(bits), Secret(values, 62, layout=layout), seed=seed, begun=begun)
    assert got.words.shape == shape
    error = got.signed - (values >> bits)
    assert error.min(initial=0) >= 0 and error.max(initial=0) <= 1


@both
@given(shape=shapes, seed=seeds, bits=st.sampled_from(BITS), begun=dealers)
def test_multiples_are_exact(kind, shape, seed, bits, begun):
    quotient = random_signed(seed, shape, bits=62 - bits)
    got = opened(kind(bits), Secret(quotient << bits, 62), seed=seed, begun=begun)
    assert np.array_equal(got.signed, quotient)


@both
@pytest.mark.parametrize("bits", BITS)
def test_the_error_is_zero_on_average(kind, bits):
    """⌊x/2^m⌋ + 1 must come up with probability (x mod 2^m)/2^m, at every dealer and everywhere in the domain."""
    count = 3 * SMALL
    for offset, start in enumerate((0, -(2**62), 2**62 - 2**bits)):
        for fraction in {2 ** (bits - 1), max(1, 2**bits // 8)}:
            values = np.full(count, start + fraction)
            got = opened(kind(bits), Secret(values, 62), seed=offset + bits, insecure_seed=7 * bits + offset)
            ups = got.signed - (values >> bits)
            chance = fraction / 2**bits
            standard_error = (chance * (1 - chance) / count) ** 0.5
            assert abs(ups.mean() - chance) < 5 * standard_error
            for third in np.split(ups, 3):  # near enough one dealer each
                assert abs(third.mean() - chance) < 5 * standard_error * 3**0.5


@both
def test_rounding_of_one_element_says_nothing_about_the_next(kind):
    values = np.full(2 * SMALL, 2**15)
    ups = opened(kind(16), Secret(values, 62), insecure_seed=3).signed
    both_up = (ups[1:] & ups[:-1]).mean()
    assert abs(both_up - 0.25) < 5 * (0.25 * 0.75 / ups.size) ** 0.5


@pytest.mark.parametrize("bits", [0, 63, -1, 1.5, True])
def test_the_number_of_bits_is_checked(bits):
    with pytest.raises(refmpc.PartyFailed, match=r"bits = .*: must be an integer from 1 to 62"):
        opened(truncate(bits), Secret([1], 16))


def test_the_scale_never_falls_below_integers():
    assert opened(truncate(20), Secret([2**30], 16)).scale == 0
    assert opened(truncate(10), Secret([2**30], 16)).scale == 6


@pytest.mark.heavy
@both
def test_a_hundred_million_truncations_near_the_limits_have_no_larger_error(kind):
    """Ten values of ``bits``, ten times a million values, each time under fresh shares."""
    for bits in BITS:
        for chunk in range(10):
            values = near_the_limits(100 * bits + chunk, 1_000_000, bits)
            error = opened(kind(bits), Secret(values, 62), seed=chunk, begun=chunk).signed - (values >> bits)
            assert error.min() >= 0 and error.max() <= 1


@pytest.mark.parametrize("origin", ["public", "input of a server", "random shares", "result"])
def test_the_mean_error_of_truncate_depends_on_how_the_tensor_is_shared(origin):
    """As its docstring says: none on random shares; 1/6 of a unit on average over the dealers where shares are zero."""
    bits, values = 16, np.random.default_rng(8).integers(0, 2**30, 3 * SMALL)

    async def program(party, x):
        if origin == "public":
            x = refmpc.ArithmeticTensor.zeros(party, x.shape, 0) + values
        elif origin == "input of a server":
            x = await refmpc.input_from_party(party, 1, values if party.id == 1 else None, values.shape, 0)
        elif origin == "result":
            public = refmpc.ArithmeticTensor.zeros(party, x.shape, 0)
            x = await refmpc.multiply(public + values, public + 1)
        return await refmpc.truncate(x, bits)

    error = (opened(program, Secret(values)).signed - values / 2**bits).mean()
    expected = 1 / 6 if origin in ("public", "input of a server") else 0.0
    assert abs(error - expected) < 0.02
