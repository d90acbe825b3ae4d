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


def random_words(seed: int, *shape: int) -> np.ndarray:
    words = Stream(seed.to_bytes(32, "little")).words(int(np.prod(shape)))
    words[: EDGES.size] = EDGES[: words.size]
    return words.reshape(shape)


@both
@given(seed=st.integers(0, 2**31), count=st.integers(0, 70))
def test_product_pair_is_the_replicated_product(kernels, seed, count):
    x0, x1, y0, y1, mask = random_words(seed, 5, count)
    x, y = np.stack([x0, x1]), np.stack([y0, y1])
    got = kernels.product_pair(x, y, mask)
    want = [
        (int(a) * (int(c) + int(d)) + int(b) * int(c) + int(e)) % 2**64
        for a, b, c, d, e in zip(x0, x1, y0, y1, mask, strict=True)
    ]
    assert got.tolist() == want
    assert kernels.product_pair(x, y, None).tolist() == (got - mask).tolist()
    dots = kernels.dot_pair(x[:, :, np.newaxis], y[:, :, np.newaxis], mask)
    assert dots.tolist() == want
    whole = kernels.dot_pair(x[:, np.newaxis], y[:, np.newaxis], mask[:1] if count else np.zeros(1, np.uint64))
    assert int(whole[0]) == (sum(want) - sum(map(int, mask[1:]))) % 2**64


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
    got = kernels.matmul_pair(x[0], x[1], y[0], y[1], mask)
    big = [a.astype(object) for a in (x[0], x[1], y[0], y[1], mask)]
    want = (big[0].dot(big[2] + big[3]) + big[1].dot(big[2]) + big[4]) % 2**64 if k else mask.astype(object)
    assert got.shape == (n, m)
    assert (got.astype(object) == want).all()


@both
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(
    "n,k,m", [(16, 8, 5), (17, 9, 6), (33, 40, 13), (15, 7, 4), (1, 1, 1), (48, 16, 26), (3, 64, 11)]
)
def test_tiles_meet_at_their_edges_and_stay_inside(kernels, n, k, m, flip):
    """Sizes around whole tiles; the result lies between guards that must survive."""
    x = random_words(1, 2, k, n).transpose(0, 2, 1) if flip else random_words(1, 2, n, k)
    y, mask = random_words(2, 2, k, m), random_words(3, n, m)
    want = x[0] @ (y[0] + y[1]) + x[1] @ y[0] + mask
    assert np.array_equal(kernels.matmul_pair(x[0], x[1], y[0], y[1], mask), want)
    if kernels is accel.backend("numba"):
        guarded = np.full((n + 2, m), 0xA5A5, dtype=np.uint64)
        guarded[1:-1] = 0
        factors = np.stack([y[0] + y[1], y[0]])
        if flip:
            tiles.by_columns(x[0].T, x[1].T, factors, guarded[1:-1])
        else:
            tiles.by_rows(x[0], x[1], np.ascontiguousarray(factors.transpose(0, 2, 1)), guarded[1:-1])
        assert np.array_equal(guarded[1:-1], want - mask)
        assert (guarded[[0, -1]] == 0xA5A5).all()


