"""Sums over public random subsets, and parities of them: what tests of a whole upload look at (proofs §11)."""

from __future__ import annotations

import numpy as np

__all__ = ["square_sums", "subset_parities", "subset_sums"]

_STRETCH = 32  # rows whose places in a subset are the bits of one number
_PIECE = 1 << 8  # stretches at a time


def subset_sums(x: np.ndarray, first: int, stop: int, picks: np.ndarray, out: np.ndarray) -> None:
    """out[t, l] += the sum modulo 2^64 of the numbers x[i, first + g·lanes + l] that subset t has; x (n, d), out (k,
    lanes).

    Subset t has row i of the g-th group of ``lanes`` columns if bit i mod 32 of picks[i // 32 · groups + g, t] is one
    (picks uint32: one row for each 32 rows and group). All lanes of a group have the same places."""
    lanes = out.shape[1]
    groups = -(-(stop - first) // lanes)
    stretches = -(-len(x) // _STRETCH)
    for start in range(0, stretches, _PIECE):
        end = min(stretches, start + _PIECE)
        rows = x[_STRETCH * start : _STRETCH * end, first:stop]
        whole = np.zeros((_STRETCH * (end - start), groups * lanes), dtype=np.uint64)
        whole[: len(rows), : stop - first] = rows
        numbers = whole.reshape(-1, _STRETCH, groups, lanes).transpose(0, 2, 1, 3).reshape(-1, lanes)
        bits = picks[start * groups : end * groups, :, np.newaxis] >> np.arange(_STRETCH, dtype=np.uint32) & np.uint32(
            1
        )
        chosen = bits.transpose(1, 0, 2).reshape(len(out), -1)
        np.add(out, chosen.astype(np.uint64) @ numbers, out)


def square_sums(x: np.ndarray, y: np.ndarray, first: int, stop: int, out: np.ndarray) -> None:
    """out[i] = Σ_j x_ij·(x_ij + 2·y_ij) over the columns first ≤ j < stop: one server's summand of Σ h_ij² from its two
    shares."""
    left, right = x[:, first:stop], y[:, first:stop]
    np.add.reduce(left * (left + right + right), axis=1, out=out)


def subset_parities(bits: np.ndarray, coins: np.ndarray, out: np.ndarray) -> None:
    """out[0] ^= the coins at the places where ``bits`` (uint8, the lowest counts) are one: 64 parities of random
    subsets."""
    out ^= np.bitwise_xor.reduce(coins * (bits & np.uint8(1)), axis=0, initial=np.uint64(0))
