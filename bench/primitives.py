"""Time, bytes and rounds of the primitives and of the secure mathematics, three processes:
``python -m bench.primitives``."""

from __future__ import annotations

import numpy as np
from rich.table import Table

import refmpc
from accel.validate import require
from bench import mathematics
from bench.harness import Option, benchmark
from bench.measure import Case, Measurement, measure_cases
from refmpc.core.party import Party

__all__ = ["CASES", "main"]

MILLION, HUNDRED_THOUSAND = 1_000_000, 100_000


def random_fixed(party: Party, *shape: int, bits: int = 16) -> refmpc.ArithmeticTensor:
    """A random shared tensor with |values| below 4 (made from party 0's generator: benchmark data, not a secret)."""
    values = np.random.default_rng(1).uniform(-4, 4, size=shape) if party.id == 0 else None
    return party.complete(refmpc.input_from_party(party, 0, values, shape, bits))


def two_vectors(party: Party) -> tuple[refmpc.ArithmeticTensor, refmpc.ArithmeticTensor, int]:
    return random_fixed(party, MILLION), random_fixed(party, MILLION), 16


def forward_matrices(party: Party) -> tuple[refmpc.ArithmeticTensor, refmpc.ArithmeticTensor, int]:
    return random_fixed(party, 128, 2000), random_fixed(party, 2000, 10), 16


def backward_matrices(party: Party) -> tuple[refmpc.ArithmeticTensor, refmpc.ArithmeticTensor, int]:
    return random_fixed(party, 128, 2000).T, random_fixed(party, 128, 10), 16


def one_vector(party: Party) -> tuple[refmpc.ArithmeticTensor]:
    return (random_fixed(party, HUNDRED_THOUSAND),)


def one_vector_32(party: Party) -> tuple[refmpc.ArithmeticTensor, int, int]:
    return random_fixed(party, HUNDRED_THOUSAND), 0, 31


def one_vector_16(party: Party) -> tuple[refmpc.ArithmeticTensor, int, int]:
    return random_fixed(party, HUNDRED_THOUSAND), 12, 28


def one_vector_truncate(party: Party) -> tuple[refmpc.ArithmeticTensor, int]:
    return random_fixed(party, HUNDRED_THOUSAND), 16


def bits_and_vector(party: Party) -> tuple[refmpc.TwoHolderBits, refmpc.ArithmeticTensor]:
    x = random_fixed(party, HUNDRED_THOUSAND)
    return x < 0, x


def only_bits(party: Party) -> tuple[refmpc.TwoHolderBits]:
    return bits_and_vector(party)[:1]


CASES = {
    "1M fixed-point multiplications": Case(two_vectors, refmpc.multiply_truncate, MILLION),
    "matmul 128×2000 · 2000×10": Case(forward_matrices, refmpc.matmul_truncate, 1280),
    "matmul 2000×128 · 128×10": Case(backward_matrices, refmpc.matmul_truncate, 20000),
    "100k comparisons, 32-bit values": Case(one_vector_32, refmpc.is_negative, HUNDRED_THOUSAND),
    "100k comparisons, 64-bit values": Case(one_vector, refmpc.is_negative, HUNDRED_THOUSAND),
    "100k comparisons, 16 bits that matter": Case(one_vector_16, refmpc.is_negative, HUNDRED_THOUSAND),
    "100k comparisons, carry tree": Case(one_vector, refmpc.is_negative_by_carry_tree, HUNDRED_THOUSAND),
    "100k truncations": Case(one_vector_truncate, refmpc.truncate, HUNDRED_THOUSAND),
    "100k selections": Case(bits_and_vector, refmpc.select, HUNDRED_THOUSAND),
    "100k bits to arithmetic": Case(only_bits, refmpc.bit_to_arithmetic, HUNDRED_THOUSAND),
}

# Figures our user gave for a like machine, quiet: (seconds, MB, rounds). For orientation only: `bench.compare` measures
# the peers beside us in the same run.
PEERS: dict[str, dict[str, tuple[float, float | None, int | None]]] = {
    "1M fixed-point multiplications": {"MP-SPDZ": (0.30, 56.0, 3), "SPU": (0.27, 52.0, None)},
    "matmul 128×2000 · 2000×10": {"MP-SPDZ": (0.016, None, None), "SPU": (1.0, None, None)},
    "matmul 2000×128 · 128×10": {"MP-SPDZ": (0.027, None, None), "SPU": (0.08, None, None)},
    "100k comparisons, 32-bit values": {"MP-SPDZ": (0.037, 6.7, 8), "SPU": (0.27, 10.8, None)},
}


def _peer(name: str, peer: str) -> str:
    figures = PEERS.get(name, {}).get(peer)
    if figures is None:
        return ""
    seconds, megabytes, rounds = figures
    parts = [f"{seconds:g} s", f"{megabytes:g} MB" if megabytes else "", f"{rounds} rounds" if rounds else ""]
    return ", ".join(part for part in parts if part)


def table(found: dict[str, Measurement]) -> Table:
    """The measurements as a table for people."""
    view = Table(title="refmpc, three processes")
    for column in ("primitive", "time", "bytes in all", "per element", "rounds", "MP-SPDZ*", "SPU*"):
        view.add_column(column, justify="left" if column == "primitive" else "right")
    for name, m in found.items():
        view.add_row(
            name,
            f"{m.seconds * 1e3:.1f} ms",
            f"{m.bytes / 1e6:.2f} MB",
            f"{m.bytes_per_element:.1f} B",
            str(m.rounds),
            _peer(name, "MP-SPDZ"),
            _peer(name, "SPU"),
        )
    view.caption = "* figures given for a like machine, not measured here; bench.compare runs them side by side"
    return view


def measure(repeat: int = 7, network: str = "loopback", only: str = "") -> dict[str, Measurement]:
    """All cases whose name contains a text."""
    every = CASES | mathematics.CASES
    cases = {name: case for name, case in every.items() if only in name}
    require(bool(cases), "--only", only, f"part of one of: {', '.join(every)}")
    return measure_cases(cases, repeat, network)


def tables(found: dict[str, Measurement]) -> list[Table]:
    """Primitives, then the secure mathematics."""
    kinds = ((CASES, table), (mathematics.CASES, mathematics.table))
    chosen = [({name: each for name, each in found.items() if name in known}, view) for known, view in kinds]
    return [view(each) for each, view in chosen if each]


main = benchmark(
    measure,
    tables,
    repeat="repetitions; the best counts",
    network=Option("emulated", ("loopback", "lan", "wan")),
    only="run only cases whose name contains this text",
)

if __name__ == "__main__":
    main()
