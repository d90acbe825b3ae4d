"""Every kernel, numpy and numba, against Python's own integers or against its definition."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import accel
from accel import backend
from accel.compiled import tiles
from accel.prg import Stream

BACKENDS = [backend("numpy"), backend("numba")]
both = pytest.mark.parametrize("kernels", BACKENDS, ids=["numpy", "numba"])
WORD = st.integers(0, 2**64 - 1)
EDGES = np.array([0, 1, 2, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1], dtype=np.uint64)


def garbage(*shape: int, dtype=np.uint64) -> np.ndarray:
    """Memory as a kernel finds it: it must not matter what was there."""
    return (
        np.frombuffer(np.random.default_rng(9).bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype)
        .reshape(shape)
        .copy()
    )


def packed_words(count: int, width: int) -> np.ndarray:
    return garbage(-(-((count * width + 7) // 8) // 8))


def packed_bytes(packed: np.ndarray, count: int, width: int) -> list[int]:
    return packed.view(np.uint8)[: (count * width + 7) // 8].tolist()


def filled(kernel, *arguments, out):
    """What a kernel writes into ``out``."""
    kernel(*arguments, out)
    return out


def random_words(seed: int, *shape: int) -> np.ndarray:
    words = Stream(seed.to_bytes(32, "little")).words(int(np.prod(shape)))
    words[: EDGES.size] = EDGES[: words.size]
    return words.reshape(shape)


@both
@given(seed=st.integers(0, 2**31), count=st.integers(0, 70))
def test_product_pair_is_the_replicated_product(kernels, seed, count):
    x0, x1, y0, y1, mask = random_words(seed, 5, count)
    x, y = np.stack([x0, x1]), np.stack([y0, y1])
    got = filled(kernels.product_pair, x, y, mask, out=garbage(count))
    want = [
        (int(a) * (int(c) + int(d)) + int(b) * int(c) + int(e)) % 2**64
        for a, b, c, d, e in zip(x0, x1, y0, y1, mask, strict=True)
    ]
    assert got.tolist() == want
    assert filled(kernels.product_pair, x, y, None, out=garbage(count)).tolist() == (got - mask).tolist()
    dots = filled(kernels.dot_pair, x[:, :, np.newaxis], y[:, :, np.newaxis], mask, out=garbage(count))
    assert dots.tolist() == want
    start = mask[:1] if count else None
    whole = filled(kernels.dot_pair, x[:, np.newaxis], y[:, np.newaxis], start, out=garbage(1))
    assert int(whole[0]) == (sum(want) - sum(map(int, mask[1:]))) % 2**64
    outer = filled(kernels.product_pair, x[:, :, np.newaxis], y[:, np.newaxis], None, out=garbage(count, count))
    assert (outer == x0[:, np.newaxis] * (y0 + y1) + x1[:, np.newaxis] * y0).all()
    rows = x.reshape(2, 1, count, 1), y.reshape(2, 1, 1, count)
    start = random_words(seed + 3, 1, count, count)
    every = filled(kernels.product_pair, *rows, start, out=garbage(1, count, count))
    assert np.array_equal(every[0], outer + start[0])


@both
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(0, 7),
    k=st.integers(0, 7),
    m=st.integers(0, 7),
    flip=st.booleans(),
)
def test_matmul_pair_wraps_around(kernels, seed, n, k, m, flip):
    x = random_words(seed, 2, k, n).transpose(0, 2, 1) if flip else random_words(seed, 2, n, k)
    y, mask = random_words(seed + 1, 2, k, m), random_words(seed + 2, n, m)
    got = filled(kernels.matmul_pair, x, y, mask, out=garbage(n, m))
    big = [a.astype(object) for a in (x[0], x[1], y[0], y[1], mask)]
    want = (big[0].dot(big[2] + big[3]) + big[1].dot(big[2]) + big[4]) % 2**64 if k else mask.astype(object)
    assert got.shape == (n, m)
    assert (got.astype(object) == want).all()


@both
@pytest.mark.parametrize(("n", "k", "m"), [(16, 8, 5), (17, 9, 6), (33, 40, 13), (1, 1, 1), (3, 64, 11), (2, 0, 3)])
def test_each_share_times_a_public_matrix(kernels, n, k, m):
    x, factor = random_words(1, 2, n, k), random_words(2, k, m)
    for shares, matrix in ((x, factor), (random_words(3, 2, k, n).transpose(0, 2, 1), factor[:, ::-1])):
        out = np.full((2, n, m), 0xA5A5, dtype=np.uint64)
        kernels.matmul_each(shares, matrix, out)
        assert np.array_equal(out, shares @ matrix)
        for role in range(3):
            kernels.matmul_held(shares, role, np.ascontiguousarray(matrix.T), out[0])
            held = shares[1 - role] if role < 2 else np.negative(shares[0] + shares[1])
            assert np.array_equal(out[0], held @ matrix)


@both
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(
    "n,k,m",
    [
        (16, 8, 5),
        (17, 9, 6),
        (33, 40, 13),
        (15, 7, 4),
        (1, 1, 1),
        (48, 16, 26),
        (3, 64, 11),
        (1, 7, 1025),
        (4, 5, 2050),
    ],
)
def test_tiles_meet_at_their_edges_and_stay_inside(kernels, n, k, m, flip):
    """Sizes around whole tiles; the result lies between guards that must survive."""
    x = random_words(1, 2, k, n).transpose(0, 2, 1) if flip else random_words(1, 2, n, k)
    y, mask = random_words(2, 2, k, m), random_words(3, n, m)
    want = x[0] @ (y[0] + y[1]) + x[1] @ y[0] + mask
    assert np.array_equal(filled(kernels.matmul_pair, x, y, mask, out=garbage(n, m)), want)
    assert np.array_equal(filled(kernels.matmul_pair, x, y, None, out=garbage(n, m)), want - mask)
    if kernels is accel.backend("numba"):
        for fresh in (False, True) if flip else (False,):
            guarded = np.full((n + 2, m), 0xA5A5, dtype=np.uint64)
            guarded[1:-1] = 77 if fresh else 0
            factors = np.stack([y[0] + y[1], y[0]])
            if flip:
                tiles.by_columns(x[0].T, x[1].T, factors, guarded[1:-1], fresh)
            else:
                tiles.by_rows(x[0], x[1], np.ascontiguousarray(factors.transpose(0, 2, 1)), guarded[1:-1])
            assert np.array_equal(guarded[1:-1], want - mask)
            assert (guarded[[0, -1]] == 0xA5A5).all()


@both
@given(seed=st.integers(0, 2**31), count=st.integers(0, 200), width=st.integers(1, 64))
def test_packing_keeps_the_low_bits_and_wastes_none(kernels, seed, count, width):
    words = random_words(seed, count)
    packed = kernels.pack_bits(words, width)
    assert packed.size == kernels.packed_size(count, width) == -(-count * width // 8)
    assert kernels.unpack_bits(packed, width, count).tolist() == [int(w) % 2**width for w in words]
    assert packed.tolist() == BACKENDS[0].pack_bits(words, width).tolist()


@both
@given(seed=st.integers(0, 2**31), count=st.integers(0, 200), width=st.integers(1, 7))
def test_packing_small_values_is_the_same_packing(kernels, seed, count, width):
    values = (random_words(seed, count) & np.uint64(2**width - 1)).astype(np.uint8)
    packed = kernels.pack_small(values, width)
    assert packed.tolist() == kernels.pack_bits(values.astype(np.uint64), width).tolist()
    assert kernels.unpack_small(packed, width, count).tolist() == values.tolist()


@both
@given(seed=st.integers(0, 2**31), count=st.integers(0, 200), width=st.integers(1, 64))
def test_bit_slicing_transposes(kernels, seed, count, width):
    words = random_words(seed, count)
    planes = filled(kernels.slice_bits, words, out=garbage(width, -(-count // 64)))
    for j in range(0, width, 7):
        for i in range(0, count, 13):
            assert (int(planes[j, i // 64]) >> (i % 64)) & 1 == (int(words[i]) >> j) & 1
    assert filled(kernels.unslice_bits, planes, out=garbage(count)).tolist() == [int(w) % 2**width for w in words]


@both
@given(seed=st.integers(0, 2**31), count=st.integers(0, 70))
def test_and_pair(kernels, seed, count):
    x0, x1, y0, y1, mask = random_words(seed, 5, count)
    got = filled(kernels.and_pair, np.stack([x0, x1]), np.stack([y0, y1]), mask, out=garbage(count))
    want = [
        (int(a) & (int(c) ^ int(d))) ^ (int(b) & int(c)) ^ int(e)
        for a, b, c, d, e in zip(x0, x1, y0, y1, mask, strict=True)
    ]
    assert got.tolist() == want


@both
def test_carry_layer_picks_its_operands(kernels):
    generate, propagate = random_words(1, 2, 4, 3), random_words(2, 2, 4, 3)
    high, low = np.array([1, 3]), np.array([0, 2])
    left, right = garbage(2, 3, 3), garbage(2, 3, 3)
    kernels.carry_layer(generate, propagate, high, low, 1, left, right)
    assert (left == propagate[:, [1, 3, 3]]).all()
    assert (right == np.concatenate([generate[:, [0, 2]], propagate[:, [2]]], axis=1)).all()
    product, before = random_words(3, 2, 3, 3), (generate.copy(), propagate.copy())
    kernels.carry_merge(product, high, 1, generate, propagate)
    assert (generate[:, high] == before[0][:, high] ^ product[:, :2]).all() and (
        generate[:, low] == before[0][:, low]
    ).all()
    assert (propagate[:, 3] == product[:, 2]).all() and (propagate[:, :3] == before[1][:, :3]).all()


@both
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 9), columns=st.integers(0, 5))
def test_take_rows(kernels, seed, rows, columns):
    words = random_words(seed, rows, columns)
    index = np.random.default_rng(seed).permutation(rows)
    assert filled(kernels.take_rows, words, index, 0, out=garbage(rows, columns)).tolist() == [
        words[i].tolist() for i in index
    ]


def permutation(kernels, words: np.ndarray, count: int) -> list[int]:
    return filled(kernels.random_permutation, words, out=garbage(count, dtype=np.int64)).tolist()


@both
@given(seed=st.integers(0, 2**31), count=st.integers(0, 60))
def test_random_permutation_is_fisher_yates(kernels, seed, count):
    words = random_words(seed, count + 64)
    order = permutation(kernels, words, count)
    assert sorted(order) == list(range(count))
    assert order == permutation(BACKENDS[0], words, count)


@both
def test_random_permutation_skips_a_word_that_would_bias_it(kernels):
    top = 2**64 - 1  # 2^64 mod 3 = 1, so this word is refused for a choice among three
    words = np.array([top, 0, 0, 0], dtype=np.uint64)
    assert permutation(kernels, words, 3) == permutation(kernels, words[1:], 3)


@both
@given(values=st.lists(st.floats(-1000, 1000), max_size=20), bits=st.integers(0, 40))
def test_fixed_point_round_trip(kernels, values, bits):
    array = np.array(values)
    words, bad = kernels.encode_fixed(array, bits, 2.0 ** (62 - bits))
    assert bad == -1
    assert np.abs(kernels.decode_fixed(words, bits) - array).max(initial=0) <= 2.0 ** -(bits + 1)


@both
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2.0**46, -(2.0**46)])
def test_encode_reports_the_first_bad_position(kernels, value):
    array = np.array([1.0, -2.0, value, value])
    assert kernels.encode_fixed(array, 16, 2.0**46)[1] == 2


@both
@given(bits=st.integers(1, 62), seed=st.integers(0, 2**31), count=st.integers(0, 20))
def test_truncation_steps_give_the_quotient(kernels, bits, seed, count):
    """Three summands of −2^62 ≤ z < 2^62 go through the three roles: the shares add up to ⌊z/2^bits⌋ or one more."""
    z = random_words(seed, 3, count)
    z[2] = (random_words(seed + 1, count) >> np.uint64(1)) - np.uint64(2**62) - z[0] - z[1]
    want = [((int(a) + int(b) + int(c) + 2**62) % 2**64 - 2**62) >> bits for a, b, c in z.T]
    first, second = (random_words(seed + 2 + k, n, count) for k, n in enumerate(kernels.truncation_masks(bits)))
    masks, size = (first, second), (count, bits)
    dealer, b0, b1 = garbage(2, count), garbage(count), packed_words(*size)
    kernels.truncation_deal(z[2], first, second, bits, dealer[0], dealer[1], b0, b1)
    mine = [filled(kernels.truncation_hold, z[i], masks[i][0], i == 0, out=garbage(count)) for i in range(2)]
    (c, with_0, answer_0), (d, with_1, answer_1) = garbage(2, 3, count)
    message_0, message_1, reference = packed_words(*size), packed_words(*size), packed_words(*size)
    kernels.truncation_answer(mine[0], mine[1], first[1], first[2], first[-1], bits, c, with_0, answer_0, message_0)
    kernels.truncation_answer_packed(mine[1], mine[0], b0, b1, second[1], bits, d, with_1, answer_1, message_1)
    middle = filled(kernels.truncation_result, c, answer_0, message_1, bits, out=garbage(count))
    assert c.tolist() == d.tolist()
    other = filled(kernels.truncation_result, d, answer_1, message_0, bits, out=garbage(count))
    assert middle.tolist() == other.tolist()
    assert with_0.tolist() == dealer[1].tolist() and with_1.tolist() == dealer[0].tolist()
    total = (middle + with_0 + with_1).view(np.int64)
    assert all(int(got) - quotient in (0, 1) for got, quotient in zip(total, want, strict=True))
    BACKENDS[0].truncation_answer_packed(mine[1], mine[0], b0, b1, second[1], bits, *garbage(3, count), reference)
    assert packed_bytes(message_1, *size) == packed_bytes(reference, *size)


@both
@given(bits=st.integers(1, 62), seed=st.integers(0, 2**31), count=st.integers(0, 20))
def test_steps_of_a_truncation_in_one_round_give_the_quotient(kernels, bits, seed, count):
    x = random_words(seed, 3, count)
    x[2] = (random_words(seed + 1, count) >> np.uint64(1)) - np.uint64(2**62) - x[0] - x[1]
    want = [((int(a) + int(b) + int(c) + 2**62) % 2**64 - 2**62) >> bits for a, b, c in x.T]
    first, second = (random_words(seed + 2 + k, n, count) for k, n in enumerate(kernels.truncate_masks(bits)))
    size = count, bits
    dealer, b0 = garbage(2, count), garbage(count)
    offers = garbage(4, packed_words(*size).size)
    kernels.truncate_deal(x[0], x[1], first, second, bits, dealer[0], dealer[1], b0, offers)
    keys = packed_words(*size), packed_words(*size)
    kernels.truncate_key(x[2], first[2], first[-1], bits, keys[0])  # opens the offer to role 1
    kernels.truncate_key(x[2], second[1], second[-1], bits, keys[1])
    (middle_0, outer_0), (middle_1, outer_1) = garbage(2, 2, count)
    kernels.truncate_finish(x[2], offers[2], offers[3], keys[1], first[0], first[1], bits, middle_0, outer_0)
    kernels.truncate_finish(x[2], offers[0], offers[1], keys[0], b0, second[0], bits, middle_1, outer_1)
    assert middle_0.tolist() == middle_1.tolist()
    assert outer_0.tolist() == dealer[1].tolist() and outer_1.tolist() == dealer[0].tolist()
    total = (middle_0 + outer_0 + outer_1).view(np.int64)
    assert all(int(got) - quotient in (0, 1) for got, quotient in zip(total, want, strict=True))


def bits_of(seed: int, *shape: int) -> np.ndarray:
    return (random_words(seed, *shape) & np.uint64(1)).astype(np.uint8)


@both
@given(seed=st.integers(0, 2**31), count=st.integers(0, 20))
def test_steps_of_a_selection_give_bit_times_value(kernels, seed, count):
    d, masks = random_words(seed, 3, count), random_words(seed + 1, 2, count)
    beta, dealt = bits_of(seed + 2, count), bits_of(seed + 3, count)
    other = filled(kernels.select_deal, dealt, d[2], d[0], masks, out=garbage(2, count))
    v0 = filled(kernels.select_hold, beta, masks, d[0], d[1], True, out=garbage(count))
    v1 = filled(kernels.select_hold, beta, other, d[2], d[1], False, out=garbage(count))
    assert (v0 + v1 == (beta ^ dealt) * d.sum(axis=0, dtype=np.uint64)).all()
    share, sent = garbage(2, count)
    kernels.reshare_hold(v0, masks[0], share, sent)
    assert (share == masks[0]).all() and (sent == v0 - masks[0]).all()


@both
@given(seed=st.integers(0, 2**31), count=st.integers(0, 20), outputs=st.integers(1, 3), terms=st.integers(1, 4))
def test_steps_of_conversion_and_weighted_sums_of_bits(kernels, seed, count, outputs, terms):
    beta, dealt = bits_of(seed, terms, count), bits_of(seed + 1, terms, count)
    mask, weights = random_words(seed + 2, terms, count), random_words(seed + 3, outputs, terms)
    other = filled(kernels.subtract, dealt, mask, out=garbage(terms, count))
    sums = [
        filled(kernels.weigh_hold, beta, half, weights, leads, out=garbage(outputs, count))
        for half, leads in ((mask, True), (other, False))
    ]
    assert (sums[0] + sums[1] == weights @ (beta ^ dealt).astype(np.uint64)).all()
    once = [
        filled(kernels.inject_hold, beta[0], half[0], leads, out=garbage(count))
        for half, leads in ((mask, True), (other, False))
    ]
    assert (once[0] + once[1] == (beta ^ dealt)[0]).all()
    first, second = random_words(seed + 4, 2, 3, count)
    shares, to_0, to_1 = garbage(2, count), garbage(2, count), garbage(2, count)
    kernels.inject_deal(dealt[0], first, second, shares[0], shares[1], to_0, to_1)
    (outer_0, key_0), (outer_1, key_1) = garbage(2, 2, count)
    kernels.inject_key(beta[0], first, outer_0, key_0)
    kernels.inject_key(beta[0], second, outer_1, key_1)
    middle = filled(kernels.inject_result, beta[0], to_0, key_1, out=garbage(count))
    assert middle.tolist() == filled(kernels.inject_result, beta[0], to_1, key_0, out=garbage(count)).tolist()
    assert outer_0.tolist() == shares[1].tolist() and outer_1.tolist() == shares[0].tolist()
    assert (middle + outer_0 + outer_1 == (beta ^ dealt)[0]).all()


@both
@given(seed=st.integers(0, 2**31), count=st.integers(0, 20), power=st.integers(0, 5), outputs=st.integers(1, 3))
def test_steps_of_a_lookup(kernels, seed, count, power, outputs):
    x, tables = random_words(seed, 3, count), random_words(seed + 1, outputs, 2**power)
    mask = random_words(seed + 2, count, 2**power)
    other = filled(kernels.lookup_deal, x[2], x[0], mask, out=garbage(count, 2**power))
    sums = [filled(kernels.lookup_hold, x[1], half, tables, out=garbage(outputs, count)) for half in (mask, other)]
    place = x.sum(axis=0, dtype=np.uint64) % np.uint64(2**power)
    assert (sums[0] + sums[1] == tables[:, place.astype(np.int64)]).all()


@both
@given(seed=st.integers(0, 2**31), count=st.integers(0, 20), bits=st.integers(1, 40), grow=st.integers(8, 30))
def test_steps_of_the_exponential(kernels, seed, count, bits, grow):
    """The holders' weights are the same to the last bit in both backends, and the sum is e^(c − ρ) down to e^−24."""
    table = np.exp(np.arange(8 << 8) / 256)
    factors = np.exp([0.0, -24.0, -16.0, -8.0])
    below, x, mask = random_words(seed, count), random_words(seed + 1, 2, count), random_words(seed + 2, count, 4)
    below %= np.uint64((24 << bits) + 1)
    c = np.uint64(0) - below - x[0] - x[1]
    other = filled(kernels.exp_deal, x[0], x[1], bits, 8, 32, mask, out=garbage(count, 4))
    halves = [
        filled(kernels.exp_hold, c, half, bits, 8, table, factors, 2.0**grow, out=garbage(count))
        for half in (mask, other)
    ]
    again = filled(BACKENDS[0].exp_hold, c, mask, bits, 8, table, factors, 2.0**grow, out=garbage(count))
    assert halves[0].tolist() == again.tolist()
    exact = np.exp(-below.astype(np.float64) * 2.0**-bits)
    got = (halves[0] + halves[1]).astype(np.float64) * 2.0 ** -(32 + grow)
    assert (np.abs(got - exact) <= exact * 2.0**-21 + 2.0 ** (1 - grow)).all()


