"""Noise kernels: the grid Gaussian against its law, filters against plain Python integers, both backends."""

import decimal
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import accel
from accel import gaussian
from accel.gaussian import COLUMN_UNITS, GUARD, SAMPLER_DISTANCE, STRIPS, GridGaussian
from accel.prg import Stream
from tests.gaussians import departures

BACKENDS = ["numpy", "numba"]
STD = 90.0 * 2**30 / math.sqrt(2)


def stream(label: int) -> Stream:
    return Stream(label.to_bytes(32, "little"))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("std", [STD, 2.0**30, 2.0**45 * 1.37])
def test_samples_follow_the_gaussian(name, std):
    samples = GridGaussian(std, accel.backend(name)).sample(stream(1), 1_000_000)
    assert departures(samples, std) == []


@pytest.mark.heavy
def test_ten_million_samples_follow_the_gaussian():
    samples = GridGaussian(STD, accel.backend("numba")).sample(stream(2), 10_000_000)
    assert departures(samples, STD) == []
    assert np.sum(np.abs(samples) > 5 * STD) > 0  # the tail is there, not only bounded


def test_the_check_catches_a_planted_bias_of_one_percent():
    sampler = GridGaussian(STD, accel.kernels)
    samples = sampler.sample(stream(3), 1_000_000)
    assert departures(samples, STD) == []
    assert "Kolmogorov-Smirnov" in departures(samples, STD * 1.01)
    assert "moment 1" in departures(samples + round(0.01 * STD), STD)
    assert "above 4.0" in departures(samples[samples < 3.9 * STD], STD)


def test_small_grids_are_rounded_not_truncated():
    std = 8.0
    samples = GridGaussian(std, accel.kernels).sample(stream(4), 1_000_000)
    values = np.arange(-20, 21)
    observed = np.array([np.sum(samples == v) for v in values])
    expected = samples.size * (stats.norm.cdf((values + 0.5) / std) - stats.norm.cdf((values - 0.5) / std))
    assert np.max(np.abs(observed - expected) / np.sqrt(expected)) < 5


@pytest.mark.parametrize("std", [8.0, STD, 2.0**52, 2.0**30 * 1.999])
def test_proposal_times_acceptance_is_the_gaussian_density(std):
    """The exactness argument itself, far into the tail: (alias probability) · (acceptance) ∝ exp(−x²/2)."""
    sampler = GridGaussian(std)
    table = sampler.table
    mass = [0] * STRIPS
    for column in range(STRIPS):
        mass[column] += int(table.thresholds[column])
        mass[int(table.aliases[column])] += COLUMN_UNITS - int(table.thresholds[column])
    assert sum(mass) == STRIPS * COLUMN_UNITS
    strip_in_std = 2.0**table.strip_bits / (2 * std)
    assert 1 / 32 < strip_in_std <= 1 / 16
    assert 2 * stats.norm.sf(STRIPS * strip_in_std) <= SAMPLER_DISTANCE
    with decimal.localcontext() as context:
        context.prec = 50
        half_units = Fraction(std) * 2
        reference = None
        for strip in (0, 1, 40, 200, STRIPS - 1):
            for fraction in (Fraction(0), Fraction(1, 3), Fraction(1)):
                accept = sampler.acceptance(strip, fraction)
                assert 0 <= accept <= 1
                x = (strip + fraction) * 2**table.strip_bits / half_units
                exponent = -(x**2) / 2
                density = (decimal.Decimal(exponent.numerator) / exponent.denominator).exp()
                ratio = accept * mass[strip] / density
                reference = reference or ratio
                assert abs(ratio / reference - 1) < decimal.Decimal("1e-40")
            level = table.ceilings[strip] * math.exp(-table.curvature * (2 * strip + 1))
            exact = 2.0**32 * float(sampler.acceptance(strip, Fraction(1)))
            assert abs(level - exact) <= GUARD / 16 + 2.0**-48 * exact
            assert table.floors[strip] <= exact


