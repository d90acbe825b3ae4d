"""Dealt sines and cosines: their numbers, errors for every rounding and any input, the lift, exact squares, library
functions."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import refmpc
from accel.reference import series as kernels
from bench.generators.series import EXACT, nearest
from refmpc.mathematics.series import ANGLE_ERROR, turns
from refmpc.mathematics.smooth import FITS
from refmpc.primitives.dealing import at_holders, held, row_segments, summands
from tests.refmpc.harness import Secret, opened

BITS = 44
KEPT = refmpc.Kept(13, 3, Fraction(3, 2))  # −1.5 … 2.5


def test_the_tables_are_the_rounded_sines_and_cosines():
    angles = 2 * np.pi * np.arange(1024) / np.array([[2**10], [2**20]])
    wanted = np.stack([np.cos(angles), np.sin(angles)], axis=1).reshape(4, 1024)
    assert np.array_equal(turns(), np.rint(wanted * 2**30).astype(np.int64))


@pytest.mark.parametrize("odd, terms", [(True, 32), (False, 64)])
def test_every_angle_and_every_multiple_of_it_is_within_its_error(odd, terms):
    multiples = np.arange(1, 2 * terms, 2) if odd else np.arange(1, terms + 1)
    for begun in range(0, 2**20, 2**16):
        words = np.arange(begun, begun + 2**16, dtype=np.uint64)
        found = kernels._harmonics(words, 20, odd, terms, turns())
        angles = np.outer(words.astype(np.int64), multiples) % 2**20 * (2 * np.pi / 2**20)
        worst = max(
            np.abs(each * 2.0**-30 - true).max()
            for each, true in zip(found, (np.cos(angles), np.sin(angles)), strict=True)
        )
        assert worst < float(ANGLE_ERROR)


def test_the_half_wave_is_the_sigmoid():
    for period, terms, odds, reach, error in (
        (6, 16, 1, 20, 2.0**-14.9),
        (7, 16, 2, 50, 0.005),
        (7, 32, 8, 50, 2.0**-12),
    ):
        z = np.linspace(-reach, reach, 2001)
        assert np.abs(refmpc.half_wave(period, terms, odds)(z) - 1 / (1 + odds * np.exp(-z))).max() < error


FUNCTIONS = {
    "odd": refmpc.half_wave(6, 16, 2),
    "of a coarse grid": refmpc.half_wave(5, 3, fraction_bits=4, held_bits=4, dealt_bits=5),
    "of few bits": refmpc.Series(2, 12, -(1 << 20), (3 << 20, -5 << 18), (1 << 21, 77), False, 9, 20, 20),
    "of one turn": refmpc.Series(0, 20, 1 << 30, (1 << 31,), (-(1 << 31),), False, 12, 12),
}


def angles_below(z, function, units):
    """The angles that may be opened for z: on the grid, and some units below it."""
    grid = np.floor(z * 2.0**function.fraction_bits)
    return [(grid + unit) * 2.0**-function.fraction_bits for unit in units]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("rows", [5, 60])
def test_a_series_is_within_its_error_of_the_angle_for_any_input(name, rows):
    function = FUNCTIONS[name]
    rng = np.random.default_rng(rows)
    words = rng.integers(-(2**63), 2**63 - 1, (rows, 3)) >> rng.integers(0, 50, (rows, 3))
    words[0] = -(2**63), 2**63 - 1, 0
    z = words * 2.0**-BITS
    ring = function.bits + 4

    async def program(party, x):
        segments = row_segments(party, rows)
        forms: Any = at_holders(x, segments), summands(party, x.first, BITS, segments), held(x, segments)
        return [await refmpc.series(each, function, bits) for each, bits in zip(forms, (ring, 64, 64), strict=True)]

    for result, units, bits in zip(
        opened(program, Secret(words, BITS)), ((-1, 0), (-2, -1, 0), (0, 1)), (ring, 64, 64), strict=True
    ):
        value = (result.words << np.uint64(64 - bits)).view(np.int64) >> (64 - bits)
        off = [np.abs(value * 2.0**-function.bits - function(angle)) for angle in angles_below(z, function, units)]
        assert np.min(off, axis=0).max() <= float(function.error) + 1e-12


def test_the_bound_of_a_series_holds_on_the_whole_circle():
    for function in FUNCTIONS.values():
        values = function(np.arange(2**14) * 2.0 ** (function.period_bits - 14))
        assert np.abs(values - function.constant * 2.0**-function.coefficient_bits).max() <= float(function.size)


def integers(lifted, kept=KEPT):
    """What is lifted, as the holders and the dealer have it: c − ρ lies in the lower half of the ring."""
    inside = (lifted.words + np.uint64(1)).view(np.int64) & (2**kept.bits - 1)
    assert (inside <= 2 ** (kept.bits - 1)).all()
    return inside - kept.offset(kept.fraction_bits)


def entries(seed, rows, columns=4):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1.5, 2.5, (rows, columns))
    x[:, -1] = rng.uniform(1 / 16, 2, rows)
    x[0] = -1.5, 2.5 - 2.0**-12, 0, 1
    x[1, :3] = -1.5 + 2.0**-13
    return np.rint(x * 2.0**BITS).astype(np.int64)


@pytest.mark.parametrize("rows", [7, 80])
def test_what_is_lifted_is_the_number_and_its_squares_are_exact(rows):
    words = entries(rows, rows)

    async def program(party, x):
        return list(await refmpc.open_squares(at_holders(x), KEPT, 30))

    for seed in range(4):
        lifted, q = opened(program, Secret(words, BITS), seed=seed)
        d = integers(lifted)
        assert (np.abs(d - words * 2.0 ** (13 - BITS)) <= 1).all()
        assert np.array_equal(q.words, (d * d).sum(axis=1).astype(np.uint64) & np.uint64(2**30 - 1))


def inverses(odd):
    """Of odd words modulo 2^64."""
    return np.array([pow(int(word) % 2**64, -1, 2**64) for word in odd.reshape(-1)], dtype=np.uint64).reshape(odd.shape)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_number_multiplies_the_whole_row_exactly(name):
    """Out of what was open before, and out of what is opened beside: u = F·d with one integer F for the row."""
    function, rows = FUNCTIONS[name], 60
    words = entries(3, rows) | 1
    z = np.random.default_rng(4).integers(-(2**60), 2**60, rows)

    async def program(party, z, x):
        segments = row_segments(party, rows)
        angle = at_holders(z, segments)
        lifted, _ = await refmpc.open_squares(at_holders(x, segments), KEPT, 30)
        first = await refmpc.series_times(angle, function, lifted)
        beside = await refmpc.series_times(angle, function, at_holders(x, segments), 60, KEPT)
        return [lifted, first, beside, await refmpc.series_times(held(z, segments), function, held(x, segments))]

    lifted, u, beside, whole = opened(program, Secret(z, BITS), Secret(words, BITS))
    d, u = integers(lifted), u.signed
    factor = u[:, 3:] // d[:, 3:]  # the last entries are not zero
    assert np.array_equal(factor * d, u)
    angles = angles_below(z * 2.0**-BITS, function, (-1, 0, 1))
    value = (beside.words << np.uint64(4)).view(np.int64)[:, 3] * 2.0**-4 / (words[:, 3] * 2.0 ** (13 - BITS))
    ratio = whole.words * inverses(words[:, 3:])
    assert np.array_equal(ratio[:, 3:] * words.view(np.uint64), whole.words)
    for result, more in (
        (factor[:, 0], 0.0),
        (value, 2.0**-8),
        (ratio[:, 3].view(np.int64), 0.0),
    ):  # 2^-8: the unit of an entry of 1/16 or more
        off = np.min([np.abs(result * 2.0**-function.bits - function(angle)) for angle in angles], axis=0)
        assert off.max() <= float(function.error) + more * float(
            function.size + Fraction(abs(function.constant), 2**function.coefficient_bits)
        )


@pytest.mark.parametrize("entrywise", [False, True])
@pytest.mark.parametrize("rows", [7, 80])
def test_products_of_what_is_open_are_exact(rows, entrywise):
    """u = C·d with one integer C for the row, or one for each entry: of the very integers that are open."""
    words, kept = entries(rows, rows), refmpc.Kept(11, 4, Fraction(1, 2))
    factors = np.random.default_rng(rows).uniform(-0.5, 7.5, words.shape if entrywise else rows)
    factors[0] = 7.5 - 2.0**-10

    async def program(party, z, x):
        segments = row_segments(party, rows)
        lifted = await refmpc.open_kept(at_holders(x, segments), KEPT)
        return [lifted, *[await refmpc.open_product(at_holders(z, segments), kept, lifted, bits) for bits in (40, 64)]]

    z = np.rint(factors * 2.0**BITS).astype(np.int64)
    lifted, short, u = opened(program, Secret(z, BITS), Secret(words, BITS))
    d = integers(lifted)
    for product in (u.signed, (short.words << np.uint64(24)).view(np.int64) >> 24):
        factor = product // np.where(d == 0, 1, d)
        assert np.array_equal(factor * d, product)
        off = np.where(d == 0, 0, factor - factors.reshape(rows, -1) * 2.0**11)
        assert np.abs(off).max() <= 1
        assert entrywise or all(len(set(line[own != 0])) == 1 for line, own in zip(factor, d, strict=True))


def test_several_functions_of_one_number_share_their_words():
    wave = FUNCTIONS["odd"]
    pair = wave, wave.scaled(Fraction(1, 3))
    words = np.random.default_rng(1).integers(-(2**60), 2**60, (60, 2))

    async def program(party, x):
        return await refmpc.series_together(at_holders(x), pair, 40)

    for result, function in zip(opened(program, Secret(words, BITS)), pair, strict=True):
        value = ((result.words << np.uint64(24)).view(np.int64) >> 24) * 2.0**-function.bits
        angles = angles_below(words * 2.0**-BITS, function, (-1, 0))
        assert np.min([np.abs(value - function(each)) for each in angles], axis=0).max() <= float(function.error)


TRUE: dict[str, Any] = {
    **EXACT,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
}


@pytest.mark.parametrize("name", refmpc.SMOOTH)
def test_library_functions_keep_their_error_over_their_range(name):
    chosen = refmpc.SMOOTH[name]
    for bits in (10, 20):
        words = np.unique(np.rint(np.linspace(chosen.low, chosen.high, 2500) * 2**bits).astype(np.int64))
        found = opened(lambda party, x: refmpc.smooth(x, name), Secret(words, bits)).value
        worst = np.abs(found - TRUE[name](words * 2.0**-bits)).max()
        assert chosen.error / 8 < worst <= chosen.error, np.log2(worst)


@pytest.mark.parametrize("name", FITS)
def test_stored_coefficients_are_as_good_as_what_the_generator_makes(name):
    period_bits, parts, kind, low, high = FITS[name]
    _, error = nearest(EXACT[name], low, high, 2.0**period_bits, parts, kind)
    x = np.linspace(low, high, 4001)
    assert np.abs(refmpc.SMOOTH[name].series(x) - EXACT[name](x)).max() <= 1.05 * error + 2.0**-24


def test_debug_mode_and_refusals_name_what_is_wrong():
    def outside(party, x):
        return refmpc.smooth(x, "gelu")

    with pytest.raises(Exception, match="'smooth' left its domain"):
        opened(outside, Secret([9 << 16], 16), insecure_check_ranges=True)
    with pytest.raises(Exception, match="'open_squares' left its domain"):
        opened(
            lambda party, x: refmpc.open_squares(at_holders(x), KEPT, 30),
            Secret([[3 << BITS]], BITS),
            insecure_check_ranges=True,
        )

    def refused(party, x):
        whole, angle = summands(party, x.first, BITS), at_holders(x.reshape(3, 1))
        messages = []
        for call in (
            lambda: refmpc.smooth(x, "cube"),
            lambda: refmpc.open_squares(summands(party, x.reshape(3, 1).first, BITS), KEPT, 30),
            lambda: refmpc.series_times(whole, FUNCTIONS["odd"], angle, 60, KEPT),
            lambda: refmpc.series_times(at_holders(x, angle.segments), FUNCTIONS["odd"], angle, 60),
            lambda: refmpc.series(at_holders(x.reinterpret(5)), FUNCTIONS["odd"]),
            lambda: refmpc.series_together(angle, tuple(FUNCTIONS.values())),
        ):
            with pytest.raises(ValueError) as caught:
                party.complete(call())
            messages.append(str(caught.value))
        return messages

    found = opened(refused, Secret([1, 2, 3], BITS))
    wanted = ["one of 'sigmoid'", "summand of the dealer", "with the same dealers", "kept", "fraction bits or more"]
    wanted.append("of the same period")
    assert all(part in message[0] for part, message in zip(wanted, found, strict=True)), found
    with pytest.raises(ValueError, match="coefficients .* below 2\\^32; give them fewer coefficient_bits"):
        refmpc.Series(5, 15, 0, (2**32,), (0,))