@both
@pytest.mark.parametrize("bound", [1, 2, 3, 12, 13, 21, 36, 37, 67, 181, 255, 256])
def test_uniform_below_rejects_instead_of_folding(kernels, bound):
    """Every pair of values comes from equally many, whatever the order and the place of a
    rejection."""
    every_pair = np.random.default_rng(bound).permutation(65536).astype("<u2").view(np.uint8)
    values = garbage(2 * 65536 + 9, dtype=np.uint8)
    found = kernels.uniform_below(every_pair, bound, values)
    assert found == 2 * (65536 - 65536 % bound**2)
    pairs = values[:found].reshape(-1, 2).astype(np.int64) @ np.array([bound, 1])
    assert (np.bincount(pairs, minlength=bound**2) == 65536 // bound**2).all()
    for count in (0, 1, 5, 64, 65):
        short = garbage(count + 1, dtype=np.uint8)
        assert kernels.uniform_below(every_pair, bound, short[:count]) == count
        assert short[:count].tolist() == values[:count].tolist()
        assert short[count] == garbage(count + 1, dtype=np.uint8)[count], "nothing behind the end is written"
    assert kernels.uniform_below(every_pair[:7], 2, short) == 6, "an odd byte is left over"


@both
@given(width=st.integers(1, 63), digit_bits=st.integers(1, 3), seed=st.integers(0, 2**31), close=st.integers(-2, 2))
def test_comparison_steps_decide_less_than(kernels, width, digit_bits, seed, close):
    count, prime, low = 12, 37 if digit_bits > 1 else 67, seed % (64 - width)
    digits, thresholds = kernels.comparison_digits(width, digit_bits)
    top = 2**width - 1
    c = random_words(seed, count) & np.uint64(top)
    rho = random_words(seed + 1, count) & np.uint64(top)
    rho[:6] = [(int(v) + close) % (top + 1) for v in c[:6]]
    c[6], rho[7] = top, 0
    signs = random_words(seed + 3, 2, count) & np.uint64(1)
    threshold = random_words(seed + 4, 1)[0]
    shifted = (signs[0] << np.uint64(width + low) | c << np.uint64(low)) + threshold
    dealt = np.uint64(0) - (signs[1] << np.uint64(width + low) | rho << np.uint64(low))
    part = random_words(seed + 5, count)
    stream = Stream((seed + 2).to_bytes(32, "little"))

    def draw(bound, *shape):
        values = garbage(*shape, dtype=np.uint8)
        backend("numpy").uniform_below(stream.bytes(2 * values.size + 64), bound, values.reshape(-1))
        return values

    def packed(rows):
        return garbage(kernels.packed_size(rows * count, prime.bit_length()), dtype=np.uint8)

    first, second, sign = draw(prime, thresholds, count), packed(thresholds), garbage(count, dtype=np.uint8)
    kernels.compare_deal(part, dealt - part, first, low, width, digit_bits, prime, sign, second)
    assert sign.tolist() == signs[1].tolist()
    second = kernels.unpack_small(second, prime.bit_length(), thresholds * count).reshape(thresholds, count)
    for coin in (0, 1):
        coins = (draw(128, count) << np.uint8(1)) | np.uint8(coin)
        blinding = coins, draw(prime - 1, digits, count), draw(prime, digits, count), draw(digits, count)
        replies, held = [packed(digits), packed(digits)], garbage(2, count, dtype=np.uint8)
        for half, leads, reply, bit in zip((first, second), (True, False), replies, held, strict=True):
            kernels.compare_reply(shifted, threshold, half, *blinding, low, width, digit_bits, prime, leads, bit, reply)
        assert held[0].tolist() == held[1].tolist()
        tests = [kernels.unpack_small(reply, prime.bit_length(), digits * count) for reply in replies]
        zeros = ((tests[0].astype(int) + tests[1]) % prime == 0).reshape(digits, count).sum(axis=0)
        assert zeros.max(initial=0) <= 1
        decided = garbage(count, dtype=np.uint8)
        kernels.compare_decide(*replies, digits, prime, sign, decided)
        want = [int(a < b) ^ int(s) ^ int(t) for a, b, s, t in zip(c, rho, *signs, strict=True)]
        assert (decided ^ held[0]).tolist() == want


def test_stream_is_sequential_and_nonces_separate():
    key = bytes(range(32))
    whole = Stream(key).words(100)
    stream = Stream(key)
    assert np.concatenate([stream.words(40), stream.words(60)]).tolist() == whole.tolist()
    assert Stream(key, b"\x01" + bytes(7)).words(100).tolist() != whole.tolist()
    large = Stream(key).bytes((1 << 18) + 13)
    assert large[-13:].any() and large[:800].view(np.uint64).tolist() == whole.tolist()


def test_backend_selection_is_explicit():
    assert backend() in BACKENDS
    with pytest.raises(ValueError, match="REFMPC_ACCEL = 'fortran': must be one of numpy, numba"):
        backend("fortran")
    assert sorted(accel.backend("numpy").__all__) == sorted(accel.backend("numba").__all__)


def test_start_up_without_numba_works():
    program = (
        "import sys; sys.modules['numba'] = None; import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'numba' else find(name, *a)\n"
        "import accel; print(accel.kernels.__name__)"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "accel.reference"
