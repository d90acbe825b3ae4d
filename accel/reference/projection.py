"""Sums with public random signs, and parities of public random subsets: what tests of a whole upload look at (proofs §11)."""

from __future__ import annotations

import numpy as np

__all__ = ["project_signs", "subset_parities"]

_PIECE = 1 << 12


def project_signs(x: np.ndarray, coins: np.ndarray, out: np.ndarray) -> None:
    """out[t] += Σ_i r_ti·x[i] modulo 2^64, r_ti = bit t of coins[i, 0] − bit t of coins[i, 1]; x (n, d), out (k ≤ 64, d)."""
    places = np.arange(len(out), dtype=np.uint64)[:, np.newaxis]
    for start in range(0, len(x), _PIECE):
        piece = coins[start : start + _PIECE]
        signs = (piece[:, 0] >> places & np.uint64(1)) - (piece[:, 1] >> places & np.uint64(1))
        np.add(out, signs @ x[start : start + _PIECE], out)


def subset_parities(bits: np.ndarray, coins: np.ndarray, out: np.ndarray) -> None:
    """out[0] ^= the coins at the places where ``bits`` (uint8, the lowest counts) are one: 64 parities of random subsets."""
    out ^= np.bitwise_xor.reduce(coins * (bits & np.uint8(1)), axis=0, initial=np.uint64(0))
