"""Runs a program on given secrets and puts the parties' results together again, checking that they agree.

The secrets are shared from a seeded generator, so that every share is random and every run can be repeated. Results
are opened outside the protocol from what each party holds: a party's second share must be its neighbour's first, and
the two holders of a bit must hold the same one.
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

import refmpc
from refmpc import Additive, ArithmeticTensor, BooleanTensor, TwoHolder, TwoHolderBits
from refmpc.core.party import SMALL, Party, Segment
from refmpc.core.words import unseal

LAYOUTS = ("plain", "transposed", "strided", "reversed")
EDGES = [0, 1, -1, 2, -2, 2**16, 2**16 - 1, -(2**16) - 1, 2**31, -(2**32), 2**40, -(2**40)]
FAR_EDGES = [2**62 - 1, -(2**62), 2**62, -(2**62) - 1, 2**63 - 1, -(2**63)]

# both ways to deal a vector: one dealer below SMALL, thirds from there on
SIZES = (0, 1, 2, 63, 64, 65, SMALL - 1, SMALL, SMALL + 1, SMALL + 200)
sizes = st.sampled_from(SIZES)
shapes = st.one_of(
    st.tuples(),
    st.tuples(st.integers(0, 9)),
    st.tuples(st.integers(1, 5), st.integers(0, 5)),
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3)),
    st.tuples(st.sampled_from([SMALL - 1, SMALL, SMALL + 1])),
    st.tuples(st.just(3), st.just(SMALL // 3 + 5)),
)
seeds = st.integers(0, 2**32 - 1)
layouts = st.sampled_from(LAYOUTS)
dealers = st.integers(0, 2)  # operations begun before the one under test: they turn the dealer


def words(values: Any) -> np.ndarray:
    """Python or numpy integers as ring words, of any size and sign."""
    array = np.asarray(values)
    if array.dtype.kind in "ui" and array.dtype.itemsize == 8:
        return array.view(np.uint64)
    flat = [int(v) % 2**64 for v in np.asarray(values, dtype=object).reshape(-1)]
    return np.array(flat, dtype=np.uint64).reshape(array.shape)


def random_signed(seed: int, shape: tuple[int, ...], bits: int = 63, edges: list[int] | None = None) -> np.ndarray:
    """Integers −2^bits ≤ v < 2^bits of every magnitude, with the edges that fit among them."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(-(2**63), 2**63 - 1, size=shape, dtype=np.int64, endpoint=True)
    values = np.asarray(raw >> (63 - bits + rng.integers(0, bits + 1, size=shape)), dtype=np.int64)
    near = EDGES + FAR_EDGES if edges is None else edges
    fitting = np.array([e for e in near if -(2**bits) <= e < 2**bits], dtype=np.int64)
    flat = values.reshape(-1)
    at = rng.permutation(flat.size)[: fitting.size]
    flat[at] = rng.permutation(fitting)[: at.size]
    return flat.reshape(shape)


@dataclass
class Secret:
    """What is to be shared: ring words, how to read them, and how they lie in memory."""

    values: Any
    fraction_bits: int = 0
    width: int | None = None  # of a Boolean tensor
    layout: str = "plain"

    def shares(self, rng: np.random.Generator) -> list[np.ndarray]:
        """Replicated shares (2, ...) for each of the three parties."""
        secret = words(self.values)
        if self.width is None:
            parts = [rng.integers(0, 2**64 - 1, size=secret.shape, dtype=np.uint64, endpoint=True) for _ in range(2)]
            parts.append(np.asarray(secret - parts[0] - parts[1]))
        else:
            low = np.uint64(2**self.width - 1)
            parts = [
                rng.integers(0, 2**64 - 1, size=secret.shape, dtype=np.uint64, endpoint=True) & low for _ in range(2)
            ]
            parts.append(np.asarray((secret ^ parts[0] ^ parts[1]) & low))
        return [_laid_out(np.stack([parts[i], parts[(i + 1) % 3]]), self.layout) for i in range(3)]

    def tensor(self, party: Party, shares: np.ndarray) -> ArithmeticTensor | BooleanTensor:
        """The tensor of one party."""
        if self.width is None:
            return ArithmeticTensor(party, shares, self.fraction_bits)
        return BooleanTensor(party, shares, self.width)


def _laid_out(shares: np.ndarray, layout: str) -> np.ndarray:
    """The same shares as another view of memory."""
    if layout == "plain" or shares.ndim == 1:
        return shares
    if layout == "transposed":
        order = (0, *reversed(range(1, shares.ndim)))
        return np.ascontiguousarray(shares.transpose(order)).transpose(order)
    if layout == "strided":
        wide = np.full((*shares.shape[:-1], 2 * shares.shape[-1]), 0xDEAD, dtype=np.uint64)
        wide[..., ::2] = shares
        return wide[..., ::2]
    return np.ascontiguousarray(shares[:, ::-1])[:, ::-1]


@dataclass
class Opened:
    """One result: its ring words (or bits), its scale, and the shares it came from."""

    words: np.ndarray
    scale: int
    shares: list[np.ndarray]

    @property
    def signed(self) -> np.ndarray:
        """The words read as signed."""
        return self.words.view(np.int64)

    @property
    def value(self) -> np.ndarray:
        """The words read at their scale."""
        return refmpc.decode(self.words, self.scale)


@dataclass
class Evaluated:
    """The opened results of a run (one, or a list as the program returned it), and the run itself."""

    opened: Any
    run: refmpc.RunResult = field(repr=False)


