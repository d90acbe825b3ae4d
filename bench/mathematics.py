"""The cases of the secure mathematics, with what they aim at; ``python -m bench.primitives`` runs them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

import refmpc
from bench.measure import Case, Measurement
from refmpc.core.party import Party

__all__ = ["AIMS", "CASES", "Aim", "table"]

COUNT, ROWS, COLUMNS = 10_000, 50_000, 20


@dataclass(frozen=True)
class Aim:
    """What a case may cost at most (bytes an element, or in all; rounds), and what others take.

    1/x, division and roots take 7 or 9 rounds, and no more bytes than MP-SPDZ for the same function and range, else
    than SPU. MP-SPDZ's numbers have 31 bits: 2^20 is beyond them, and its 1/sqrt is off by up to 0.4 %.
    """

    bytes: float | None
    rounds: int | None
    mp_spdz: str = ""
    spu: str = ""
    in_all: bool = False

    def value(self, measured: Measurement) -> float:
        """The measured bytes that the aim is about."""
        return measured.bytes if self.in_all else measured.bytes_per_element

    def missed(self, measured: Measurement) -> bool:
        """Whether the measurement costs more than the aim."""
        too_long = self.rounds is not None and measured.rounds > self.rounds
        return too_long or (self.bytes is not None and self.value(measured) > self.bytes)


def _between(party: Party, low: float, high: float, shape: tuple[int, ...]) -> refmpc.ArithmeticTensor:
    """Shared values between low and high, of every magnitude if both are positive (benchmark data, not a secret)."""
    rng = np.random.default_rng(1)
    values = np.exp2(rng.uniform(np.log2(low), np.log2(high), shape)) if low > 0 else rng.uniform(low, high, shape)
    return party.complete(refmpc.input_from_party(party, 0, values if party.id == 0 else None, shape, 16))


def _arguments(party: Party, low: float, high: float, rest: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[Any, ...]:
    return _between(party, low, high, shape), *rest


def _quotient(party: Party, low: float, high: float, signed: bool) -> tuple[Any, ...]:
    x = _between(party, low, high, (COUNT,))
    return x, -x if signed else x, low, high, signed


def _rows(party: Party) -> tuple[list[refmpc.ArithmeticTensor]]:
    return ([_between(party, -4.0, 4.0, (ROWS, COLUMNS))],)


def _on(function: Any, low: float, high: float, *rest: Any, shape: tuple[int, ...] = (COUNT,)) -> Case:
    prepare = functools.partial(_arguments, low=low, high=high, rest=rest, shape=shape)
    return Case(prepare, function, int(np.prod(shape)))


def _bounded(function: Any, low: float, high: float) -> Case:
    return _on(function, low, high, low, high)


CASES = {
    "reciprocal on 2^-8..2^8": _bounded(refmpc.reciprocal, 2.0**-8, 2.0**8),
    "divide, by 2^-8..2^8": Case(
        functools.partial(_quotient, low=2.0**-8, high=2.0**8, signed=False), refmpc.divide, COUNT
    ),
    "divide, signed": Case(functools.partial(_quotient, low=2.0**-8, high=2.0**8, signed=True), refmpc.divide, COUNT),
    "inverse_sqrt on 2^-8..2^8": _bounded(refmpc.inverse_sqrt, 2.0**-8, 2.0**8),
    "inverse_sqrt on 2^-12..2^20": _bounded(refmpc.inverse_sqrt, 2.0**-12, 2.0**20),
    "sqrt on 2^-8..2^8": _bounded(refmpc.sqrt, 2.0**-8, 2.0**8),
    "exp, x ≤ 0": _on(refmpc.exp, -30.0, 0.0),
    "exp, −16 ≤ x ≤ 4": _on(refmpc.exp, -16.0, 4.0, 4.0, -16.0),
    "log on 2^-12..2^20": _bounded(refmpc.log, 2.0**-12, 2.0**20),
    "softmax 128×10": _on(refmpc.softmax, -8.0, 8.0, shape=(128, 10)),
    "softmax 128×26": _on(refmpc.softmax, -8.0, 8.0, shape=(128, 26)),
    "clip_factor, q ≤ 512": _on(refmpc.clip_factor, 2.0**-12, 512.0, 512.0),
    "clip_factor, q ≤ 2^20": _on(refmpc.clip_factor, 2.0**-12, 2.0**20, 2.0**20),
    "shuffle 50,000×20": Case(_rows, refmpc.shuffle, ROWS * COLUMNS),
}

AIMS = {
    "reciprocal on 2^-8..2^8": Aim(905, 7, "905 B, 59", "1388 B"),
    "divide, by 2^-8..2^8": Aim(905, 9, "905 B, 59", "1388 B"),
    "divide, signed": Aim(1388, 9),
    "inverse_sqrt on 2^-8..2^8": Aim(822, 7, "822 B, 64", "1548 B"),
    "inverse_sqrt on 2^-12..2^20": Aim(1548, 7, "", "1548 B"),
    "sqrt on 2^-8..2^8": Aim(1548, 9, "4542 B, 187", "1548 B"),
    "exp, x ≤ 0": Aim(450, 20, "1300 B, 43", "444 B"),
    "exp, −16 ≤ x ≤ 4": Aim(450, 20, "1300 B, 43", "444 B"),
    "log on 2^-12..2^20": Aim(900, None, "4096 B, 172", "2524 B"),
    "softmax 128×10": Aim(1.0e6, 11, "2.03 MB, 148", "2.57 MB", in_all=True),
    "softmax 128×26": Aim(2.6e6, 14, "5.13 MB, 157", "", in_all=True),
    "clip_factor, q ≤ 512": Aim(920, 6, "920 B, 75"),
    "clip_factor, q ≤ 2^20": Aim(1500, 6),
    "shuffle 50,000×20": Aim(32, 2, "48 B, 4", "sort: 144 B"),
}


def _size(size: float) -> str:
    return f"{size / 1e6:.2f} MB" if size >= 1e5 else f"{size:.0f} B"


def table(found: dict[str, Measurement]) -> Table:
    """The measurements next to the aims, for people."""
    view = Table(title="secure mathematics, three processes")
    columns = ("function", "elements", "time", "bytes", "aim", "rounds", "aim", "MP-SPDZ*", "SPU*")
    for column in columns:
        view.add_column(column, justify="left" if column == "function" else "right")
    for name, m in found.items():
        aim = AIMS[name]
        view.add_row(
            name,
            f"{m.elements:,}",
            f"{m.seconds * 1e3:.1f} ms",
            _size(aim.value(m)),
            f"≤ {_size(aim.bytes)}" if aim.bytes else "",
            str(m.rounds),
            f"≤ {aim.rounds}" if aim.rounds else "",
            aim.mp_spdz,
            aim.spu,
            style="yellow" if aim.missed(m) else "",
        )
    view.caption = (
        "bytes of all parties: an element, or in all for softmax; yellow: dearer than the aim; * bytes and rounds on "
        "like machines"
    )
    return view
