"""Three processes compute on shares; ends with a table of primitives and their cost: ``python -m refmpc.demo``."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import refmpc
from refmpc.core.party import Party

__all__ = ["main"]

ROWS = 1000


def _examples(x: refmpc.ArithmeticTensor, y: refmpc.ArithmeticTensor) -> dict[str, tuple[Any, tuple[Any, ...], Any]]:
    """Name → (primitive, arguments, what the plain result is as a function of the plain inputs)."""
    bits = x < 0
    table = np.arange(16, dtype=np.uint64) ** np.uint64(2)
    plain: dict[str, tuple[Any, tuple[Any, ...], Callable[..., Any]]] = {
        "multiply, truncate": (refmpc.multiply_truncate, (x, y, 16), lambda a, b: a * b),
        "matrix product": (refmpc.matmul_truncate, (x.reshape(10, -1), y.reshape(-1, 10), 16), _product),
        "truncate": (refmpc.truncate, (x.rescale(32), 16), lambda a, b: a),
        "x < 0": (refmpc.is_negative, (x,), lambda a, b: a < 0),
        "x < 0, 16 bits": (refmpc.is_negative, (x, 4, 20), lambda a, b: a < 0),
        "x < 0, carry tree": (refmpc.is_negative_by_carry_tree, (x,), lambda a, b: a < 0),
        "x = y": (refmpc.equal, (x, y), lambda a, b: a == b),
        "bit · x": (refmpc.select, (bits, x), lambda a, b: np.where(a < 0, a, 0)),
        "bit to arithmetic": (refmpc.bit_to_arithmetic, (bits,), lambda a, b: a < 0),
        "table of 16": (refmpc.lookup, (x.reinterpret(0), table), lambda a, b: (np.rint(a * 65536) % 16) ** 2),
        "ReLU": (refmpc.relu, (x,), lambda a, b: np.maximum(a, 0)),
        "maximum of 10": (refmpc.maximum, (x.reshape(-1, 10),), lambda a, b: a.reshape(-1, 10).max(axis=1)),
    }
    return plain


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.reshape(10, -1) @ b.reshape(-1, 10)


def program(party: Party, own: np.ndarray | None) -> list[dict[str, Any]]:
    """What each server runs. Party 0 and 1 contribute one vector each."""
    mine = own if party.id != 2 else None
    x, y = party.complete(
        refmpc.gather(
            refmpc.input_from_party(party, 0, mine, (ROWS,)), refmpc.input_from_party(party, 1, mine, (ROWS,))
        )
    )
    plain = [party.complete(refmpc.reveal(secret, release="demonstration")) for secret in (x, y)]
    rows = []
    for name, (primitive, arguments, expected) in _examples(x, y).items():
        before, begun = party.ledger.total(), time.perf_counter()
        result = party.complete(primitive(*arguments))
        seconds, after = time.perf_counter() - begun, party.ledger.total()
        secret = result.arithmetic() if isinstance(result, refmpc.TwoHolderBits) else result
        opened = party.complete(refmpc.reveal(secret, release="demonstration"))
        declared = primitive.cost(*arguments)
        rows.append(
            {
                "primitive": name,
                "elements": int(np.size(opened)),
                "rounds": after.rounds - before.rounds,
                "bytes_sent": after.bytes_sent - before.bytes_sent,
                "declared_rounds": declared.rounds,
                "declared_bytes": declared.bytes,
                "largest_error": float(np.abs(opened - expected(*plain)).max()),
                "seconds": seconds,
            }
        )
    return rows


def main(argv: list[str] | None = None) -> None:
    """Run the demonstration and print its table."""
    parser = argparse.ArgumentParser(prog="python -m refmpc.demo", description=__doc__)
    parser.add_argument("--parties", choices=("processes", "threads"), default="processes")
    parser.add_argument("--network", choices=("loopback", "lan", "wan"), default="loopback")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(argv)
    rng = np.random.default_rng(7)
    inputs = [rng.normal(size=ROWS), rng.normal(size=ROWS), None]
    console = Console()
    with console.status("three servers compute on shares"):
        result = refmpc.run(
            program,
            inputs,
            parties=options.parties,
            network=options.network,
            releases={"demonstration": "made-up data, opened to show that results are right; no claim"},
        )
    rows = result.outputs[0]
    for index, row in enumerate(rows):
        row["bytes"] = sum(output[index]["bytes_sent"] for output in result.outputs)
        row["seconds"] = max(output[index]["seconds"] for output in result.outputs)
        del row["bytes_sent"]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    view = Table(title=f"refmpc: {ROWS} shared numbers, three {options.parties}, network: {options.network}")
    view.add_column("primitive")
    for column in ("rounds", "bytes in all", "per result", "as declared", "largest error", "first call"):
        view.add_column(column, justify="right")
    for row in rows:
        same = (row["rounds"], row["bytes"]) == (row["declared_rounds"], row["declared_bytes"])
        view.add_row(
            row["primitive"],
            str(row["rounds"]),
            f"{row['bytes']:,}",
            f"{row['bytes'] / row['elements']:.1f} B",
            "yes" if same else "NO",
            f"{row['largest_error']:.1e}",
            f"{row['seconds'] * 1e3:.1f} ms",
        )
    view.caption = (
        "No server saw a number; each opened only what the ledger declares. python -m bench.primitives times it."
    )
    console.print(view)


if __name__ == "__main__":
    main()
