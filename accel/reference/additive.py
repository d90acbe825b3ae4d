"""Local steps on numbers that are additive at two holders: openings, dealt halves, products of opened values.

z = z0 + z1 + z2 is opened as c − ρ: c = (z0 + r0) + (z1 + r1) at the holders, ρ = r0 + r1 − z2 at the dealer. All
results go into ``out``; the holder that ``leads`` (role 0) adds public constants.
"""

from __future__ import annotations

import numpy as np

__all__ = [
    "add_low",
    "open_dealer",
    "replicated_rho",
    "scale_rows_deal",
    "scale_rows_hold",
    "squared_deal",
    "squared_hold",
    "subtract_low",
    "subtract_scaled",
    "weigh_opened_deal",
    "weigh_opened_hold",
]

ZERO, ONE, TWO = np.uint64(0), np.uint64(1), np.uint64(2)
TOP = np.uint64(63)


def _low(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def add_low(a: np.ndarray, b: np.ndarray, bits: int, out: np.ndarray) -> None:
    """a + b modulo 2^bits, elementwise over flat arrays."""
    out[:] = (a + b) & _low(bits)


def subtract_low(a: np.ndarray, b: np.ndarray, bits: int, out: np.ndarray) -> None:
    """a − b modulo 2^bits, elementwise over flat arrays."""
    out[:] = (a - b) & _low(bits)


def open_dealer(first: np.ndarray, second: np.ndarray, z: np.ndarray, bits: int, out: np.ndarray) -> None:
    """The dealer's ρ = r0 + r1 − z2 modulo 2^bits, flat."""
    out[:] = (first + second - z) & _low(bits)


def replicated_rho(first: np.ndarray, second: np.ndarray, out: np.ndarray) -> None:
    """The dealer's ρ = −(x0 + x2) of a replicated x, flat."""
    out[:] = ZERO - first - second


def subtract_scaled(z: np.ndarray, y: np.ndarray, shift: int, out: np.ndarray) -> None:
    """z − y·2^shift, elementwise over flat arrays."""
    out[:] = z - (y << np.uint64(shift))


def weigh_opened_deal(pads: np.ndarray, rho: np.ndarray, halves: np.ndarray, out: np.ndarray) -> None:
    """pad_k and pad_k·ρ (n, 2, K) minus ``halves``; ``pads`` (K, n) are bits, uint8."""
    bits = pads.T.astype(np.uint64)
    out[:, 0] = bits - halves[:, 0]
    out[:, 1] = bits * rho[:, np.newaxis] - halves[:, 1]


def weigh_opened_hold(
    alpha: np.ndarray,
    halves: np.ndarray,
    c: np.ndarray,
    rho: np.ndarray,
    weights: np.ndarray,
    times: np.ndarray,
    leads: bool,
    out: np.ndarray,
) -> None:
    """A holder's share of start + Σ_k step_k·bit_k, times x = c − ρ where ``times``, for every row of ``weights``.

    bit_k = alpha_k ⊕ pad_k = alpha_k + (1 − 2·alpha_k)·pad_k. ``alpha`` is (K, n), ``halves`` (n, 2, K) are shares of
    pad_k and pad_k·ρ, ``rho`` (n,) is the share of ρ; ``weights`` (outputs, 1 + K) hold start and steps as ring words;
    ``out`` is (outputs, n).
    """
    lead = ONE if leads else ZERO
    a = alpha.T.astype(np.uint64)
    sign = ONE - TWO * a
    bit = sign * halves[:, 0] + lead * a
    bit_rho = sign * halves[:, 1] + a * rho[:, np.newaxis]
    for row, (start, *steps) in enumerate(weights):
        words = np.array(steps, dtype=np.uint64)
        plain = lead * start + (bit * words).sum(axis=1, dtype=np.uint64)
        cross = start * rho + (bit_rho * words).sum(axis=1, dtype=np.uint64)
        out[row] = c * plain - cross if times[row] else plain


def scale_rows_deal(rho: np.ndarray, rho_x: np.ndarray, bits: int, halves: np.ndarray, out: np.ndarray) -> None:
    """The two versions R_0, R_1 of ρ≫bits, and each times ρ_x (n, k): (n, 2, 1 + k) minus ``halves``.

    R_1 belongs to a set top bit of c, R_0 = R_1 − 2^(64−bits)·(top bit of ρ) to a clear one."""
    if_set = rho >> np.uint64(bits)
    versions = np.stack([if_set - ((rho >> TOP) << np.uint64(64 - bits)), if_set], axis=1)
    out[:, :, 0] = versions - halves[:, :, 0]
    out[:, :, 1:] = versions[:, :, np.newaxis] * rho_x[:, np.newaxis, :] - halves[:, :, 1:]


def scale_rows_hold(
    c: np.ndarray,
    middle: np.ndarray,
    outer: np.ndarray,
    halves: np.ndarray,
    bits: int,
    margin: int,
    leads: bool,
    out: np.ndarray,
) -> None:
    """A holder's summand (n, k) of ((c≫bits) − R − margin)·x: x is ``middle`` (known to both holders), the two
    ``outer``."""
    factor = ((c >> np.uint64(bits)) - np.uint64(margin))[:, np.newaxis]
    version = halves[np.arange(len(c)), (c >> TOP).astype(np.int64)]
    own = outer + middle if leads else outer
    out[:] = factor * own - version[:, :1] * middle + version[:, 1:]


def squared_deal(
    rho: np.ndarray, rho_n: np.ndarray, bits: int, halves: np.ndarray, out: np.ndarray, own: np.ndarray
) -> None:
    """The dealer of n·Σ_i δ_i², δ = c° − R cut by ``bits``: (n, 1 + 4k) words minus ``halves``, and its own summand.

    Σ R_1², then of every entry ΔR² = R_0² − R_1², ρ_n·ΔR², ρ_n·R_0, ρ_n·R_1. Own: −ρ_n·Σ R_1².
    """
    if_set = rho >> np.uint64(bits)
    if_clear = if_set - ((rho >> TOP) << np.uint64(64 - bits))
    base = (if_set * if_set).sum(axis=1, dtype=np.uint64)
    jump = if_clear * if_clear - if_set * if_set
    norm = rho_n[:, np.newaxis]
    words = np.stack([jump, norm * jump, norm * if_clear, norm * if_set], axis=2).reshape(len(rho), 4 * jump.shape[1])
    out[:, 0] = base - halves[:, 0]
    out[:, 1:] = words - halves[:, 1:]
    own[:] = ZERO - rho_n * base


def squared_hold(
    c: np.ndarray,
    quotient: np.ndarray,
    wrap: np.ndarray,
    n_middle: np.ndarray,
    n_outer: np.ndarray,
    halves: np.ndarray,
    bits: int,
    leads: bool,
    out: np.ndarray,
) -> None:
    """A holder's summand (n,) of n·Σ δ². ``quotient`` and ``wrap`` (n, k) are its halves of ρ≫bits and of ρ's top bit,
    as the truncation deals them; ``n_middle`` is the holders' common share of n, ``n_outer`` the one with the dealer.

    With v = 1 − (top bit of c), c° = (c≫bits) − 2^(62−bits) and R = R_1 − v·2^(64−bits)·(top bit of ρ):
    q = Σ_i n1·c°² − 2·n1·c°R − ρ_n·c°² + 2c°·ρ_nR + v(n1·ΔR² − ρ_nΔR²), and n1·ΣR_1² − ρ_n·ΣR_1².
    """
    clear = ONE - (c >> TOP)
    value = (c >> np.uint64(bits)) - np.uint64(1 << (62 - bits))
    r = quotient - ((clear * wrap) << np.uint64(64 - bits))
    dealt = halves[:, 1:].reshape(*c.shape, 4)
    cross = np.where(clear == ONE, dealt[..., 2], dealt[..., 3])
    middle, outer = n_middle[:, np.newaxis], n_outer[:, np.newaxis]
    term = outer * value * value + TWO * value * (cross - middle * r)
    term += clear * (middle * dealt[..., 0] - dealt[..., 1])
    if leads:
        term += middle * value * value
    out[:] = term.sum(axis=1, dtype=np.uint64) + n_middle * halves[:, 0]
