"""Two-holder bits: selection, conversion and table look-up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import refmpc
from refmpc.core.party import SMALL
from tests.refmpc.harness import Secret, dealers, layouts, opened, random_signed, seeds, shapes, sizes, words


def random_bits(seed, shape):
    return np.random.default_rng(seed).integers(0, 2, shape).astype(np.uint64)


@given(shape=shapes, seed=seeds, begun=dealers)
def test_xor_shared_bits_are_two_holder_bits(shape, seed, begun):
    bits = random_bits(seed, shape)
    same, inverted, back = opened(
        lambda party, b: [refmpc.two_holder(b), ~refmpc.two_holder(b), refmpc.two_holder(b).boolean()],
        Secret(bits, width=1),
        seed=seed,
        begun=begun,
    )
    assert np.array_equal(same.words, bits)
    assert np.array_equal(inverted.words, 1 - bits)
    assert np.array_equal(back.words, bits) and back.scale == 1


def test_only_single_bits_are_two_holder_bits():
    with pytest.raises(refmpc.PartyFailed, match=r"bits.width = 8: must be 1; take one bit of each word with .bit"):
        opened(lambda party, b: refmpc.two_holder(b), Secret([1], width=8))


@given(shape=shapes, seed=seeds, begun=dealers, rounds=st.sampled_from([1, 2]))
def test_bits_become_integers(shape, seed, begun, rounds):
    bits = random_bits(seed, shape)
    got = opened(
        lambda party, b: refmpc.bit_to_arithmetic(refmpc.two_holder(b), rounds),
        Secret(bits, width=1),
        seed=seed,
        begun=begun,
    )
    assert np.array_equal(got.words, bits) and got.scale == 0


@given(shape=shapes, seed=seeds, begun=dealers)
def test_bits_of_a_comparison_become_boolean_words(shape, seed, begun):
    values = random_signed(seed, shape)

    async def program(party, x):
        return await refmpc.bits_to_boolean(await refmpc.is_negative(x))

    got = opened(program, Secret(values), seed=seed, begun=begun)
    assert np.array_equal(got.words, values < 0) and got.scale == 1


@given(shape=shapes, seed=seeds, begun=dealers, layout=layouts)
def test_select_keeps_the_words_whose_bit_is_set(shape, seed, begun, layout):
    bits, values = random_bits(seed, shape), random_signed(seed, shape)
    got = opened(
        lambda party, b, d: refmpc.select(refmpc.two_holder(b), d),
        Secret(bits, width=1),
        Secret(values, 13, layout=layout),
        seed=seed,
        begun=begun,
    )
    assert np.array_equal(got.words, bits * words(values)) and got.scale == 13


def test_select_refuses_another_shape():
    with pytest.raises(refmpc.PartyFailed, match=r"d.shape = \(3,\): must be the shape of the bits, \(2,\)"):
        opened(lambda party, b, d: refmpc.select(refmpc.two_holder(b), d), Secret([0, 1], width=1), Secret([1, 2, 3]))


@given(shape=shapes, seed=seeds)
def test_where_takes_secrets_and_public_values(shape, seed):
    bits = random_bits(seed, shape)
    a, b = random_signed(seed + 1, shape, bits=40), random_signed(seed + 2, shape, bits=40)
    public = np.random.default_rng(seed).integers(-9, 9, shape)

    def program(party, bits, x, y):
        chosen = refmpc.two_holder(bits)
        return [
            chosen.where(x, y),
            chosen.where(x, public),
            chosen.where(public, y),
            chosen.where(x, 2),
            chosen.where(x, x),
        ]

    got = opened(program, Secret(bits, width=1), Secret(a), Secret(b), seed=seed)
    for result, (yes, no) in zip(got, [(a, b), (a, public), (public, b), (a, 2), (a, a)], strict=True):
        assert np.array_equal(result.signed, np.where(bits == 1, yes, no))


def test_where_aligns_scales_and_broadcasts():
    got = opened(
        lambda party, b, x, y: refmpc.where(refmpc.two_holder(b), x, y),
        Secret([[1, 0], [0, 1]], width=1),
        Secret([3 << 4, 5 << 4], 4),
        Secret(7 << 10, 10),
    )
    assert got.scale == 10 and got.value.tolist() == [[3, 7], [7, 5]]


def test_where_without_a_secret_is_refused():
    with pytest.raises(refmpc.PartyFailed, match="at least one secret tensor"):
        opened(lambda party, b: refmpc.two_holder(b).where(1, 0), Secret([1], width=1))


@given(
    seed=seeds, entries=st.sampled_from([1, 2, 8, 64]), size=st.integers(0, 40), begun=dealers, tables=st.integers(0, 3)
)
def test_lookup_finds_the_entry_modulo_the_table(seed, entries, size, begun, tables):
    rng = np.random.default_rng(seed)
    values = random_signed(seed, (size,))
    table = rng.integers(-(2**63), 2**63 - 1, (tables, entries) if tables else (entries,), dtype=np.int64)
    got = opened(lambda party, x: refmpc.lookup(x, table, 20), Secret(values), seed=seed, begun=begun)
    assert np.array_equal(got.signed, table[..., values % entries])
    assert got.scale == 20


@pytest.mark.parametrize("size", [SMALL - 1, SMALL, SMALL + 1])
def test_lookup_works_with_three_dealers(size):
    values = random_signed(size, (size,))
    table = np.arange(4)[::-1] * 10
    got = opened(lambda party, x: refmpc.lookup(x.reshape(1, size), table), Secret(values))
    assert np.array_equal(got.signed[0], table[values % 4])


@pytest.mark.parametrize(
    "table, said",
    [(np.zeros(3, np.int64), "a power of two"), (np.zeros(0, np.int64), "a power of two"), (np.zeros(4), "ring words")],
)
def test_lookup_refuses_other_tables(table, said):
    with pytest.raises(refmpc.PartyFailed, match=said):
        opened(lambda party, x: refmpc.lookup(x, table), Secret([1]))


@given(size=sizes, seed=seeds)
def test_bits_of_one_operation_xor_locally(size, seed):
    values = random_signed(seed, (size,))

    def program(party, x):
        sign = x < 0
        return [sign ^ sign, sign ^ ~sign]

    zeros, ones = opened(program, Secret(values, 0), seed=seed)
    assert not zeros.words.any() and ones.words.all()


def test_bits_of_different_dealers_do_not_mix():
    with pytest.raises(refmpc.PartyFailed, match="bits of the same shape dealt by the same parties"):
        opened(lambda party, x: (x < 0) ^ (x < 1), Secret([1, 2]))


@pytest.mark.parametrize("shape", [(6,), ((6,),), (2, 3), ((2, 3),), (3, -1)])
def test_bits_reshape_like_tensors(shape):
    values = np.array([1, -1, -1, 1, 1, -1])
    got = opened(lambda party, x: (x < 0).reshape(*shape), Secret(values))
    assert np.array_equal(got.words, (values < 0).reshape(*shape))


def test_bits_show_no_value_and_have_no_truth_value():
    def program(party, x):
        return repr(x < 0)

    assert opened(program, Secret([1, -1])) == [f"TwoHolderBits(shape=(2,), party={i})" for i in range(3)]
    with pytest.raises(refmpc.PartyFailed, match="is secret: it has no truth value"):
        opened(lambda party, x: 1 if x < 0 else 0, Secret([1]))
