"""The streaming filter against dense matrices, its float twin, and resuming."""

import numpy as np
import pytest
from scipy.linalg import toeplitz

import accel
from accel.gaussian import GridGaussian
from accel.prg import Stream
from vfl.dp.factorisation import factorise
from vfl.dp.filter import NoiseFilter, NoiseSource, sample_grid_gaussian

KINDS = [("bisr", 5), ("bsr", 5), ("identity", None), ("bisr", 1), ("bsr", 70)]


def inverse_matrix(f):
    column = np.zeros(f.num_steps)
    column[: len(f.noising_taps)] = f.noising_taps
    return toeplitz(column, np.zeros(f.num_steps))


@pytest.mark.parametrize("kind,bands", KINDS)
def test_blocks_of_any_size_give_the_dense_product(kind, bands):
    steps, width = 150, 7
    f = factorise(kind, steps, momentum=0.5, bands=bands)
    z = np.random.default_rng(1).integers(-(2**40), 2**40, (steps, width))
    dense = inverse_matrix(f) @ z.astype(float) * 2**f.tap_bits
    whole = NoiseFilter(f, width).next_block(z)
    # the recursion rounds each step to half a grid step; the error stays bounded by the filter's gain
    tolerance = np.abs(f.noising_taps).sum() * 2**f.tap_bits if f.is_recursive else 2.0 ** (40 + 17 - 50)
    assert np.abs(whole - dense).max() <= tolerance
    for sizes in ([1] * steps, [64, 64, 22], [3, 100, 0, 47]):
        streaming = NoiseFilter(f, width)
        pieces, start = [], 0
        for size in sizes:
            pieces.append(streaming.next_block(z[start : start + size]))
            start += size
        assert np.array_equal(np.concatenate(pieces), whole)


@pytest.mark.parametrize("kind,bands", KINDS)
def test_the_float_twin_is_the_same_filter(kind, bands):
    steps, width = 150, 7
    f = factorise(kind, steps, momentum=0.5, bands=bands)
    z = np.random.default_rng(2).normal(size=(steps, width))
    streaming = NoiseFilter(f, width)
    pieces = [streaming.next_block_float(z[a:b]) for a, b in ((0, 1), (1, 90), (90, 150))]
    assert np.allclose(np.concatenate(pieces), inverse_matrix(f) @ z, atol=1e-11)


@pytest.mark.parametrize("kind,bands", [("bisr", 5), ("bsr", 5), ("identity", None)])
def test_a_resumed_source_hands_out_the_same_rows(kind, bands):
    f = factorise(kind, 20, bands=bands)

    def open_stream(step):
        return Stream(bytes(32), step.to_bytes(8, "big"))

    def rows(start, block, shares=0):
        source = NoiseSource(f, 6, 2.0**34, open_stream, start=start, block=block)
        found = []
        for _ in range(20 - start):
            found.append(source.next_row())
            for _ in range(shares):
                source.work()
        return np.stack(found)

    whole = rows(0, 64)
    z = np.stack([sample_grid_gaussian(open_stream(t), 6, 2.0**34) for t in range(20)])
    assert np.array_equal(whole, NoiseFilter(f, 6).next_block(z))
    assert np.array_equal(rows(0, 3), whole)
    for start in (0, 1, 4, 11, 19):
        for shares in (0, 1, 2, 5):
            assert np.array_equal(rows(start, 4, shares), whole[start:])
    ended = NoiseSource(f, 6, 2.0**34, open_stream, start=20)
    with pytest.raises(ValueError, match="the run is over"):
        ended.next_row()


def test_noise_has_the_promised_norm():
    f = factorise("bisr", 32, bands=8)
    z = sample_grid_gaussian(Stream(bytes(32)), 32 * 20_000, 2.0**33).reshape(32, 20_000)
    std = NoiseFilter(f, 20_000).next_block(z).std(axis=1) / 2.0 ** (33 + f.tap_bits)
    assert np.allclose(std, f.noise_norms(), rtol=0.03)