@pytest.mark.parametrize("name", BACKENDS)
def test_undecided_attempts_are_settled_the_same_way(name):
    """A guard of 2^-4 sends every tenth decision to the exact path, which must agree with the fast one."""
    quick, slow = (GridGaussian(STD, accel.backend(name), guard=g) for g in (GUARD, 2.0**28))
    words = stream(5).words(4_000)
    _, _, _, undecided = slow._kernels.grid_gaussian_attempts(words, slow.table, np.empty(4_000, dtype=np.int64))
    assert 100 < undecided.size < 1_000
    assert np.array_equal(quick.sample(stream(5), 1_800), slow.sample(stream(5), 1_800))


def test_a_tied_coin_asks_for_more_words():
    sampler = GridGaussian(STD)
    strip = 20
    words = np.array([0, 2 << 40], dtype=np.uint64)
    level = sampler.acceptance(strip, Fraction(int(words[1]) >> 1, 1 << 63))
    column = next(c for c in range(STRIPS) if c == strip and int(sampler.table.thresholds[c]) > 0)
    verdicts = set()
    for label in range(24):
        words[0] = (int(level * 2**32) << 32) | column
        source = stream(100 + label)
        verdicts.add(sampler.settle(words, 0, source))
        assert source.words(1)[0] != stream(100 + label).words(1)[0]  # it did draw
    assert verdicts == {True, False}


def test_backends_give_the_same_samples_and_any_count():
    for count in (0, 1, 70_000):
        a, b = (GridGaussian(STD, accel.backend(name)).sample(stream(6), count) for name in BACKENDS)
        assert a.dtype == np.int64 and a.size == count
        assert np.array_equal(a, b)


@pytest.mark.parametrize("std", [0.0, -1.0, 7.9, 2.0**53, math.inf, math.nan])
def test_a_bad_std_is_named(std):
    with pytest.raises(ValueError, match=r"std_in_grid_units = .*must be a finite number in \[8"):
        GridGaussian(std)


def python_fir(history, rows, taps):
    z = [list(map(int, row)) for row in np.concatenate([history, rows])]
    depth = len(taps) - 1
    out = [
        [sum(int(w) * z[t - j][c] for j, w in enumerate(taps)) for c in range(rows.shape[1])]
        for t in range(depth, len(z))
    ]
    return np.array([[(v + 2**63) % 2**64 - 2**63 for v in row] for row in out], dtype=np.int64)


def python_recursion(history, rows, coefficients, bits):
    y = [list(map(int, row)) for row in history]
    for row in rows:
        total = [sum(int(coefficients[j]) * y[-j][c] for j in range(1, len(coefficients))) for c in range(len(row))]
        y.append([int(z) - math.floor(Fraction(s, 2**bits) + Fraction(1, 2)) for z, s in zip(row, total, strict=True)])
    return np.array(y[len(history) :], dtype=np.int64)


@pytest.mark.parametrize("name", BACKENDS)
@given(seed=st.integers(0, 10**6), bands=st.integers(1, 9), steps=st.integers(1, 80), big=st.booleans())
def test_fir_taps_equal_python_integers(name, seed, bands, steps, big):
    rng = np.random.default_rng(seed)
    low, high = (-(2**63), 2**63 - 1) if big else (-(2**40), 2**40)
    z = rng.integers(low, high, (bands - 1 + steps, 3), endpoint=True)
    taps = rng.integers(-(2**62), 2**62, bands) if seed % 5 == 0 else rng.integers(-(2**17), 2**17, bands)
    history, rows = z[: bands - 1], z[bands - 1 :]
    assert np.array_equal(accel.backend(name).fir_taps(history, rows, taps), python_fir(history, rows, taps))


@pytest.mark.parametrize("name", BACKENDS)
@given(seed=st.integers(0, 10**6), bits=st.integers(0, 21), steps=st.integers(1, 130))
def test_one_product_is_exact_up_to_its_bound(name, seed, bits, steps):
    rng = np.random.default_rng(seed)
    later = [2**bits, -(2 ** (bits - 1))] if bits else [1]
    taps = np.array([int(rng.integers(-(2**21), 2**21)), *later])  # the first one does not go into the product
    largest = 2**53 // int(np.abs(taps[1:]).sum())
    z = rng.choice([-largest, largest, largest - 1, 1, 0], (len(taps) - 1 + steps, 3)).astype(np.int64)
    history, rows = z[: len(taps) - 1], z[len(taps) - 1 :]
    assert accel.backend(name).fir_fits_ring(taps, largest)
    assert not accel.backend(name).fir_fits_ring(taps, 2 * largest)
    assert np.array_equal(by_ring(name, history, rows, taps), python_fir(history, rows, taps))


