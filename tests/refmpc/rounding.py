"""Truncations whose rounding the test chooses, and inputs that crowd where an approximation changes over.

A truncation may give ⌊z/2^bits⌋ or one more. The protocol decides at random; a claim for *every* rounding needs a test
that decides itself. ``forced`` opens each z (in the threads of the test) and rounds as told; multiples stay exact, as
in the protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import refmpc
from refmpc import ArithmeticTensor
from refmpc.core.party import Operation, Party
from refmpc.mathematics import exponential
from refmpc.primitives import arithmetic, dealing, truncation
from tests.refmpc.harness import Secret, opened

WAYS = 256  # patterns of eight truncations

Choose = Callable[[int, np.ndarray, np.ndarray], np.ndarray]  # (which truncation, element numbers, z) → up or down


def down(which: int, element: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Every truncation rounds down."""
    return np.zeros(element.shape, dtype=bool)


def up(which: int, element: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Every truncation rounds up."""
    return np.ones(element.shape, dtype=bool)


def every_way(which: int, element: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Element i rounds by the bits of i: repeated 256 times, an input meets every pattern of 8 truncations."""
    return (element >> (which % 8)) & 1 == 1


def by_lot(seed: int) -> Choose:
    """Each truncation of each element by a coin of its own."""

    def choose(which: int, element: np.ndarray, z: np.ndarray) -> np.ndarray:
        return np.random.default_rng((seed, which)).random(element.shape) < 0.5

    return choose


def against_the_value(which: int, element: np.ndarray, z: np.ndarray) -> np.ndarray:
    """As far from the exact quotient as possible: up when the remainder is small, down when it is large."""
    return (z & 0xFF) < 0x80


def forced(monkeypatch: Any, choose: Choose) -> None:
    """From now on every truncation of a run rounds as ``choose`` says."""

    async def rounded(operation: Operation, summand: Any, bits: int, segments: Any = None) -> np.ndarray:
        party: Any = operation.party
        party.truncations = which = getattr(party, "truncations", -1) + 1
        mine = np.ascontiguousarray(refmpc.unseal(summand).reshape(-1))
        round_ = operation.round()
        round_.send_next(mine)
        round_.send_previous(mine)
        others = round_.fill_next(np.empty_like(mine)), round_.fill_previous(np.empty_like(mine))
        await round_
        z = (mine + others[0] + others[1]).view(np.int64)
        add = choose(which, np.arange(z.size), z) & (z & ((1 << bits) - 1) != 0)
        return _public(operation.party, ((z >> bits) + add).view(np.uint64))

    async def truncate(x: ArithmeticTensor, bits: int) -> ArithmeticTensor:
        shares = await rounded(x.party.operation("truncate"), x.first, bits)
        return ArithmeticTensor(x.party, shares.reshape(2, *x.shape), max(0, x.fraction_bits - bits))

    for module in (truncation, arithmetic, exponential, dealing):
        monkeypatch.setattr(module, "truncate_summands", rounded)
    monkeypatch.setattr(refmpc.truncate, "_function", truncate)


def forced_openings(monkeypatch: Any, up: bool) -> None:
    """From now on what is cut inside ``scale_rows`` and ``cut_and_square`` rounds up, or down: the masks' low bits are
    chosen so that ρ ends in ones, or in zeros."""
    low = np.uint64(2**25 - 1)
    masks, rows = dealing.Dealing.masks, dealing.Dealing.mask_rows

    def bent(self: Any, other: int, drawn: np.ndarray) -> np.ndarray:
        if self.operation.name not in ("scale_rows", "cut_and_square"):
            return drawn
        first = 0 in (self.role, other)
        words = refmpc.unseal(drawn)
        words[:] = (words & ~low) + (low if first and up else np.uint64(0))
        return drawn

    monkeypatch.setattr(
        dealing.Dealing, "masks", lambda self, other, *shape: bent(self, other, masks(self, other, *shape))
    )
    monkeypatch.setattr(
        dealing.Dealing, "mask_rows", lambda self, other, *shape: bent(self, other, rows(self, other, *shape))
    )


def _public(party: Party, words: np.ndarray) -> np.ndarray:
    shares = np.zeros((2, words.size), dtype=np.uint64)
    if party.id == 0:
        shares[0] = words
    elif party.id == 2:
        shares[1] = words
    return shares


# inputs and results -----------------------------------------------------------------------------


def crowded(seed: int, low: float, high: float, fraction_bits: int, count: int = 300) -> np.ndarray:
    """Ring integers with low ≤ value ≤ high: all magnitudes, both ends, and the neighbourhood of 4^k and 15/16·4^k."""
    rng = np.random.default_rng(seed)
    least, most = max(1, int(np.ceil(low * 2.0**fraction_bits))), int(np.floor(high * 2.0**fraction_bits))
    spread = np.exp2(rng.uniform(np.log2(least), np.log2(most), count)).astype(np.int64)
    powers = [4**k * n // 16 for k in range(-2, 31) for n in (15, 16) if 4**k * n >= 16]
    shifted = [power << (fraction_bits % 2) for power in powers]
    near = np.array([p + d for p in [*powers, *shifted] if p < 2**60 for d in (-1, 0, 1)], dtype=np.int64)
    ends = [least, least + 1, most, most - 1]
    values = np.concatenate([ends, near, spread])
    return np.unique(values[(values >= least) & (values <= most)])


def values_of(program: Any, words: np.ndarray, fraction_bits: int, **options: Any) -> np.ndarray:
    """The opened result of a program on one secret tensor, as real numbers."""
    return opened(program, Secret(words, fraction_bits), **options).value
