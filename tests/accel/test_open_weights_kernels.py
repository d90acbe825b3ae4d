"""Kernels of open weights, of packed words and of counter blocks: both backends against Python's integers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel import backend
from accel.prg import BLOCK, Stream, StreamKey

both = pytest.mark.parametrize("kernels", [backend("numpy"), backend("numba")], ids=["numpy", "numba"])
seeds = st.integers(0, 10**6)


def words(seed, *shape):
    return np.random.default_rng(seed).integers(0, 2**64, shape, dtype=np.uint64)


@both
@given(seed=seeds, width=st.integers(1, 64), count=st.integers(1, 70))
def test_packed_words_are_the_bits_one_behind_the_other(kernels, seed, width, count):
    values = words(seed, count)
    low = [int(v) % 2**width for v in values]
    packed = np.full(kernels.packed_size(count, width) + 2, 0xA5, dtype=np.uint8)
    kernels.pack_into(values, width, packed[:-2])
    joined = sum(value << (width * place) for place, value in enumerate(low))
    assert packed.tobytes() == joined.to_bytes(len(packed) - 2, "little") + b"\xa5\xa5"
    again = np.full(count + 1, 7, dtype=np.uint64)
    kernels.unpack_into(packed[:-2], width, again[:-1])
    assert again.tolist() == [*low, 7]


@both
@given(seed=seeds, width=st.integers(2, 63), count=st.integers(1, 70))
def test_opened_words_are_added_up_as_signed_numbers(kernels, seed, width, count):
    mine, first, second = (words(seed + place, count) & np.uint64(2**width - 1) for place in range(3))
    total = [sum(map(int, each)) for each in zip(mine, first, second, strict=True)]
    want = [(t + 2 ** (width - 1)) % 2**width - 2 ** (width - 1) for t in total]
    out = np.full(count, 99, dtype=np.int64)
    if width <= 32:
        mine = mine.astype(np.uint32)
    kernels.add_packed(mine, kernels.pack_bits(first, width), kernels.pack_bits(second, width), width, out)
    assert out.tolist() == want


@given(width=st.integers(1, 64), count=st.integers(1, 70))
def test_packed_words_are_read_inside_their_bytes_and_every_one_by_some_call(width, count):
    compiled = backend("numba")
    packed = np.zeros(compiled.packed_size(count, width), dtype=np.uint8)
    mine, out = np.zeros(count, dtype=np.uint64), np.zeros(count, dtype=np.int64)
    (_, quick), (_, rest) = compiled.add_packed.calls(mine, packed, packed, width, out)
    read = quick[4].size
    assert len(quick[0]) == read and rest[6] == read and rest[7].size == count
    if read:
        assert (read - 1) * width // 8 + 8 <= packed.size


@both
@given(seed=seeds, bits=st.integers(1, 62), count=st.integers(0, 70))
def test_summands_are_cut(kernels, seed, bits, count):
    """All of them, with both halves of the zero share, however many there are beside whole vectors."""
    z, plus, minus, own = (words(seed + place, count) for place in range(4))
    kind = np.uint32 if bits >= 32 else np.uint64
    for addend in (own, None):
        out = np.full(count, 5, dtype=kind)
        kernels.cut_words(z, plus, minus, addend, bits, out)
        parts = zip(z.tolist(), plus.tolist(), minus.tolist(), own.tolist(), strict=True)
        sums = [a + b - c + (d if addend is not None else 0) for a, b, c, d in parts]
        assert out.tolist() == [(s % 2**64) >> bits for s in sums]


@both
@given(seed=seeds, rows=st.integers(1, 9), columns=st.integers(1, 7), bits=st.integers(0, 40))
def test_public_weights_are_centred_rounded_and_measured(kernels, seed, rows, columns, bits):
    values = np.random.default_rng(seed).integers(-(2**57), 2**57, (rows, columns))
    out = np.full(values.shape, 3)
    kernels.centred_rounded(values, bits, out)
    half = 1 << bits >> 1
    for row, found in zip(values.tolist(), out.tolist(), strict=True):
        mean = (2 * sum(row) + columns) // (2 * columns)
        assert found == [(value - mean + half) >> bits for value in row]
    assert kernels.largest_absolute(values) == max(abs(v) for row in values.tolist() for v in row)
    shift = 40
    sizes = [[-(-abs(v) >> shift) for v in row] for row in values.tolist()]
    assert kernels.largest_square_sum(values, shift) == max(sum(s * s for s in row) for row in sizes)


@both
@given(seed=seeds, count=st.integers(1, 40), shift=st.integers(0, 20))
def test_noise_is_lifted(kernels, seed, count, shift):
    noise = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, 40)
    out = np.full(40, 7, dtype=np.uint64)
    kernels.lifted(noise, shift, 3 << 38, count, out)
    assert out.tolist() == [
        ((n << shift) + (3 << 38 if i < count else 0)) % 2**64 for i, n in enumerate(noise.tolist())
    ]


@both
@given(seed=seeds, rate=st.integers(0, 2**20), moving=st.booleans(), decays=st.booleans())
def test_public_weights_are_moved(kernels, seed, rate, moving, decays):
    rng = np.random.default_rng(seed)
    values, sums, velocity = (rng.integers(-(2**30), 2**30, 21) for _ in range(3))
    before, kept, out = velocity.tolist(), values.copy(), np.full(21, 9)
    momentum, decay = (943719, 20), (65530, 16) if decays else (1, 0)
    largest = kernels.moved_weights(values, velocity if moving else None, sums, momentum, decay, rate, out)
    change = [((943719 * v + 2**19) >> 20) + y for v, y in zip(before, sums.tolist(), strict=True)]
    assert velocity.tolist() == (change if moving else before)
    rest = [(65530 * w + 2**15) >> 16 if decays else w for w in values.tolist()]
    want = [w - rate * v for w, v in zip(rest, change if moving else sums.tolist(), strict=True)]
    assert out.tolist() == want and largest == max(map(abs, want)) and np.array_equal(values, kept)


@both
@given(seed=seeds, count=st.integers(0, 40), place=st.integers(0, 39))
def test_a_checksum_sees_every_word_and_its_place(kernels, seed, count, place):
    values = words(seed, count)
    rows, found = [values[k : k + 8].tolist() for k in range(0, count, 8)], [0] * 8
    for row in rows:
        found = [(s * 0x9E3779B97F4A7C15 + x) % 2**64 for s, x in zip(found, row + [0] * (8 - len(row)), strict=True)]
    assert kernels.checksum(values) == sum(s * 0xD1B54A32D192ED03**lane for lane, s in enumerate(found)) % 2**64
    if place < count:
        changed = values.copy()
        changed[place] ^= np.uint64(1 << seed % 64)
        assert kernels.checksum(changed) != kernels.checksum(values)


@both
def test_nothing_has_no_size(kernels):
    nothing = np.zeros((0, 3), dtype=np.int64)
    assert kernels.largest_absolute(nothing) == kernels.largest_square_sum(nothing, 0) == 0


@both
def test_counter_blocks_give_the_bits_of_the_streams(kernels):
    """Encrypted, every run is what a stream of its nonce would give; also beyond 2^32 and where words wrap around."""
    key, word = bytes(range(32)), 2**64 - 5
    runs = [(7 << 32, 0, 3), (2**63, 2**40 - 1, 2), (5, 250, 9)]
    out = np.full((16, 2), 1, dtype=np.uint64)
    kernels.counter_blocks(np.array(runs, dtype=np.uint64), np.uint64(word), out)
    assert out[14:].tolist() == [[1, 1], [1, 1]]
    masks = np.empty(15 * BLOCK, dtype=np.uint8)
    StreamKey(key).encrypt(out[:14], masks)
    start = 0
    for nonce, first, count in runs:
        stream = Stream(key, ((nonce + word) % 2**64).to_bytes(8, "little"), first)
        assert np.array_equal(masks[start : start + count * BLOCK], stream.bytes(count * BLOCK))
        start += count * BLOCK