@pytest.mark.parametrize(
    "rows,match",
    [
        (np.zeros((2, 3), dtype=np.int64), r"shape \(2, 3\)': must be of shape \(rows, 4\)"),
        (np.zeros((2, 4)), r"z_rows = 'float64': must be an array of int64"),
        (
            np.zeros((11, 4), dtype=np.int64),
            r"within the 10 steps of the factorisation; its sensitivity covers no",
        ),
    ],
)
def test_bad_rows_are_named(rows, match):
    with pytest.raises(ValueError, match=match):
        NoiseFilter(factorise("bisr", 10, bands=3), 4).next_block(rows)


def test_one_filter_is_integer_or_float():
    noise = NoiseFilter(factorise("bisr", 10, bands=3), 2)
    noise.next_block(np.zeros((1, 2), dtype=np.int64))
    with pytest.raises(ValueError, match="int64, as before"):
        noise.next_block_float(np.zeros((1, 2)))


SIZES = ([230], [1] * 230, [64, 64, 64, 38], [3, 100, 0, 65, 62])


@pytest.mark.parametrize("bands", [1, 2, 70, 230])
@pytest.mark.parametrize("width", [7, 130])
def test_floats_in_a_ring_give_the_exact_integers_in_blocks_of_any_size(bands, width):
    """Around the end of the ring several times, in place and not, also with as many taps as steps."""
    f = factorise("bisr", 230, momentum=0.5, bands=bands)
    largest = 2**33
    z = np.random.default_rng(bands).choice([-largest, largest, 1, largest - 1], (230, width))
    exact = NoiseFilter(f, width).next_block(z)
    for sizes in SIZES:
        ring = NoiseFilter(f, width, largest)
        assert ring._fits_ring
        rows, start = z.copy(), 0
        for turn, size in enumerate(sizes):
            piece = rows[start : start + size]
            piece[:] = ring.next_block(piece, out=piece if turn % 2 else None)
            start += size
        assert np.array_equal(rows, exact), sizes


@pytest.mark.parametrize(("width", "block", "bands"), [(700, 8, 90), (130, 64, 5), (1100, 100, 1), (16, 3, 150)])
def test_slices_of_columns_and_shares_of_work_give_the_rows_of_one_filter(width, block, bands):
    """Filters of several slices, some as wide as tiles, whatever was done ahead; and resumed anywhere."""
    steps, std = 150, 2.0**31
    f = factorise("bisr", steps, bands=bands)

    def open_stream(step):
        return Stream(bytes(32), step.to_bytes(8, "big"))

    sampler = GridGaussian(std)
    z = np.stack([sampler.sample(open_stream(t), width) for t in range(steps)])
    wanted = NoiseFilter(f, width).next_block(z)
    for start, shares in ((0, 0), (0, -1), (1, 3), (89, 1), (140, 2)):
        source = NoiseSource(f, width, std, open_stream, start=start, block=block)
        assert all(each._fits_ring for each in source._filters)
        kept = []
        for step in range(start, steps):
            kept.append(source.next_row())
            for _ in range(
                shares if shares >= 0 else step % 20 == 0
            ):  # the last one falls behind in the midst of a block
                source.work()
        assert np.array_equal(kept, wanted[start:]), (start, shares)
    assert len(source._filters) > 1 or width < 32


@pytest.mark.parametrize("order", ["columns", "apart"])
def test_rows_may_lie_in_memory_as_they_like(order):
    f = factorise("bisr", 40, bands=5)
    z = np.random.default_rng(3).integers(-(2**20), 2**20, (40, 96))
    laid = np.asfortranarray(z) if order == "columns" else np.repeat(z, 2, axis=1)[:, ::2]
    assert np.array_equal(NoiseFilter(f, 96, 2**20).next_block(laid), NoiseFilter(f, 96).next_block(z))


def test_samples_too_large_for_floats_are_filtered_exactly_all_the_same():
    f, largest = factorise("bisr", 40, bands=5), 2**50
    z = np.random.default_rng(4).choice([-largest, largest, largest - 1, 1], (40, 9))
    wanted = accel.backend("numpy").fir_taps(np.zeros((4, 9), dtype=np.int64), z, f.integer_taps)
    assert np.array_equal(NoiseFilter(f, 9, largest).next_block(z), wanted)