class _Program:
    """The program at one party: builds the tensors, runs, and packs what comes out for the way home."""

    def __init__(self, program: Any, secrets: tuple[Secret, ...], begun: int):
        self.program, self.secrets, self.begun = program, secrets, begun

    def __call__(self, party: Party, shares: list[np.ndarray]) -> Any:
        for _ in range(self.begun):
            party.operation("begun before")
        tensors = [s.tensor(party, mine) for s, mine in zip(self.secrets, shares, strict=True)]
        output = self.program(party, *tensors)
        if inspect.iscoroutine(output):
            output = party.complete(output)
        return packed(output)


def packed(output: Any) -> Any:
    """One party's results in a form that can go from process to process."""
    if isinstance(output, list | tuple):
        return [packed(item) for item in output]
    if isinstance(output, ArithmeticTensor):
        return "arithmetic", unseal(output.shares), output.fraction_bits
    if isinstance(output, BooleanTensor):
        return "boolean", unseal(output.shares), output.width
    if isinstance(output, TwoHolderBits):
        stretches = [(s.dealer, s.slice.start, s.slice.stop) for s in output.segments]
        return "bits", unseal(output.held), stretches, output.shape
    if isinstance(output, Additive | TwoHolder):
        stretches = [(s.dealer, s.slice.start, s.slice.stop) for s in output.segments]
        adds = isinstance(output, Additive) and output.dealer_adds
        kind = "additive" if isinstance(output, Additive) else "two-holder"
        return kind, unseal(output.words), output.fraction_bits, stretches, output.bits, adds
    return "public", output


def unpacked(packed: list[Any]) -> Any:
    """The three parties' packed results, checked against each other and opened."""
    if isinstance(packed[0], list):
        assert len({len(p) for p in packed}) == 1
        return [unpacked(list(items)) for items in zip(*packed, strict=True)]
    kind = packed[0][0]
    assert all(p[0] == kind for p in packed)
    if kind == "public":
        return [p[1] for p in packed]
    if kind == "bits":
        return _opened_bits(packed)
    if kind in ("additive", "two-holder"):
        return _opened_by_rows(packed)
    shares, scale = [p[1] for p in packed], packed[0][2]
    assert {p[2] for p in packed} == {scale}, "the parties disagree about the scale"
    for i in range(3):
        assert shares[i].dtype == np.uint64
        assert np.array_equal(shares[i][1], shares[(i + 1) % 3][0]), f"parties {i} and {(i + 1) % 3} disagree"
    x0, x1, x2 = (np.asarray(s[0]) for s in shares)
    if kind == "boolean":
        assert all((s >> np.uint64(scale - 1) <= 1).all() for s in shares), "bits above the width"
        return Opened(np.asarray(x0 ^ x1 ^ x2), scale, shares)
    return Opened(np.asarray(x0 + x1 + x2), scale, shares)


def _opened_bits(packed: list[Any]) -> Opened:
    held, (stretches, shape) = [p[1] for p in packed], packed[0][2:]
    assert all(p[2:] == packed[0][2:] for p in packed), "the parties disagree about the dealers"
    assert [start for _, start, _ in stretches] == [0, *(stop for _, _, stop in stretches[:-1])]
    assert stretches[-1][2] == held[0].size == int(np.prod(shape))
    bits = np.empty(held[0].size, dtype=np.uint8)
    for dealer, start, stop in stretches:
        role = {Segment(dealer, start, stop).role(i): held[i][start:stop] for i in range(3)}
        assert np.array_equal(role[0], role[1]), "the two holders of a bit disagree"
        bits[start:stop] = role[0] ^ role[2]
    assert bits.max(initial=0) <= 1
    return Opened(bits.reshape(shape), 1, held)


def _opened_by_rows(packed: list[Any]) -> Opened:
    words, (scale, stretches, bits, adds) = [np.asarray(p[1]) for p in packed], packed[0][2:]
    assert all(p[2:] == packed[0][2:] for p in packed), "the parties disagree about scale or dealers"
    ring = np.uint64(2**bits - 1)
    if packed[0][0] == "additive":
        for dealer, start, stop in stretches:
            assert adds or not words[dealer][start:stop].any(), "the dealer has a summand"
        return Opened((words[0] + words[1] + words[2]) & ring, scale, words)
    value = np.empty_like(words[0])
    for dealer, start, stop in stretches:
        c, other, rho = (words[(dealer + 1 + role) % 3][start:stop] for role in range(3))
        assert np.array_equal(c, other), "the two holders disagree"
        value[start:stop] = c - rho
    return Opened(value & ring, scale, words)


def evaluate(program: Any, *secrets: Secret, seed: int = 0, begun: int = 0, **options: Any) -> Evaluated:
    """Run ``program(party, *tensors)`` on fresh random shares of the secrets and open what it returns."""
    rng = np.random.default_rng(seed)
    shares = [secret.shares(rng) for secret in secrets]
    inputs = [[each[i] for each in shares] for i in range(3)]
    with warnings.catch_warnings(), np.errstate(over="ignore"):
        warnings.filterwarnings("ignore", message="insecure_")
        result = refmpc.run(_Program(program, secrets, begun), inputs, **options)
        return Evaluated(unpacked(result.outputs), result)


def opened(program: Any, *secrets: Secret, **options: Any) -> Any:
    """The opened results of ``evaluate``."""
    return evaluate(program, *secrets, **options).opened


def outputs_of(call, releases=None, **options):
    """Run ``call(party, step-maker)`` at three parties; what it returns."""
    return refmpc.run(call, timeout=20, releases=releases or {}, **options).outputs
