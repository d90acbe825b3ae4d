"""Gaussian noise: each server's own (``gaussian_addend``), or one that no server knows (``joint_gaussian``).

The joint sampler inverts the distribution function rather than running Box–Muller. The tail probability of |Z| is
2^-J·(1 − v/2) with J geometric and v uniform *and independent*, so both come from secret random bits that cost nothing:
J counts the leading ones of 60 bits (an AND tree), v is 31 bits, and a sign. On each of the 61 segments |Z| is analytic
in v, singular nowhere near: one polynomial of degree 10, its coefficients chosen by the bits [J ≥ k]. No comparison is
needed, and there is one singular end (the tail) instead of the two of sqrt(−2 ln u).

What is proved about the distribution (κ of proofs §7.1). Fix the view of one server: masks, own noise, all roundings.

1. *Coupling.* Each pattern of bits belongs to an interval of tail probabilities of the same measure. Pair it with the
   exact Gaussian X on that interval: |Ẑ − X| ≤ e = ``MAGNITUDE_ERROR``, whichever way every truncation rounds. This
   fails with probability 2^-61 (J = 60 stands for the whole tail beyond).
2. *Smoothing.* A bound on |Ẑ − X| alone says nothing about densities. So each server adds an exact Gaussian of std τ
   of its own to the last product (no byte, no round) and the joint part shrinks to s² = 1 − 2τ²: two honest servers
   give η² = 2τ², the variance against one server is 1, for outsiders 1 + τ². Given z the exact X has a Gaussian law,
   W = (z − X)/η ~ N(ηz, s²), and p̂(z)/p(z) = E exp(δW/η − δ²/2η²) with |δ| ≤ e. To first order in e the slope of
   its logarithm is −E[δ·(W² − W·E W − 1)]/η², so by Cauchy–Schwarz
   |d/dz log(p̂/p)| ≤ 1.01·(e/η²)·sqrt(3s⁴ − 2s² + 1 + (sηz)²). The next order is a third cumulant of W: smaller by
   (e/η)·(η|z| + 3)³ < 0.002 for every smoothing that is accepted; the 1.01 covers it.
3. *Use.* For shifts h of the noise vector this changes log-likelihood ratios by at most κ·Σ|h|, and taking them at Ẑ
   instead of X by at most e·Σ|h|: ``joint_slope_error`` returns the sum of both. What rounds *after* the smoothing, the
   last truncation and the grid of the servers' own samples (``vfl.dp.slack``), is post-processing and needs no bound.

Not proved by hand: the error of the stored polynomials is computed (float64,
``tests/refmpc/mathematics/test_gaussian.py``) on 2000 Chebyshev points a segment. Up to about degree 60 that bounds the
maximum within 0.2 %; that the Chebyshev coefficients beyond are below 2^-60 follows from analyticity (they fall like
5.83^-n) with a constant that was measured, not bounded.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from accel.gaussian import GridGaussian
from accel.prg import Stream
from accel.validate import require_integer, require_real
from refmpc.core.party import Operation, Party
from refmpc.core.primitive import Cost, primitive
from refmpc.core.rounds import gather
from refmpc.core.tensor import ArithmeticTensor, concatenate
from refmpc.core.words import seal
from refmpc.mathematics.gaussian_table import CENTRE_BITS, COEFFICIENT_BITS, TABLE
from refmpc.mathematics.polynomial import power_levels
from refmpc.primitives.arithmetic import dot_truncate, multiply_truncate
from refmpc.primitives.boolean import and_planes, plane_words, sklansky_layers, slice_planes, unslice_planes
from refmpc.primitives.truncation import truncated_product_cost
from refmpc.primitives.two_holder import TwoHolderBits, weigh_bits

__all__ = [
    "JOINT_DISTANCE",
    "JOINT_FRACTION_BITS",
    "MAGNITUDE_ERROR",
    "SMOOTHING",
    "gaussian_addend",
    "joint_gaussian",
    "joint_slope_error",
]

JOINT_FRACTION_BITS = 30
SMOOTHING = 2.0**-4  # τ: outsiders see a variance of 1 + 2^-8; κ grows like 1/τ²

# |Ẑ − X| before the smoothing, worst case, in units of 2^-31: rounded polynomial 0.97 (computed), half a step of v
# 0.40, roundings of the powers 0.05, truncation of the inner product 0.125: at most 1.45 in all, and this is 1.52
MAGNITUDE_ERROR = 2.0**-30.4

# probability per sample that the coupling fails (2^-61) or |z| > 10 (2^-75); goes into δ
JOINT_DISTANCE = 2.0**-60
SLOPE_REACH = 12.0  # the slope bound holds for |z| up to this: samples up to 10, shifted by up to 2

SEGMENT_BITS = len(TABLE) - 1
POSITION_BITS = 31  # of v, and the scale of T = 2v − 1 and of its powers: |T| < 1 keeps every product below 2^62
DEGREE = len(TABLE[0]) - 1
FACTOR_BITS = 20


# distributed ------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def _sampler(std: float) -> GridGaussian:
    return GridGaussian(std)


def _own_samples(stream: Stream, shape: tuple[int, ...], std: float) -> np.ndarray:
    return _sampler(std).sample(stream, math.prod(shape)).view(np.uint64).reshape(shape)


def gaussian_addend(party: Party, shape: tuple[int, ...], std_in_grid_units: float, step: int) -> np.ndarray:
    """This server's own noise, as the ``addend`` of ``matmul_truncate`` or ``multiply_truncate``. 0 bytes, 0 rounds.

    Exact samples of round(N(0, std²)) in units of the product's scale, from a stream that only this server knows; at
    most 2^-188 from that law (``accel.gaussian``). std from 8 to 2^52. The sum over the servers has variance 3·std²; a
    server that subtracts its own part faces 2·std².

    The noise is a function of ``step`` and of a key that this server draws when it joins a run: within that run the
    same step gives the same noise again, so different releases must have different steps. After a crash the key, and
    with it the noise, is another one: whoever may have to send a release again must have kept it.
    """
    require_integer("step", step, 0, 2**63)
    return _own_samples(party.private_stream("gaussian addend", step), shape, std_in_grid_units)


# joint ------------------------------------------------------------------------------------------


def joint_slope_error(smoothing: float = SMOOTHING, reach: float = SLOPE_REACH) -> float:
    """κ + e for ``slope_error`` of ``vfl.dp.slack``: 2^-22.5 at the default; proof in the head of this file.

    Holds for |z| ≤ ``reach``, hence for samples up to 10 (the rest is in ``JOINT_DISTANCE``) and shifts of a coordinate
    by up to reach − 10 standard deviations.
    """
    require_real("smoothing", smoothing, 2.0**-16, 0.5, way_out="without smoothing nothing is proved about the density")
    require_real("reach", reach, 0, SLOPE_REACH)
    added = 2 * smoothing**2
    kept = 1 - added
    spread = math.sqrt(3 * kept**2 - 2 * kept + 1 + kept * added * reach**2)
    return MAGNITUDE_ERROR * (1.01 * spread / added + 1)


def _split(smoothing: float) -> tuple[int, float]:
    """The joint part's std at ``FACTOR_BITS``, and each server's own std, so that s² + 2τ² = 1."""
    require_real("smoothing", smoothing, 0, 0.5)
    factor = math.floor(math.sqrt(1 - 2 * smoothing**2) * 2**FACTOR_BITS)
    return factor, math.sqrt((4**FACTOR_BITS - factor**2) / 2 ** (2 * FACTOR_BITS + 1))


def _random_words(operation: Operation, count: int) -> np.ndarray:
    """Secret uniform words, XOR-shared: each pair of servers draws the share it has in common. Nothing is sent."""
    return np.stack([operation.stream(side).words(count) for side in ("previous", "next")])


def _two_holder_bits(operation: Operation, words: np.ndarray, width: int) -> list[TwoHolderBits]:
    """The low bits of XOR-shared words as two-holder bits with one choice of dealers: local."""
    party, count = operation.party, words.shape[1]
    segments = operation.segments(count)
    held = np.empty(count, dtype=np.uint64)
    for segment in segments:
        at, role = segment.slice, segment.role(party.id)
        held[at] = words[0, at] ^ words[1, at] if role == 2 else words[1 - role, at]
    rows = [((held >> np.uint64(index)) & np.uint64(1)).astype(np.uint8) for index in range(width)]
    return [TwoHolderBits(party, row, segments, (count,), operation.history(index)) for index, row in enumerate(rows)]


async def _coefficients(operation: Operation, count: int) -> ArithmeticTensor:
    """(degree + 1, count): the coefficients of a random segment, segment k with probability 2^-(k+1)."""
    machine = operation.machine
    planes = machine.unsealed(slice_planes(operation, seal(_random_words(operation, count)), SEGMENT_BITS))
    for high, low, _ in sklansky_layers(SEGMENT_BITS):  # plane k becomes the AND of planes 0..k
        product = await and_planes(operation, seal(planes[:, high]), seal(planes[:, low]))
        planes[:, high] = machine.unsealed(product)
    reached = machine.unsealed(unslice_planes(operation, seal(planes), count))
    table = np.array(TABLE, dtype=np.int64).T
    sums = await weigh_bits(_two_holder_bits(operation, reached, SEGMENT_BITS), np.diff(table))
    return sums + table[:, :1]


async def _sign_and_powers(operation: Operation, count: int) -> tuple[ArithmeticTensor, ArithmeticTensor]:
    """A random sign ±1, and the powers T, T², … (degree, count) of T uniform on the odd multiples of 2^-31 in ±1."""
    bits = _two_holder_bits(operation, _random_words(operation, count), POSITION_BITS + 1)
    weights = np.zeros((2, POSITION_BITS + 1), dtype=np.int64)
    weights[0, :POSITION_BITS] = 2 ** np.arange(1, POSITION_BITS + 1)
    weights[1, POSITION_BITS] = -2
    position, sign = await weigh_bits(bits, weights)
    powers = (position + (1 - 2**POSITION_BITS)).reinterpret(POSITION_BITS).reshape(1, count)
    for new in power_levels(DEGREE):
        product = await multiply_truncate(powers[-1:], powers[:new], POSITION_BITS)
        powers = concatenate([powers, product])
    return sign + 1, powers


_DOT_BITS = COEFFICIENT_BITS + POSITION_BITS - CENTRE_BITS
_LAST_BITS = CENTRE_BITS + FACTOR_BITS - JOINT_FRACTION_BITS


def _joint_cost(party: Party, shape: tuple[int, ...], smoothing: float = SMOOTHING) -> Cost:
    count = math.prod(shape)
    layers = sklansky_layers(SEGMENT_BITS)
    ands = Cost(len(layers), 24 * sum(high.size for high, _, _ in layers) * plane_words(count))
    coefficients = ands + Cost(2, (8 * SEGMENT_BITS + 16 * (DEGREE + 1)) * count)
    powers = Cost(2, (8 * (POSITION_BITS + 1) + 16 * 2) * count)
    for new in power_levels(DEGREE):
        powers += truncated_product_cost(new * count, POSITION_BITS)
    return (
        coefficients.beside(powers)
        + truncated_product_cost(count, _DOT_BITS)
        + truncated_product_cost(count, _LAST_BITS)
    )


@primitive(cost=_joint_cost, source="this project: inversion by segments of secret random bits; proofs §7.2")
async def joint_gaussian(party: Party, shape: tuple[int, ...], smoothing: float = SMOOTHING) -> ArithmeticTensor:
    """Standard normal samples at 30 bits that no server knows or chooses.

    14 rounds, 1397 bytes a sample; 2.5 kB of memory a sample and server while it runs: ask for some 10^5 at a time.
    Against one server the law is N(own part, 1), own part = what that server itself added, of std ``smoothing``;
    for everybody else N(0, 1 + smoothing²). ``smoothing`` = 0 gives N(0, 1) for all, with no bound on its density.

    Error: |sample − exact Gaussian| ≤ 2^-30.4 plus one unit of 2^-30, samples reach ±9.2 (beyond: 2^-61).
    ``joint_slope_error`` is the κ of proofs §7.1, ``JOINT_DISTANCE`` what a sample adds to the statistical distance.

    Views: random words come from pair streams, of which a server misses one, so each bit is uniform given what it
    holds. AND, ``weigh_bits`` and truncated products show it uniformly masked values only. Semi-honest: a server that
    deviates can bias the sample.
    """
    count = math.prod(shape)
    factor, own_std = _split(smoothing)
    segment_choice, position = (party.operation("joint_gaussian", tuple(shape), smoothing) for _ in range(2))
    own = None
    if smoothing:
        number = (party.step << 32) + segment_choice.number  # as in a mask's nonce: never twice in a run
        stream = party.private_stream("joint gaussian smoothing", number)
        own = _own_samples(stream, (count,), own_std * 2.0 ** (CENTRE_BITS + FACTOR_BITS))
    coefficients, (sign, powers) = await gather(_coefficients(segment_choice, count), _sign_and_powers(position, count))
    slopes = coefficients[1:].reinterpret(COEFFICIENT_BITS)
    magnitude = coefficients[0].reinterpret(CENTRE_BITS) + await dot_truncate(slopes.T, powers.T, _DOT_BITS)
    signed_factor = sign.scale_by_integers(factor).reinterpret(FACTOR_BITS)
    return (await multiply_truncate(magnitude, signed_factor, _LAST_BITS, own)).reshape(shape)