@both
@given(word=WORD, bits=st.integers(0, 63))
def test_shifts(kernels, word, bits):
    words = np.array([word], dtype=np.uint64)
    signed = word - 2**64 if word >> 63 else word
    assert int(kernels.shift_right_logical(words, bits)[0]) == word >> bits
    assert int(kernels.shift_right_arithmetic(words, bits)[0]) == (signed >> bits) % 2**64


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
    planes = kernels.slice_bits(words, width)
    assert planes.shape == (width, -(-count // 64))
    for j in range(0, width, 7):
        for i in range(0, count, 13):
            assert (int(planes[j, i // 64]) >> (i % 64)) & 1 == (int(words[i]) >> j) & 1
    assert kernels.unslice_bits(planes, count).tolist() == [int(w) % 2**width for w in words]


@both
@given(seed=st.integers(0, 2**31), count=st.integers(0, 70))
def test_and_pair(kernels, seed, count):
    x0, x1, y0, y1, mask = random_words(seed, 5, count)
    got = kernels.and_pair(x0, x1, y0, y1, mask)
    want = [
        (int(a) & (int(c) ^ int(d))) ^ (int(b) & int(c)) ^ int(e)
        for a, b, c, d, e in zip(x0, x1, y0, y1, mask, strict=True)
    ]
    assert got.tolist() == want


@both
def test_carry_layer_picks_its_operands(kernels):
    generate, propagate = random_words(1, 2, 4, 3), random_words(2, 2, 4, 3)
    high, low = np.array([1, 3]), np.array([0, 2])
    left, right = kernels.carry_layer(generate, propagate, high, low, high[1:], low[1:])
    assert (left == propagate[:, [1, 3, 3]]).all()
    assert (right == np.concatenate([generate[:, [0, 2]], propagate[:, [2]]], axis=1)).all()


@both
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 9), columns=st.integers(0, 5))
def test_gather_rows(kernels, seed, rows, columns):
    words = random_words(seed, rows, columns)
    index = np.random.default_rng(seed).permutation(rows)
    assert kernels.gather_rows(words, index).tolist() == [words[i].tolist() for i in index]


@both
@given(seed=st.integers(0, 2**31), count=st.integers(0, 60))
def test_random_permutation_is_fisher_yates(kernels, seed, count):
    words = random_words(seed, count + 64)
    order = kernels.random_permutation(words, count)
    assert sorted(order.tolist()) == list(range(count))
    assert order.tolist() == BACKENDS[0].random_permutation(words, count).tolist()


@both
def test_random_permutation_skips_a_word_that_would_bias_it(kernels):
    top = 2**64 - 1  # 2^64 mod 3 = 1, so this word is refused for a choice among three
    words = np.array([top, 0, 0, 0], dtype=np.uint64)
    assert kernels.random_permutation(words, 3).tolist() == kernels.random_permutation(words[1:], 3).tolist()


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
    dealer = np.empty((2, count), dtype=np.uint64)
    half = kernels.truncation_deal(z[2], first, second, bits, dealer)
    mine = [kernels.truncation_hold(z[role], masks, bits, role) for role, masks in enumerate((first, second))]
    c, with_dealer_0, answer_0, message_0 = kernels.truncation_answer(mine[0], mine[1], first, None, bits)
    d, with_dealer_1, answer_1, message_1 = kernels.truncation_answer(mine[1], mine[0], second, half, bits)
    middle = kernels.truncation_result(c, answer_0, message_1, bits)
    assert c.tolist() == d.tolist()
    assert middle.tolist() == kernels.truncation_result(d, answer_1, message_0, bits).tolist()
    assert with_dealer_0.tolist() == dealer[1].tolist()
    assert with_dealer_1.tolist() == dealer[0].tolist()
    total = (middle + with_dealer_0 + with_dealer_1).view(np.int64)
    assert all(int(got) - quotient in (0, 1) for got, quotient in zip(total, want, strict=True))
    reference = BACKENDS[0].truncation_answer(mine[1], mine[0], second, half, bits)
    assert message_1.tolist() == reference[3].tolist()


@both
@given(bound=st.integers(2, 67), seed=st.integers(0, 2**31))
def test_uniform_below_rejects_instead_of_folding(kernels, bound, seed):
    every_byte = np.arange(256, dtype=np.uint8)
    values, found = kernels.uniform_below(every_byte, bound, 256)
    assert found == 256 - 256 % bound
    assert (np.bincount(values[:found], minlength=bound) == 256 // bound).all()
    values, found = kernels.uniform_below(every_byte, bound, 5)
    assert found == 5 and values.size == 5


@both
@given(width=st.integers(1, 64), digit_bits=st.integers(1, 3), seed=st.integers(0, 2**31), close=st.integers(-2, 2))
def test_comparison_steps_decide_less_than(kernels, width, digit_bits, seed, close):
    count, prime = 12, 37 if digit_bits > 1 else 67
    digits, thresholds = kernels.comparison_digits(width, digit_bits)
    top = 2**width - 1
    c = random_words(seed, count) & np.uint64(top)
    rho = random_words(seed + 1, count) & np.uint64(top)
    rho[:6] = [(int(v) + close) % (top + 1) for v in c[:6]]
    c[6], rho[7] = top, 0
    stream = Stream((seed + 2).to_bytes(32, "little"))

    def draw(bound, *shape):
        need = int(np.prod(shape))
        return backend("numpy").uniform_below(stream.bytes(2 * need + 64), bound, need)[0].reshape(shape)

    first = draw(prime, thresholds, count)
    second = kernels.compare_deal(rho, first, width, digit_bits, prime)
    for reverse_bit in (0, 1):
        reverse = np.full(count, reverse_bit, dtype=np.uint8)
        scale = draw(prime - 1, digits, count) + np.uint8(1)
        mask, rotation = draw(prime, digits, count), draw(digits, count)
        args = (reverse, scale, mask, rotation, width, digit_bits, prime)
        left = kernels.compare_reply(c, first, *args, True)
        right = kernels.compare_reply(c, second, *args, False)
        zeros = ((left.astype(int) + right) % prime == 0).sum(axis=0)
        assert zeros.max(initial=0) <= 1
        decided = kernels.compare_decide(left, right, prime)
        want = [int(a < b) if reverse_bit == 0 else int(a >= b) for a, b in zip(c.tolist(), rho.tolist(), strict=True)]
        assert decided.tolist() == want


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
