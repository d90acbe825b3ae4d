"""Boolean circuits: AND, adders, equality and the conversions, against Python's integers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import refmpc
from tests.refmpc.harness import Secret, dealers, layouts, opened, random_signed, seeds, shapes, words


def random_words(seed, shape, width):
    return words(random_signed(seed, shape)) & np.uint64(2**width - 1)


@given(shape=shapes, seed=seeds, width=st.integers(1, 64), layout=layouts)
def test_and_or_xor_not_work_bit_by_bit(shape, seed, width, layout):
    a, b = random_words(seed, shape, width), random_words(seed + 1, shape, width)
    low = np.uint64(2**width - 1)
    got = opened(
        lambda party, x, y: [party.complete(refmpc.and_words(x, y)), x & y, x | y, x ^ y, ~x, x & b, x ^ b, b ^ x],
        Secret(a, width=width, layout=layout),
        Secret(b, width=width),
        seed=seed,
    )
    want = [a & b, a & b, a | b, a ^ b, ~a & low, a & b, a ^ b, a ^ b]
    for result, expected in zip(got, want, strict=True):
        assert result.words.shape == shape and result.scale == width
        assert np.array_equal(result.words, expected)


@given(seed=seeds, pair=st.sampled_from([((2,), ()), ((2, 2), (2,)), ((2,), (2, 2)), ((3, 1), (1, 2)), ((0,), (1,))]))
def test_public_and_secret_words_broadcast(seed, pair):
    a, b = random_words(seed, pair[0], 20), random_words(seed + 1, pair[1], 20)
    got = opened(lambda party, x, y: [x ^ y, x ^ b, x & b], Secret(a, width=20), Secret(b, width=20))
    for result, want in zip(got, [a ^ b, a ^ b, a & b], strict=True):
        assert result.words.shape == want.shape and np.array_equal(result.words, want)


@given(seed=seeds, index=st.integers(0, 63))
def test_one_bit_of_each_word_can_be_taken(seed, index):
    a = random_words(seed, (20,), 64)
    got = opened(lambda party, x: x.bit(index), Secret(a, width=64))
    assert got.scale == 1 and np.array_equal(got.words, (a >> np.uint64(index)) & np.uint64(1))


@pytest.mark.parametrize("operator", [lambda x, y: x ^ y, lambda x, y: x & y])
def test_words_of_different_widths_do_not_mix(operator):
    with pytest.raises(refmpc.PartyFailed, match="width"):
        opened(lambda party, x, y: operator(x, y), Secret([1], width=8), Secret([1], width=9))


def test_reals_are_no_words():
    with pytest.raises(refmpc.PartyFailed, match=r"public operand = .*must be integers or booleans"):
        opened(lambda party, x: x ^ 0.5, Secret([1], width=8))


@given(shape=shapes, seed=seeds, layout=layouts, begun=dealers)
def test_arithmetic_to_boolean_gives_all_64_bits(shape, seed, layout, begun):
    values = random_signed(seed, shape)
    got = opened(
        lambda party, x: refmpc.arithmetic_to_boolean(x), Secret(values, layout=layout), seed=seed, begun=begun
    )
    assert got.scale == 64 and np.array_equal(got.words, words(values))


@given(shape=shapes, seed=seeds, width=st.sampled_from([1, 7, 63, 64]), layout=layouts, begun=dealers)
def test_boolean_to_arithmetic_gives_the_same_words(shape, seed, width, layout, begun):
    values = random_words(seed, shape, width)
    got = opened(
        lambda party, x: refmpc.boolean_to_arithmetic(x, 11),
        Secret(values, width=width, layout=layout),
        seed=seed,
        begun=begun,
    )
    assert got.scale == 11 and np.array_equal(got.words, values)


@given(shape=shapes, seed=seeds, layout=layouts, begun=dealers)
def test_the_carry_tree_finds_the_sign_of_any_word(shape, seed, layout, begun):
    values = random_signed(seed, shape)
    got = opened(
        lambda party, x: refmpc.is_negative_by_carry_tree(x), Secret(values, layout=layout), seed=seed, begun=begun
    )
    assert np.array_equal(got.words, values < 0)


@given(shape=shapes, seed=seeds, begun=dealers)
def test_equality_is_exact(shape, seed, begun):
    a = random_signed(seed, shape)
    rng = np.random.default_rng(seed)
    flipped = words(a) ^ (np.uint64(1) << rng.integers(0, 64, shape).astype(np.uint64))  # one bit apart
    b = np.where(rng.integers(0, 2, shape) == 1, words(a), flipped)
    got = opened(lambda party, x, y: refmpc.equal(x, y), Secret(a), Secret(b), seed=seed, begun=begun)
    assert np.array_equal(got.words, words(a) == b)


def test_equality_broadcasts_and_aligns_scales():
    got = opened(lambda party, x, y: refmpc.equal(x, y), Secret(3 << 5, 5), Secret([3 << 2, 4, 0], 2))
    assert got.words.tolist() == [1, 0, 0]
    got = opened(lambda party, x: refmpc.equal(x, 1.5), Secret([3 << 4, 4, 0], 5))
    assert got.words.tolist() == [1, 0, 0]


@given(seed=seeds, begun=dealers, shape=shapes)
def test_conversions_there_and_back_are_the_identity(seed, begun, shape):
    values = random_signed(seed, shape)

    async def program(party, x):
        return await refmpc.boolean_to_arithmetic(await refmpc.arithmetic_to_boolean(x))

    assert np.array_equal(opened(program, Secret(values), begun=begun, seed=seed).signed, values)