def by_ring(name: str, history: np.ndarray, rows: np.ndarray, taps: np.ndarray) -> np.ndarray:
    """Blocks of 64 rows, in place; what lies in the room for a block does not matter, nor where the ring begins."""
    ring = np.full((len(history) + 64, rows.shape[1]), np.nan)
    position = int(rows[0, 0]) % len(ring)
    ring[np.arange(position - len(history), position) % len(ring)] = history
    out = rows.copy()
    for top in range(0, len(rows), 64):
        piece = out[top : top + 64]
        accel.backend(name).fir_ring(ring, (position + top) % len(ring), piece, taps, piece)
    return out


def test_no_sample_passes_the_largest():
    sampler = GridGaussian(8.0)
    words = np.full(2, 2**64 - 1, dtype=np.uint64)
    table = replace(sampler.table, aliases=np.full(512, 511, dtype=np.uint64), floors=np.full(512, np.inf))
    values = np.zeros(2, dtype=np.int64)
    assert accel.kernels.grid_gaussian_attempts(words, table, values)[:2] == (1, 1)
    assert np.abs(values).tolist() == [sampler.largest, 0]


@pytest.mark.parametrize(
    ("bands", "steps", "columns"), [(256, 64, 80), (3, 8, 16), (20, 9, 17), (2, 7, 5), (40, 19, 95)]
)
@pytest.mark.parametrize("turned", [0, 1, 5, -3])
def test_tiles_give_what_the_taps_give(bands, steps, columns, turned):
    """Inside and beyond whole tiles, on any processor, wherever the ring ends, in place and in rows that lie apart."""
    fir = pytest.importorskip("accel.compiled.fir")
    rng = np.random.default_rng(bands)
    taps = np.array([2**20 + 9, *rng.integers(-(2**9), 2**9, bands - 1)])
    z = rng.integers(-(2**35), 2**35, (bands - 1 + steps, columns))
    start = turned % len(z)
    wide = np.full((steps, columns + 7), -1)
    out = wide[:, 3 : 3 + columns]
    out[:] = z[bands - 1 :]
    ring = np.roll(z, start, axis=0).astype(np.float64)
    fir.filter_by_tiles(fir.padded_taps(taps.astype(np.float64)), taps[0], ring, start, out, out)
    assert np.array_equal(out, accel.backend("numpy").fir_taps(z[: bands - 1], z[bands - 1 :], taps))
    assert np.all(wide[:, :3] == -1) and np.all(wide[:, 3 + columns :] == -1)


@pytest.mark.parametrize("name", ["numpy", "numba"])
def test_fir_taps_of_wide_blocks_equal_python_integers(name):
    rng = np.random.default_rng(5)
    history, rows = (rng.integers(-(2**30), 2**30, (count, 70)) for count in (6, 21))
    taps = rng.integers(-(2**16), 2**16, 7)
    assert np.array_equal(by_ring(name, history, rows, taps), python_fir(history, rows, taps))


@pytest.mark.parametrize("name", BACKENDS)
def test_fir_taps_are_exact_at_the_edges(name):
    taps = np.array([2**16, -(2**20), 2**20 - 2**16], dtype=np.int64)  # Σ|taps| = 2^21, the largest of the fast path
    edge = np.array([-(2**63), 2**63 - 1, -1, 2**32 - 1, -(2**32), 2**31], dtype=np.int64)
    rows = np.stack([edge, edge[::-1], np.roll(edge, 2)])
    history = np.stack([edge, np.roll(edge, 1)])
    assert np.array_equal(accel.backend(name).fir_taps(history, rows, taps), python_fir(history, rows, taps))


