"""The paper's tables with ours beside them, from real runs: ``python -m bench.paper``.

    python -m bench.paper --data-root DIR                             everything, four seeds; continues when interrupted
    python -m bench.paper --data-root DIR --only table1 --epsilon 1,8 --seeds 1      a quick look
    python -m bench.paper --data-root DIR --no-run                    the report of what has been run so far
    python -m bench.paper --data-root DIR --from report.json          the same, with the results of another machine
    python -m bench.paper choose --data-root DIR                      how our settings were chosen, on public data
    python -m bench.paper cost                                        runtime and communication over LAN and WAN

Writes report.md, report.json and report.html. Results are kept in a cache, cell by cell, and never trained twice.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from accel.files import write_text
from bench.comparison.systems import machine
from bench.evaluation.cache import ResultCache
from bench.evaluation.cells import Cell
from bench.evaluation.choose import OPTIONS, Trial, choose, choose_baseline_rates
from bench.evaluation.compose import compose, secure_cells
from bench.evaluation.cost import cost_main
from bench.evaluation.earlier import take_cells, take_search
from bench.evaluation.engine import ENGINES, run_sweep
from bench.evaluation.paper_tables import METHOD_NAMES
from bench.evaluation.presets import BASELINE_RATES, PRESETS, preset_for
from bench.evaluation.report import Section, printing_console, rich_table, write_report
from bench.evaluation.sources import DATA_TITLES, PRETRAININGS, DataOptions, NotThere
from bench.evaluation.tables import TABLES, Selection, layout
from vfl.dp import NoiseSplit
from vfl.training import ORDERS

__all__ = ["main"]

# Cheap methods first within a seed, so that a sweep that is stopped has whole rows to show.
_ORDER = ["plain", "g_bmf", "g_shuff", "ldp_g", "ldp_gl", "gl_bmf", "gl_sub", "split", "fedbcd", "admm", "ada_vfed"]


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: numbers with commas between them, as 1,8") from None


def _names(allowed: tuple[str, ...]) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if wrong := [name for name in names if name not in allowed]:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of: {', '.join(allowed)}")
        return names

    return parse


def _add_data_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-root", metavar="DIR", help="folder of data sets, public data and weights")
    parser.add_argument("--weights-imagenet", metavar="FILE", help="ResNet-18, ImageNet (else found under --data-root)")
    parser.add_argument("--weights-cifar100", metavar="FILE", help="ResNet-18 pre-trained on CIFAR-100, 512 outputs")
    parser.add_argument(
        "--weights-own", metavar="FILE", help="small_resnet of python -m vfl.local.pretrain, 512 outputs"
    )
    parser.add_argument("--embedding-cache", default=".cache/embeddings", metavar="DIR")
    parser.add_argument("--out", type=Path, default=Path("runs/paper"), metavar="DIR")


def _data_options(options: argparse.Namespace) -> DataOptions:
    return DataOptions(
        options.data_root,
        options.weights_imagenet,
        options.weights_cifar100,
        options.weights_own,
        options.embedding_cache,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tables = tuple(f"table{n}" for n in TABLES)
    every = dict.fromkeys(name for names in PRETRAININGS.values() for name in names)
    parser.add_argument("--only", type=_names(tables), default=tables, metavar="TABLES", help=f"of {','.join(tables)}")
    parser.add_argument("--epsilon", type=_numbers, default=(), metavar="NUMBERS", help="instead of the tables' own")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--preset", choices=(*PRESETS, "both"), default="both")
    parser.add_argument("--methods", type=_names(tuple(METHOD_NAMES)), default=(), metavar="NAMES")
    parser.add_argument("--data", type=_names(tuple(DATA_TITLES)), default=Selection.data, metavar="NAMES")
    parser.add_argument("--pretraining", type=_names(tuple(every)), default=(), metavar="NAMES", help=", ".join(every))
    _add_data_options(parser)
    parser.add_argument("--engine", choices=ENGINES, default="local", help="joblib on this machine, or a Ray cluster")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time; CIFAR-10 takes 2 GB each"
    )
    parser.add_argument("--minutes", type=float, help="start nothing new after this long")
    parser.add_argument("--cache", default=".cache/paper", metavar="DIR", help="kept results")
    parser.add_argument(
        "--from", dest="earlier", action="append", default=[], type=Path, metavar="FILE",
        help="an earlier report.json, whose cells are kept if nothing about them has changed (may be given twice)",
    )  # fmt: skip
    parser.add_argument("--no-run", action="store_true", help="only the report of kept results")
    parser.add_argument("--secure", action="store_true", help="train a handful of cells with three real servers too")
    parser.add_argument("--cost", type=Path, metavar="FILE", help="JSON of `bench.paper cost --json`")
    parser.add_argument("--json", action="store_true", help="print the report's JSON instead of tables")
    return parser


def _choose(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.paper choose", description="Search our settings on public data."
    )
    _add_data_options(parser)
    all_names = (*OPTIONS, *BASELINE_RATES)
    parser.add_argument(
        "--options", type=_names(all_names), default=all_names, metavar="NAMES", help=f"of {', '.join(all_names)}"
    )
    parser.add_argument("--epsilon", type=_numbers, default=(1.0, 8.0), metavar="NUMBERS")
    parser.add_argument(
        "--epochs", type=int, default=20, help="search for runs of this length; 100 has a preset of its own"
    )
    parser.add_argument("--seeds", type=int, default=2)
    ours = PRESETS["ours"].training
    parser.add_argument("--order", choices=ORDERS, default=ours.order, help="search at the noise of this order (G-BMF)")
    parser.add_argument(
        "--noise", choices=[split.value for split in NoiseSplit], default=ours.noise, help="and of this noise"
    )
    options = parser.parse_args(argv)
    start = preset_for("ours", options.epochs)
    start = replace(start, training=start.training.with_(order=options.order, noise=options.noise))
    console, trials = Console(), []

    def report(trial: Trial) -> None:
        trials.append(asdict(trial))
        figures = ", ".join(f"{100 * a:.2f}" for a in trial.accuracies)
        console.print(f"{trial.option} = {trial.value}: {figures}{'  kept' if trial.kept else ''}", highlight=False)

    data, rates = _data_options(options), {}
    try:
        names = [name for name in options.options if name in OPTIONS]
        best = choose(
            start, data, options.epsilon, options=names, epochs=options.epochs, seeds=options.seeds, report=report
        )
        for method in BASELINE_RATES:
            if method in options.options:
                rates[method] = choose_baseline_rates(
                    method, data, options.epsilon, epochs=options.epochs, seeds=1, report=report
                )
    except NotThere as missing:
        parser.error(str(missing))
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "choose.json"
    before = json.loads(file.read_text(encoding="utf-8"))["trials"] if file.exists() else []
    again = {trial["option"] for trial in trials}
    trials = [trial for trial in before if trial["option"] not in again] + trials
    stored = {"epsilons": options.epsilon, "trials": trials, "best": asdict(best), "baseline_rates": rates}
    write_text(file, json.dumps(stored, indent=1))
    console.print(best)
    if rates:
        console.print(rates)


def _without_paths(argv: list[str]) -> list[str]:
    """The command as a reader would type it: without folders and files of this machine."""
    out: list[str] = []
    for before, word in zip(["", *argv], argv, strict=False):
        path = before in ("--data-root", "--embedding-cache", "--out", "--cache")
        out.append(
            "DIR" if path else "FILE" if before.startswith("--weights-") or before in ("--cost", "--from") else word
        )
    return out


def _take_over(files: list[Path], cache: ResultCache, choice: Path, say: Console) -> None:
    """Cells of earlier reports go into the cache, their search to ``choice``."""
    for file in files:
        taken = take_cells(file, cache)
        more = f", {taken.carried} carried on, as their files are not here" if taken.carried else ""
        more += f", {taken.left} left out as no longer current"
        more += ", the search for our settings taken" if take_search(file, choice) else ""
        say.print(f"{file.name}: {taken.kept} cells taken{more}", highlight=False)


def _print_report(sections: list[Section], lead: list[str], ran: bool) -> None:
    console = printing_console()
    for section in sections:
        for table in section.tables:
            console.print(rich_table(table))
    for sentence in lead:
        console.print(sentence)
    if not ran:
        console.print("Nothing was run. --data-root DIR names a folder of data sets; --data digits needs none.")


def _evaluate(argv: list[str]) -> None:
    parser = _parser()
    options = parser.parse_args(argv)
    started = time.perf_counter()
    presets = tuple(PRESETS) if options.preset == "both" else (options.preset,)
    selection = Selection(options.seeds, options.epsilon, presets, options.data, options.methods, options.pretraining)
    layouts = {
        int(name.removeprefix("table")): layout(int(name.removeprefix("table")), selection) for name in options.only
    }
    secure = secure_cells(options.data[0], PRETRAININGS[options.data[0]][0]) if options.secure else []
    cells = [cell for lines in layouts.values() for line in lines for entry in line.entries for cell in entry.cells]
    cells.sort(key=lambda cell: (cell.seed, cell.epochs > 20, _ORDER.index(cell.method)))
    data = _data_options(options)
    cache = ResultCache(options.cache, data)
    errors = Console(stderr=True)
    if absent := [str(file) for file in (*options.earlier, options.cost) if file is not None and not file.exists()]:
        parser.error(f"{absent[0]} does not exist")
    choice = options.out / "choose.json"
    _take_over(options.earlier, cache, choice, errors)

    def say(cell: Cell, result: dict[str, Any] | str) -> None:
        if not errors.is_terminal and isinstance(result, dict):
            figure = f"{result['auc']:.3f}" if "auc" in result else f"{100 * result['accuracy']:.2f} %"
            print(f"{cell.name}: {figure}, {result['seconds']:.1f} s", file=sys.stderr, flush=True)

    results = run_sweep(
        [*secure, *cells], data, cache, engine=options.engine, workers=options.jobs, console=errors, on_result=say,
        minutes=0.0 if options.no_run else options.minutes,
    )  # fmt: skip
    about = machine()
    done = [r for r in results.values() if isinstance(r, dict)]
    trained = sum(r["seconds"] for r in done) / 60
    took = time.perf_counter() - started
    load = about["load before the run"]
    absent_files = sum(cell in results for cell in cache.carried)
    carried = f", {absent_files} of them from a report whose files are not on this machine" if absent_files else ""
    facts = [
        ("Command", f"`python -m bench.paper {' '.join(_without_paths(argv))}`"),
        ("Date, machine", f"{about['date']}, {about['processor']}, {about['cores']} cores, load {load}"),
        ("Cells", f"{len(done)} of {len(set(cells)) + len(secure)} run, {trained:.0f} minutes of training in all"),
        ("This command", f"{took:.0f} s; other cells were kept from before{carried}"),
        ("Figures", "mean ± standard deviation over seeds; the paper prints means of four runs"),
    ]
    rows = {"cifar10": 50_000}.get(options.data[0])
    report = compose(
        layouts,
        results,
        facts,
        cost_file=options.cost,
        choice=choice,
        secure=secure,
        num_samples=rows,
        about_cell=cache.about,
    )
    paths = write_report(report, options.out)
    if options.json:
        print(paths["json"].read_text(encoding="utf-8"))
        return
    _print_report(report.sections, report.lead, bool(done))
    Console().print(f"Written: {', '.join(str(path) for path in paths.values())}", soft_wrap=True)


def main(argv: list[str] | None = None) -> None:
    """Sub-commands `cost` and `choose`; without one, the evaluation."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    commands = {"cost": cost_main, "choose": _choose}
    if arguments and arguments[0] in commands:
        commands[arguments[0]](arguments[1:])
        return
    _evaluate(arguments)


if __name__ == "__main__":
    main()
