"""Fixed point: encoding and decoding, and what is refused by name."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import refmpc

scales = st.integers(0, 60)


@given(bits=scales, data=st.data())
def test_integers_are_exact_up_to_the_limit(bits, data):
    limit = 2 ** (62 - bits)
    value = data.draw(st.integers(-limit + 1, limit - 1))
    words = refmpc.encode(np.array([value, -value]), bits)
    assert words.dtype == np.uint64
    assert words.view(np.int64).tolist() == [value << bits, -value << bits]


@given(bits=scales, data=st.data())
def test_reals_are_rounded_to_the_nearest_step(bits, data):
    limit = refmpc.largest_value(bits)
    value = data.draw(st.floats(-limit, limit, exclude_min=True, exclude_max=True))
    back = refmpc.decode(refmpc.encode(np.array([value]), bits), bits)[0]
    assert abs(float(back) - value) <= 2.0 ** -(bits + 1) + abs(value) * 2.0**-52


@given(bits=st.integers(1, 60), seed=st.integers(0, 2**32 - 1))
def test_decoding_and_encoding_again_changes_nothing(bits, seed):
    words = np.random.default_rng(seed).integers(-(2**52), 2**52, 20).view(np.uint64)
    assert np.array_equal(refmpc.encode(refmpc.decode(words, bits), bits), words)


@pytest.mark.parametrize("bits", [0, 1, 16, 60])
def test_one_step_beyond_the_limit_is_refused_and_one_below_is_not(bits):
    limit = refmpc.largest_value(bits)
    for value in (limit, -limit, int(limit), -int(limit)):
        with pytest.raises(ValueError, match=f"below {limit:g}".replace("+", r"\+") + f" at fraction_bits = {bits}"):
            refmpc.encode(np.array([0, value]), bits)
    refmpc.encode(np.array([np.nextafter(limit, 0), -np.nextafter(limit, 0)]), bits)
    refmpc.encode(np.array([int(limit) - 1, 1 - int(limit)]), bits)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize(
    "view", [lambda a: a, lambda a: a.T, lambda a: a[:, ::2]], ids=["plain", "transposed", "strided"]
)
def test_the_first_bad_value_is_named_with_its_position(value, view):
    array = np.zeros((3, 4))
    array[1, 2] = value
    array[2, 2] = np.nan
    seen = view(array)
    position = [int(i) for i in np.argwhere(~(np.abs(seen) < 1e9))[0]]
    with pytest.raises(ValueError) as refusal:
        refmpc.encode(seen, 16, name="embeddings")
    assert f"embeddings{position} = {float(value)!r}: must be finite" in str(refusal.value)
    assert "scale the data down or use fewer fraction bits" in str(refusal.value)


@pytest.mark.parametrize("values", ["a", 1j, [None], [object()]])
def test_what_is_not_a_real_number_is_refused(values):
    with pytest.raises(ValueError, match="must be real numbers, integers or booleans"):
        refmpc.encode(values)


@pytest.mark.parametrize("bits", [-1, 61, 1.5, True])
def test_the_scale_is_checked(bits):
    with pytest.raises(ValueError, match=r"fraction_bits = .*: must be an integer from 0 to 60"):
        refmpc.encode([1.0], bits)


def test_booleans_small_integers_and_single_values_are_welcome():
    assert refmpc.encode(np.array([True, False]), 3).tolist() == [8, 0]
    assert refmpc.encode(np.array([-1], dtype=np.int8), 1).view(np.int64).tolist() == [-2]
    assert refmpc.encode(np.uint8(200), 2).tolist() == 800
    assert refmpc.encode(0.5).tolist() == 2**15
    assert refmpc.encode(np.float32(0.25), 4).tolist() == 4
    assert refmpc.encode([], 4).shape == (0,)
    assert refmpc.encode(np.zeros((2, 0, 3))).shape == (2, 0, 3)


@given(seed=st.integers(0, 2**32 - 1), bits=st.integers(0, 40))
def test_views_are_encoded_and_decoded_in_their_own_order(seed, bits):
    array = np.random.default_rng(seed).integers(-100, 100, (4, 6))
    for view in (array.T, array[::-1, ::2], np.broadcast_to(array[0], (3, 6))):
        for kind in (view, view.astype(float)):
            words = refmpc.encode(kind, bits)
            assert np.array_equal(words.view(np.int64), view << bits)
            assert np.array_equal(refmpc.decode(words.T, bits), view.T)


def test_integers_decode_to_integers_and_reals_to_reals():
    assert refmpc.decode(np.array([2**64 - 1], dtype=np.uint64), 0).tolist() == [-1]
    assert refmpc.decode(np.array([3], dtype=np.uint64), 0).dtype == np.int64
    assert refmpc.decode(np.array([3], dtype=np.uint64), 1).dtype == np.float64