@pytest.mark.parametrize("name", BACKENDS)
@given(seed=st.integers(0, 10**6), bands=st.integers(1, 9), steps=st.integers(1, 80), bits=st.integers(1, 24))
def test_recursion_equals_python_integers(name, seed, bands, steps, bits):
    rng = np.random.default_rng(seed)
    coefficients = np.round(2**bits * 0.9 ** np.arange(bands) * 0.5).astype(np.int64)
    coefficients[0] = 2**bits
    z = rng.integers(-(2**42), 2**42, (bands - 1 + steps, 3))
    history, rows = z[: bands - 1], z[bands - 1 :]
    expected = python_recursion(history, rows, coefficients, bits)
    assert np.array_equal(accel.backend(name).recursive_filter(history, rows, coefficients, bits), expected)


@pytest.mark.parametrize("name", BACKENDS)
def test_recursion_refuses_what_it_cannot_do_exactly(name):
    kernels = accel.backend(name)
    rows = np.full((3, 2), 2**47, dtype=np.int64)
    history = np.full((1, 2), -(2**47), dtype=np.int64)
    with pytest.raises(OverflowError, match="2\\^48"):
        kernels.recursive_filter(history, rows, np.array([2**10, 2**11]), 10)
    with pytest.raises(OverflowError, match="2\\^28"):
        kernels.recursive_filter(history, rows, np.array([2**10, 2**28]), 10)


def test_kernels_leave_their_arguments_alone():
    for name in BACKENDS:
        rows, history = np.arange(12).reshape(6, 2), np.ones((1, 2), dtype=np.int64)
        accel.backend(name).recursive_filter(history, rows, np.array([4, 2]), 2)
        accel.backend(name).recursive_filter(history[:0], rows, np.array([4]), 2)
        accel.backend(name).fir_taps(history, rows, np.array([4, 2]))
        assert np.array_equal(rows, np.arange(12).reshape(6, 2)) and np.all(history == 1)


class _Ties(Stream):
    """A stream in which the coins of many attempts tie with their acceptance, so that only further bits decide them."""

    __slots__ = ("sampler",)
    sampler: GridGaussian

    def words(self, count):
        words = super().words(count)
        for attempt in np.flatnonzero(words[1::2] % np.uint64(3) == 0):
            strip = int(words[2 * attempt]) % 200  # below a column's threshold: its own strip
            level = self.sampler.acceptance(strip, Fraction(int(words[2 * attempt + 1]) >> 1, 1 << 63))
            words[2 * attempt] = (min(int(level * 2**32), 2**32 - 1) << 32) | strip
        return words


def ties(sampler, key):
    stream = _Ties(key)
    stream.sampler = sampler
    return stream


def further_words(key, attempt):
    """The reserve of an attempt: blocks of its own, behind 2^63, 2^28 of them."""
    nonce = bytes(8) + (2**63 + (16 * attempt << 24)).to_bytes(8, "big")
    aes = Cipher(algorithms.AES(key), modes.CTR(nonce)).encryptor()
    while True:
        yield from np.frombuffer(aes.update(bytes(1 << 10)), dtype=np.uint64).tolist()


def one_by_one(sampler, key, count):
    """Samples by the definition: attempt after attempt, real coins and places compared bit by bit, further bits from
    its reserve."""
    table, source, settled, attempt = sampler.table, ties(sampler, key), 0, -1
    found: list[int] = []
    with decimal.localcontext() as context:
        context.prec = 120
        while len(found) < count:
            first, second = source.words(2).tolist()
            column, attempt = first % STRIPS, attempt + 1
            own = (first >> 9) % COLUMN_UNITS < int(table.thresholds[column])
            strip = column if own else int(table.aliases[column])
            coin, coin_bits, place, place_bits = first >> 32, 32, second >> 1, 63
            more = further_words(key, attempt)
            while True:
                ends = [sampler.acceptance(strip, Fraction(place + step, 2**place_bits)) for step in (0, 1)]
                if decimal.Decimal(coin + 1) / 2**coin_bits <= min(ends):
                    half_units = (strip * 2**63 + (second >> 1)) * 2**table.strip_bits >> 63
                    found.append(((half_units + 1) >> 1) * (-1 if second & 1 else 1))
                    break
                if decimal.Decimal(coin) / 2**coin_bits >= max(ends):
                    break
                settled += coin_bits == 32
                coin, coin_bits = (coin << 64) | next(more), coin_bits + 64
                place, place_bits = (place << 64) | next(more), place_bits + 64
    return np.array(found), settled


