"""One line for each primitive: what ``test_privacy`` runs twice, on two very different secrets, and compares."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

import refmpc
from refmpc.primitives.dealing import at_holders, held, row_segments, summands
from tests.refmpc.transcripts import Case

__all__ = ["CASES", "FAR"]

FAR = ((5,), (-(2**61) + 987654321,))
FAR_PAIR = ((5, 3), (-(2**61) + 987654321, 2**59 - 1))
PAIR = ((3, 5), (-(2**30), 2**31 - 77))
BITS = ((0,), (1,))


def sign(high_bit, prime, secrets, idle=()):
    return Case(lambda party, x: refmpc.is_negative(x, 0, high_bit), ("arithmetic",), secrets, packed=prime, idle=idle)


def composed(call, one, two, **options):
    secrets = (round(one * 2**16),), (round(two * 2**16),)
    return Case(lambda party, x: call(x), ("arithmetic",), secrets, composed=True, **options)


def weighed(bits):
    return refmpc.weigh_bits([bits, ~bits], np.array([[1, 5], [3, -2], [0, 1]]))


def coarse(party, x, additive, width=3):
    spread = x.scale_by_integers(np.arange(1, x.shape[1] + 1))
    return refmpc.largest_coarse(summands(party, spread.first, 16) if additive else spread, 16, width)


# masks of tests that scale, turn and slots hide as well: "largest_coarse of two" sees them
TEST_MASKS = ((2, 2, 3),)


def below(party, z, largest):
    segments = row_segments(party, len(z))
    words = summands(party, largest.first, 2, segments)
    words.bits = 10
    return refmpc.exp_below(held(z, segments), words, 4)


def spline(party, m, t):
    segments = row_segments(party, len(m))
    one, other = (at_holders(each.reinterpret(bits), segments) for each, bits in ((m, 20), (t, 0)))
    return refmpc.spline_times(one, other, "root")


def scaled(party, v, x):
    return refmpc.scale_rows(at_holders(v), x.reshape(len(x), 1), 9, 1)


def squares(party, z, w):
    return refmpc.cut_and_square(summands(party, z.first.reshape(-1, 1), 16), 8, w)


def spline_alone(party, m):
    return refmpc.spline_times(at_holders(m.reinterpret(20)), None, "root")


def gate(bits, d, additive):
    return refmpc.gated(bits, summands(d.party, d.first, 16, bits.segments) if additive else d)


def reached(party, x, additive, ring=64):
    weights = [([3, 1, 5], True), ([0, 1, -1], False)]
    return refmpc.weigh_reached(summands(party, x.first, 16) if additive else x, [1, 40], [0, 3], 7, weights, ring)


WAVE = refmpc.half_wave(6, 3)
KEPT = refmpc.Kept(13, 3, Fraction(3, 2))
PROBABILITY = ((1 << 40, 5), (-(1 << 39), 7))  # at 44 bits


def at_44(x):
    return at_holders(x.reinterpret(44))


def times(party, z, x):
    entries = at_44(x.reshape(len(x), 1))
    return refmpc.series_times(at_holders(z.reinterpret(44), entries.segments), WAVE, entries, 64, KEPT)


async def squares_times(party, z, x):
    lifted, q = await refmpc.open_squares(at_44(x.reshape(len(x), 1)), KEPT, 30)
    return [lifted, q, await refmpc.series_times(at_holders(z.reinterpret(44), lifted.segments), WAVE, lifted, 60)]


def together(party, x):
    return refmpc.series_together(at_44(x), (WAVE, WAVE.scaled(Fraction(1, 3))), 40)


async def product(party, z, x):
    lifted = await refmpc.open_kept(at_44(x.reshape(len(x), 1)), KEPT)
    factor = at_holders(z.reinterpret(44), lifted.segments)
    one = await refmpc.open_product(factor, KEPT, lifted, 60)
    return [lifted, one, await refmpc.open_product(factor.reshape(len(z), 1), KEPT, lifted, 60)]


PERMUTATIONS = tuple((pair, 1, 0) for pair in range(3))  # they stand still here: the masks alone must hide the rows
WEIGHTS, CUT = np.array([1, 2, 1]), 1
CASES = {
    "replicate": Case(lambda party, x: refmpc.replicate(at_holders(x)), ("arithmetic",), FAR),
    "truncate_additive": Case(
        lambda party, x: refmpc.truncate_additive(summands(party, x.first, 16), 16),
        ("arithmetic",),
        FAR,
        packed=2**16,
    ),
    "largest_coarse": Case(
        lambda party, x: coarse(party, x, False),
        ("arithmetic",),
        ((1,), (-2,)),
        packed={63: 5, 45: 5, 12: 16},
        beside=3,  # pairs
        shape=(3,),
        idle=TEST_MASKS,
    ),
    "largest_coarse of summands": Case(
        lambda party, x: coarse(party, x, True),
        ("arithmetic",),
        ((1,), (-2,)),
        packed={63: 5, 45: 5, 12: 16},
        beside=3,  # pairs
        shape=(3,),
        idle=TEST_MASKS,
    ),
    "largest_coarse of two": Case(
        lambda party, x: coarse(party, x, False, 2),
        ("arithmetic",),
        ((1,), (-2,)),
        packed={12: 5, 9: 5, 6: 8},
        shape=(2,),
        idle=((2, 2, 1),),  # the scale, which three classes show
    ),
    "exp_below": Case(
        lambda party, z, largest: below(party, z.reshape(len(z), 1), largest),
        ("arithmetic",) * 2,
        ((-1, 0), (-17 << 16, 3)),
        packed={4: 16, 10: 2**10},
    ),
    "octave": Case(
        lambda party, s: refmpc.octave(at_holders(s), 4),
        ("arithmetic",),
        ((46000,), (255000,)),
        packed={32: 2**32, 2: 4},
    ),
    "spline_times": Case(spline, ("arithmetic",) * 2, ((1 << 20, 5), (9 << 18, -(2**24)))),
    "spline_times of one": Case(spline_alone, ("arithmetic",), ((1 << 20,), (9 << 18,)), packed=2**40),
    "scale_rows": Case(scaled, ("arithmetic",) * 2, ((3, 5), (2**62 + 12345, -(2**40)))),
    "cut_and_square": Case(squares, ("arithmetic",) * 2, ((3, 5), (-(2**61), 2**40)), packed=2**8),
    "series": Case(lambda party, x: refmpc.series(at_44(x), WAVE), ("arithmetic",), FAR, packed=2**20),
    "series, the dealer adds": Case(
        lambda party, x: refmpc.series(summands(party, x.first, 44), WAVE, 40),
        ("arithmetic",),
        FAR,
        packed={20: 2**20, 240: 2**40},
    ),
    "series of what two hold": Case(
        lambda party, x: refmpc.series(held(x.reinterpret(44), row_segments(party, len(x))), WAVE, 40),
        ("arithmetic",),
        FAR,
        packed=2**40,
    ),
    "series_times": Case(times, ("arithmetic",) * 2, PROBABILITY, packed={20: 2**20, 16: 2**16, 7 * 48: 2**48}),
    "open_squares, series_times": Case(
        squares_times,
        ("arithmetic",) * 2,
        PROBABILITY,
        packed={20: 2**20, 16: 2**16, 4 * 30: 2**30, 13 * 60: 2**60, 7 * 44: 2**44},
    ),
    "series_times of what two hold": Case(
        lambda party, z, x: refmpc.series_times(
            held(z.reinterpret(44), (segments := row_segments(party, len(z)))),
            WAVE,
            held(x.reshape(len(x), 1), segments),
        ),
        ("arithmetic",) * 2,
        FAR_PAIR,
    ),
    "series_together": Case(together, ("arithmetic",), FAR, packed={20: 2**20, 6 * 40: 2**40}),
    "open_kept, open_product": Case(product, ("arithmetic",) * 2, PROBABILITY, packed={16: 2**16, 8 * 60: 2**60}),
    "smooth": composed(lambda x: refmpc.smooth(x, "gelu"), 0.5, -7.5),
    "weigh_reached": Case(lambda party, x: reached(party, x, False), ("arithmetic",), ((20,), (-60,)), packed=5),
    "weigh_reached of summands": Case(
        lambda party, x: reached(party, x, True), ("arithmetic",), ((20,), (-60,)), packed=5
    ),
    "weigh_reached in a small ring": Case(
        lambda party, x: reached(party, x, False, 27),
        ("arithmetic",),
        ((20,), (-60,)),
        packed=lambda name, bits: (2**27 if bits == 54 else 5, 1),
    ),
    "clip_root": composed(lambda x: refmpc.clip_root(x, 1000.0), 0.5, 999.0),
    "clip_root that stops": composed(lambda x: refmpc.clip_root(x, 900.0, True), 0.5, 1499.0),
    "probabilities": composed(lambda x: refmpc.probabilities(x * WEIGHTS, 2000.0), 0.0, 500.0, shape=(3,)),
    "probabilities of one class, weighted": composed(
        lambda x: refmpc.probabilities(x * WEIGHTS, 2000.0, 1, x[:, 0]), 0.0, 500.0, shape=(3,)
    ),
    "multiply": Case(lambda party, x, y: refmpc.multiply(x, y), ("arithmetic",) * 2, PAIR),
    "dot": Case(lambda party, x, y: refmpc.dot(x, y), ("arithmetic",) * 2, PAIR, shape=(2,)),
    "matmul": Case(lambda party, x, y: refmpc.matmul(x, y[:2, :1]), ("arithmetic",) * 2, PAIR, shape=(2,)),
    "multiply_truncate": Case(
        lambda party, x, y: refmpc.multiply_truncate(x, y, 16), ("arithmetic",) * 2, PAIR, packed=2**16
    ),
    "multiply_truncate by 30": Case(
        lambda party, x, y: refmpc.multiply_truncate(x, y, 30), ("arithmetic",) * 2, PAIR, packed=2**30
    ),
    "dot_truncate": Case(
        lambda party, x, y: refmpc.dot_truncate(x, y, 8), ("arithmetic",) * 2, PAIR, packed=2**8, shape=(1,)
    ),
    "matmul_truncate": Case(
        lambda party, x, y: refmpc.matmul_truncate(x, y[:1], 8), ("arithmetic",) * 2, PAIR, packed=2**8, shape=(1,)
    ),
    "truncate": Case(lambda party, x: refmpc.truncate(x, 16), ("arithmetic",), FAR, packed=2**16, idle=((0, 1, 0),)),
    "truncate by 40": Case(
        lambda party, x: refmpc.truncate(x, 40), ("arithmetic",), FAR, packed=2**40, idle=((0, 1, 0),)
    ),
    "is_negative": sign(63, 37, FAR),
    "is_negative of neighbours": sign(63, 37, ((0,), (-1,))),
    "is_negative of 16 bits": sign(16, 11, ((1,), (-(2**15) + 77,))),
    "is_negative of 4 bits": sign(4, 5, ((15,), (-16,))),
    "is_negative of one bit": sign(1, 5, ((0,), (-1,)), idle=((2, 1, 1), (2, 1, 3))),
    "relu": Case(lambda party, x: refmpc.relu(x, 0, 4), ("arithmetic",), ((1,), (-10,)), packed=5),
    "maximum": Case(
        lambda party, x: refmpc.maximum(x * WEIGHTS, 1, 0, 4), ("arithmetic",), ((1,), (-2,)), packed=5, shape=(3,)
    ),
    "select": Case(
        lambda party, b, d: refmpc.select(refmpc.two_holder(b), d), (1, "arithmetic"), ((0, 5), (1, -(2**61)))
    ),
    "gated": Case(lambda party, b, d: gate(refmpc.two_holder(b), d, False), (1, "arithmetic"), ((0, 5), (1, -(2**61)))),
    "gated, of summands": Case(
        lambda party, b, d: gate(refmpc.two_holder(b), d, True), (1, "arithmetic"), ((0, 5), (1, -(2**61)))
    ),
    "where": Case(
        lambda party, b, d: refmpc.where(refmpc.two_holder(b), d, 3), (1, "arithmetic"), ((0, 5), (1, -(2**61)))
    ),
    "bit_to_arithmetic": Case(lambda party, b: refmpc.bit_to_arithmetic(refmpc.two_holder(b)), (1,), BITS),
    "bit_to_arithmetic in two rounds": Case(
        lambda party, b: refmpc.bit_to_arithmetic(refmpc.two_holder(b), 2), (1,), BITS
    ),
    "bits_to_boolean": Case(lambda party, b: refmpc.bits_to_boolean(refmpc.two_holder(b)), (1,), BITS),
    "lookup": Case(lambda party, x: refmpc.lookup(x, np.arange(4) ** 9), ("arithmetic",), ((0,), (2**62 + 3,))),
    "lookup in two tables": Case(
        lambda party, x: refmpc.lookup(x, np.arange(4).reshape(2, 2)), ("arithmetic",), ((0,), (2**62 + 3,))
    ),
    "and_words": Case(lambda party, x, y: refmpc.and_words(x, y), (8, 8), ((0, 255), (255, 255)), packed=256),
    "is_negative_by_carry_tree": Case(lambda party, x: refmpc.is_negative_by_carry_tree(x), ("arithmetic",), FAR),
    "arithmetic_to_boolean": Case(lambda party, x: refmpc.arithmetic_to_boolean(x), ("arithmetic",), FAR),
    "boolean_to_arithmetic": Case(lambda party, x: refmpc.boolean_to_arithmetic(x), (64,), FAR),
    "equal": Case(lambda party, x, y: refmpc.equal(x, y), ("arithmetic",) * 2, ((5, 5), (5, -(2**61)))),
    "input_from_party": Case(
        lambda party, v: refmpc.input_from_party(party, 1, v, (4096,), 0), (("private", 1),), ((5,), (-(2**61),))
    ),
    "thermometer": Case(
        lambda party, x: refmpc.thermometer(x, [1, 16, 40], [0, 0, 3], 7), ("arithmetic",), ((20,), (-60,)), packed=5
    ),
    "weigh_bits": Case(lambda party, b: weighed(refmpc.two_holder(b)), (1,), BITS),
    "exp between bounds": Case(
        lambda party, x: refmpc.exp(x, 0.0, -20.0), ("arithmetic",), ((-5,), (-(19 << 16) + 99,)), packed=2**39
    ),
    "shuffle": Case(lambda party, x: refmpc.shuffle([x]), ("arithmetic",), FAR, idle=PERMUTATIONS),
    "shuffle of words": Case(lambda party, x: refmpc.shuffle([x]), (64,), FAR, idle=PERMUTATIONS),
    "shuffle of two tensors": Case(
        lambda party, x, y: refmpc.shuffle([x, y]), ("arithmetic",) * 2, PAIR, idle=PERMUTATIONS
    ),
    "polynomial": composed(lambda x: refmpc.polynomial(x, [1.0, 0.5, 0.25, 0.125]), 0.1, -1.5),
    "reciprocal": composed(lambda x: refmpc.reciprocal(x, 0.25, 16.0), 0.5, 15.0),
    "reciprocal, signed": composed(lambda x: refmpc.reciprocal(x, 0.25, 16.0, 20, True), 0.5, -15.0),
    "reciprocal_narrow": composed(lambda x: refmpc.reciprocal_narrow(x, 1.0, 13.0), 1.0, 12.5),
    "divide": composed(lambda x: refmpc.divide(x, x, 0.25, 16.0), 0.5, 15.0),
    "inverse_sqrt": composed(lambda x: refmpc.inverse_sqrt(x, 0.25, 16.0), 0.5, 15.0),
    "sqrt": composed(lambda x: refmpc.sqrt(x, 0.25, 16.0), 0.0, 15.0),
    "clip_factor": composed(lambda x: refmpc.clip_factor(x, 1000.0), 0.5, 999.0),
    "exp": composed(lambda x: refmpc.exp(x), 0.0, -1000.0),
    "log": composed(lambda x: refmpc.log(x, 0.25, 16.0), 0.5, 15.0),
    "softmax": composed(lambda x: refmpc.softmax(x * WEIGHTS), 0.0, 500.0, shape=(3,)),
    # two secrets with one product: everybody learns the product, and nothing else
    "open_words": Case(
        lambda party, x, y: refmpc.open_words(party, opened_product(x, y), CUT, "example"),
        ("arithmetic",) * 2,
        ((3 << 20, 4 << 20), (2 << 20, 6 << 20)),
    ),
    # two secrets with one sum
    "open_words of a tensor": Case(
        lambda party, x, y: refmpc.open_words(party, refmpc.tensor_opening(x + y, CUT).reshape(-1), CUT, "example"),
        ("arithmetic",) * 2,
        ((3 << 20, 4 << 20), (6 << 20, 1 << 20)),
    ),
    "reveal": Case(lambda party, x: refmpc.reveal(x, "example", to=1), ("arithmetic",), FAR, learns=(1,)),
}


def opened_product(x, y):
    """This server's words of every x times the first y."""
    return refmpc.matmul_opening(x.reshape(-1, 1), y[:1].reshape(1, 1), CUT).reshape(-1)
