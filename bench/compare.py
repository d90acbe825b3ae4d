"""Ours, MP-SPDZ and SPU side by side on the same inputs, in one run: ``python -m bench.compare``.

MP-SPDZ is found by MPSPDZ_HOME, SPU by SPU_PYTHON; a peer that is not there is left out with a sentence. Under
``--network lan|wan`` our transport imposes the profile itself, and the peers talk through a relay with the same delay
and bandwidth. Times are those of the protocol alone, the slowest party's, the best of all passes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from accel.errors import PpvflError
from bench.comparison.systems import OURS, PEERS, Cell, Comparison, compare
from bench.comparison.workloads import standard_workloads

__all__ = ["main", "markdown", "table", "to_json"]

NOTES = (
    "CPU is that of one party, its noise thread included. An explicit step builds every per-sample gradient, as the "
    "paper does. Only our steps include their noise. Gaussian"
    " samples are unknown to every party in both systems (the error is that of the standard deviation); the noise in "
    "our"
    " step is another kind, which sends nothing. A comparison gives a shared bit in the system's own form (ours: two"
    " holders; MP-SPDZ: arithmetic; SPU: Boolean); with the selection all give the same. SPU does not report rounds, "
    "and"
    " has no shuffle or Gaussian sampler to call."
)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def _lines(cell: Cell | None) -> list[str]:
    if cell is None:
        return ["–"] * 4
    cpu = "" if cell.cpu is None else f" ({_time(cell.cpu)} CPU)"
    rounds = "–" if cell.rounds is None else f"{cell.rounds} rounds"
    return [_time(cell.seconds) + cpu, _bytes(cell.bytes), rounds, f"{cell.error:.1e}"]


def _ratios(own: Cell | None, peer: Cell | None) -> list[str]:
    if own is None or peer is None:
        return ["–"] * 4

    def ratio(mine: float | None, theirs: float | None) -> str:
        if mine is None or theirs is None or theirs == 0:
            return "–"
        value = mine / theirs
        return "0" if value == 0 else f"1/{1 / value:.3g}" if value < 1 else f"{value:.3g}"

    pairs = ((own.seconds, peer.seconds), (own.bytes, peer.bytes), (own.rounds, peer.rounds), (own.error, peer.error))
    return [ratio(mine, theirs) for mine, theirs in pairs]


def _rows(found: Comparison) -> list[list[list[str]]]:
    """Per workload: the lines of every column after the title."""
    peers = [name for name in found.systems if name != OURS]
    rows = []
    for title in found.titles:
        own = found.cell(title, OURS)
        cells = [_lines(found.cell(title, name)) for name in found.systems]
        rows.append([*cells, *(_ratios(own, found.cell(title, peer)) for peer in peers)])
    return rows


def _columns(found: Comparison) -> list[str]:
    peers = [name for name in found.systems if name != OURS]
    return [*found.systems, *(f"ours : {peer}" for peer in peers)]


def heading(found: Comparison) -> str:
    """Date, machine and versions in one line."""
    about = found.machine
    versions = ", ".join(f"{name} {text}" for name, text in found.versions.items())
    return (
        f"{about['date']}; {about['processor']}, {about['cores']} cores, load {about['load before the run']};"
        f" {versions}; network {found.network}; best of {found.repeats}"
    )


def table(found: Comparison) -> Table:
    """The comparison for people: each cell is time, bytes in all, rounds, largest error."""
    view = Table(title="time · bytes of all parties · rounds · largest error against float64", show_lines=True)
    view.add_column("workload")
    for column in _columns(found):
        view.add_column(column, justify="right")
    for title, row in zip(found.titles, _rows(found), strict=True):
        view.add_row(title, *("\n".join(lines) for lines in row))
    view.caption = f"{heading(found)}\n{NOTES}"
    return view


def markdown(found: Comparison) -> str:
    """The same as a Markdown table."""
    columns = ["workload", *_columns(found)]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for title, row in zip(found.titles, _rows(found), strict=True):
        lines.append("| " + " | ".join([title, *("<br>".join(cell) for cell in row)]) + " |")
    return "\n".join([*lines, "", heading(found) + ".", "", NOTES])


def to_json(found: Comparison) -> str:
    """Everything measured, for programs."""
    rows = {
        title: {name: asdict(cell) for name in found.systems if (cell := found.cell(title, name)) is not None}
        for title in found.titles
    }
    about = {
        "machine": found.machine,
        "versions": found.versions,
        "missing": found.missing,
        "network": found.network,
        "repeats": found.repeats,
    }
    return json.dumps({**about, "rows": rows}, indent=2)


def draw(found: Comparison, path: Path) -> None:
    """Times and bytes of all systems as bars, on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(13, 0.55 * len(found.titles) + 1.5), sharey=True)
    height = 0.8 / len(found.systems)
    for position, name in enumerate(found.systems):
        for axis, attribute, scale in ((axes[0], "seconds", 1e3), (axes[1], "bytes", 1e-6)):
            at, values = [], []
            for row, title in enumerate(found.titles):
                cell = found.cell(title, name)
                if cell is not None and getattr(cell, attribute) > 0:
                    at.append(row + (position - (len(found.systems) - 1) / 2) * height)
                    values.append(getattr(cell, attribute) * scale)
            axis.barh(at, values, height=height, label=name)
    axes[0].set_yticks(range(len(found.titles)), found.titles)
    axes[0].invert_yaxis()
    for axis, label in ((axes[0], "milliseconds"), (axes[1], "MB, all parties (no bar: nothing sent)")):
        axis.set_xscale("log")
        axis.set_xlabel(label)
        axis.grid(axis="x", alpha=0.3)
    axes[0].legend()
    figure.suptitle(heading(found), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", choices=("loopback", "lan", "wan"), default="loopback")
    parser.add_argument("--only", default="", metavar="TEXT", help="only workloads whose title contains this")
    parser.add_argument("--repeat", type=int, default=3, help="passes over all systems; the best counts (default 3)")
    parser.add_argument("--inner", type=int, default=3, help="repetitions within a pass (default 3)")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="which peers to run")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the table as PNG")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON instead of a table")
    output.add_argument("--markdown", action="store_true", help="print a Markdown table")
    options = parser.parse_args(argv)
    workloads = standard_workloads(options.quick)
    chosen = [workload for workload in workloads if options.only in workload.title]
    if not chosen:
        parser.error(f"--only {options.only!r} matches none of: {'; '.join(w.title for w in workloads)}")
    console, errors = Console(), Console(stderr=True)
    try:
        with errors.status("starting") as status:
            found = compare(
                chosen,
                repeat=options.repeat,
                inner=options.inner,
                network=options.network,
                peers=options.peers,
                progress=status.update,
            )
    except PpvflError as error:
        parser.error(str(error))
    for peer, sentence in found.missing.items():
        errors.print(f"{peer} is left out: {sentence}")
    if options.json:
        print(to_json(found))
    elif options.markdown:
        print(markdown(found))
    else:
        console.print(table(found))
    if options.png is not None:
        draw(found, options.png)
        errors.print(f"drawn to {options.png}")


if __name__ == "__main__":
    main()