@pytest.mark.parametrize("std", [8.0, STD, 2.0**52])
@pytest.mark.parametrize("guard", [GUARD, 2.0**28])
def test_every_tie_is_settled_from_bits_that_serve_it_alone(std, guard):
    """Both backends, wherever a draw ends, and with many decisions left to the exact path."""
    for seed, count in ((1, 1), (2, 61), (3, 150)):
        key = seed.to_bytes(32, "little")
        samplers = [GridGaussian(std, accel.backend(name), guard=guard) for name in BACKENDS]
        wanted, settled = one_by_one(samplers[0], key, count)
        assert settled >= count // 6
        for sampler in samplers:
            assert np.array_equal(sampler.sample(ties(sampler, key), count), wanted)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_second_draw_settles_from_reserves_of_its_own(name, monkeypatch):
    """No two attempts of a stream are given the same further bits, over several draws and fills."""
    monkeypatch.setattr(gaussian, "_ATTEMPTS", 16)
    sampler = GridGaussian(STD, accel.backend(name))
    begun: list[tuple[int, int]] = []
    settle = GridGaussian.settle

    def noted(self, words, attempt, stream):
        begun.append((int(words[2 * attempt]), stream._first))
        return settle(self, words, attempt, stream)

    monkeypatch.setattr(GridGaussian, "settle", noted)
    source = ties(sampler, bytes(32))
    rows = [sampler.sample(source, 40) for _ in range(3)]
    places = [(first - 2**63) / 2**28 for _, first in begun]
    assert len(set(places)) == len(places) > 40 and places == sorted(places)
    assert source.position <= (places[-1] + 17) * 16
    again = ties(sampler, bytes(32)).words(2 * int(places[-1] + 1))
    assert [int(again[2 * int(place)]) for place in places] == [word for word, _ in begun]
    assert len(set(map(bytes, rows))) == 3


@pytest.mark.parametrize("order", ["rows", "columns", "apart"])
@pytest.mark.parametrize("name", BACKENDS)
def test_the_filter_takes_rows_however_they_lie(name, order):
    """Enough rows and columns for tiles, which take neighbours in a row for neighbours in memory."""
    rng = np.random.default_rng(6)
    z, taps = rng.integers(-(2**30), 2**30, (20, 150)), rng.integers(-(2**16), 2**16, 5)
    history, rows = z[:4], z[4:]
    laid = {"rows": rows.copy(), "columns": np.asfortranarray(rows), "apart": np.repeat(rows, 2, axis=1)[:, ::2]}[order]
    wanted = accel.backend("numpy").fir_taps(history, rows, taps)
    for out in (np.empty_like(rows), laid):
        ring = np.zeros((21, 150))
        ring[[19, 20, 0, 1]] = history
        accel.backend(name).fir_ring(ring, 2, laid, taps, out)
        assert np.array_equal(out, wanted)


class _Given(Stream):
    __slots__ = ("given",)
    given: list[int]

    def words(self, count):
        return np.array(self.given, dtype=np.uint64)


@pytest.mark.parametrize("strip", [3, 20, 200])
def test_where_the_coin_ties_to_96_bits_further_bits_of_the_place_decide(strip):
    """They are not the coin's: the same coin is kept at the beginning of a place of 63 bits and refused at its end."""
    sampler, place = GridGaussian(STD), 2**62 + 12345
    with decimal.localcontext() as context:
        context.prec = 60
        coin = int(sampler.acceptance(strip, Fraction(2 * place + 1, 2**64)) * 2**96)
    words = np.array([((coin >> 64) << 32) | strip, place << 1], dtype=np.uint64)
    source = _Given(bytes(32))
    for further, kept in ((0, True), (2**64 - 1, False)):
        source.given = [coin % 2**64, further]
        assert sampler.settle(words, 0, source) is kept


def test_a_reserve_has_no_reserve():
    with pytest.raises(ValueError, match="a reserve has no reserve of its own"):
        stream(1).reserve(16).reserve(16)
