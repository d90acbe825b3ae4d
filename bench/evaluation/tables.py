"""The paper's tables as lists of cells, and as text once cells have results. A cell that was not run says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from accel.validate import require
from bench.evaluation.cells import JOINT, SECRET, Cell
from bench.evaluation.paper_tables import METHOD_NAMES, PRETRAINING_NAMES, PaperTable, paper_table
from bench.evaluation.presets import PRESETS
from bench.evaluation.sources import DATA_TITLES, PRETRAININGS
from vfl.dp.baselines import AS_IF_POISSON, AS_IF_UNSEEN, RELEASED_ROWS_ALONE

__all__ = [
    "TABLES",
    "Entry",
    "Line",
    "Selection",
    "Summary",
    "TableView",
    "block_title",
    "layout",
    "measured",
    "missing_view",
    "presumes",
    "source_title",
    "summary",
    "view",
]

TABLES = (1, 2, 3, 4, 7, 9)
NOT_RUN = "not run"
Results = Mapping[Cell, dict[str, Any] | str]
MARK = " †"  # behind the name of a method whose ε is not proven for what runs
# By method, not from the results: runs that were kept from before still say that theirs is proven. Of G-Shuff, the
# paper's own accounting alone (``Line.presumes``).
NOT_PROVEN = {
    "g_shuff": AS_IF_POISSON,
    "gl_sub": AS_IF_UNSEEN,
    **dict.fromkeys(("ldp_gl", "admm", "fedbcd", "split", "ada_vfed"), RELEASED_ROWS_ALONE),
}

# (method, setting, variant): the rows of a table in the paper's order, ours in between.
_FROZEN = [("g_shuff", 1, ""), ("g_bmf", 1, ""), ("g_bmf", 2, "")]
_ORDERS = [("g_bmf", s, v) for s in (1, 2) for v in (SECRET, JOINT, f"{SECRET}, {JOINT}")]  # in our settings only
_LORA = [("gl_bmf", s, v) for s in (1, 2) for v in ("released", "estimated")]
_LDP = [("ldp_g", 1, ""), ("ldp_gl", 1, "")]
_BASELINES = [(m, 1, "") for m in ("admm", "fedbcd", "split", "ada_vfed")]
_ROWS: dict[int, list[tuple[str, int, str]]] = {
    1: [("plain", 1, ""), *_FROZEN, *_ORDERS, *_LORA, *_LDP],
    2: [*_FROZEN, *_LORA, *_LDP],
    3: [("g_shuff", 1, ""), ("g_bmf", 1, ""), *_LORA[:2], *_BASELINES],
    4: [("plain", 1, ""), ("plain", 1, "full"), *_FROZEN, *_LORA],
    7: [("plain", 1, ""), *_FROZEN, *_ORDERS, *_LORA],
    9: [*_LORA[:2], ("gl_sub", 1, "released"), ("gl_sub", 1, "estimated"), *_BASELINES[:2]],
}


@dataclass(frozen=True)
class Selection:
    """What was asked for on the command line."""

    seeds: int = 4
    epsilons: tuple[float, ...] = ()
    presets: tuple[str, ...] = ("paper", "ours")
    data: tuple[str, ...] = ("cifar10", "cifar10_images", "emnist", "ocr_letters")
    methods: tuple[str, ...] = ()
    pretrainings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Summary:
    """Mean and standard deviation over seeds, in the units of a table."""

    mean: float
    deviation: float
    seeds: int


@dataclass(frozen=True)
class Entry:
    """One figure: the paper's, or one cell for each seed."""

    epsilon: float | None
    paper: float | None = None
    cells: tuple[Cell, ...] = ()


def presumes(method: str, source: str) -> str:
    """What the ε of a method rests on in a preset (or in the paper), if that is not proven for what runs."""
    proven = method == "g_shuff" and source in PRESETS and PRESETS[source].training.accounting != "paper"
    return "" if proven else NOT_PROVEN.get(method, "")


@dataclass(frozen=True)
class Line:
    """One line of a table; ``source`` is "published" (the paper's own) or a preset's name."""

    table: int
    data: str
    pretraining: str
    method: str
    setting: int
    variant: str
    source: str
    entries: tuple[Entry, ...]

    @property
    def presumes(self) -> str:
        """What its ε rests on, if that is not proven for what runs."""
        return presumes(self.method, self.source)

    @property
    def label(self) -> str:
        if self.variant == "full":
            return "Plain, local MLPs trained"
        two = self.method in ("g_bmf", "gl_bmf")
        variant = f", {self.variant}" if self.variant and self.source != "published" else ""
        mark = MARK if self.presumes else ""
        return METHOD_NAMES[self.method] + (
            f" (Setting {self.setting}{variant})" if two else variant.replace(", ", " ") + mark
        )


@dataclass
class TableView:
    """Text: ``rows`` of (kind, cells); ``kind`` is published, a preset's name, or heading. ``words``: no figures.
    ``folded``: a page shows it when asked."""

    title: str
    columns: list[str]
    rows: list[tuple[str, list[str]]]
    notes: list[str] = field(default_factory=list)
    words: bool = False
    folded: bool = False


def layout(number: int, selection: Selection) -> list[Line]:
    """The lines of one table: the paper's, then one for each preset, for every data set that was asked for."""
    require(number in TABLES, "table", number, f"one of {', '.join(map(str, TABLES))}")
    table = paper_table(number)
    epsilons = selection.epsilons or table.epsilons
    lines = []
    for data in selection.data if number in (1, 7) else selection.data[:1]:
        for pretraining in _pretrainings(number, data):
            if selection.pretrainings and pretraining not in selection.pretrainings:
                continue
            for method, setting, variant in _ROWS[number]:
                if selection.methods and method not in selection.methods:
                    continue
                if (method, setting, variant) in _ORDERS and (data, pretraining) != ("cifar10", "imagenet"):
                    continue  # certificates take a while
                if data == "cifar10_images" and (number != 1 or method not in ("plain", "g_bmf", "gl_bmf")):
                    continue  # there to tell what more blocks give GL-BMF
                budgets: tuple[float | None, ...] = (None,) if method == "plain" else epsilons
                if data == "cifar10_images" and method != "plain" and variant != "estimated":
                    budgets = (None, *epsilons)  # what the adapters could give if there were no noise
                key = (number, data, pretraining, method, setting, variant)
                printed = tuple(Entry(e, paper=_printed(table, data, pretraining, method, setting, e)) for e in budgets)
                if variant in ("", "released") and any(entry.paper is not None for entry in printed):
                    lines.append(Line(*key, "published", printed))
                trains_locally = variant == "full" or (method, setting, variant) in _BASELINES
                chosen = ("paper",) if trains_locally else selection.presets
                if (method, setting, variant) in _ORDERS:
                    chosen = tuple(preset for preset in chosen if preset == "ours")
                for preset in chosen:
                    lines.append(
                        Line(*key, preset, tuple(_entry(table, key, preset, e, selection.seeds) for e in budgets))
                    )
    return lines


def _pretrainings(number: int, data: str) -> tuple[str, ...]:
    """Tables 1 and 7 have all, the attack is also tried on our own weights, the others on the first alone."""
    every = PRETRAININGS[data]
    if number in (1, 7):
        return every
    return (every[0], *(name for name in every[1:] if number == 4 and name == "own"))


def _printed(
    table: PaperTable, data: str, pretraining: str, method: str, setting: int, epsilon: float | None
) -> float | None:
    name = METHOD_NAMES[method] + (f" (Setting {setting})" if method in ("g_bmf", "gl_bmf") else "")
    source = paper_table(2) if table.number == 1 and method in ("ldp_g", "ldp_gl") else table
    return source.accuracy(DATA_TITLES[data], PRETRAINING_NAMES.get(pretraining, ""), name, epsilon)


def _entry(
    table: PaperTable, key: tuple[int, str, str, str, int, str], preset: str, epsilon: float | None, seeds: int
) -> Entry:
    number, data, pretraining, method, setting, variant = key
    clip_norm = table.clip_norm if table.clip_norm != PRESETS["paper"].training.clip_norm else None
    cells = tuple(
        Cell(
            "attack" if number == 4 else "utility", data, pretraining, preset, method, setting, variant, epsilon,
            table.epochs, seed, clip_norm,
        )
        for seed in range(seeds)
    )  # fmt: skip
    return Entry(epsilon, cells=cells)


def measured(entry: Entry, results: Results, what: str = "accuracy") -> list[float]:
    """The figures of the seeds that have been run."""
    found = [results.get(cell) for cell in entry.cells]
    return [result[what] for result in found if isinstance(result, dict)]


def summary(entry: Entry, results: Results, what: str = "accuracy") -> Summary | None:
    """The seeds that have been run; accuracies are in per cent."""
    values = [v if what == "auc" else 100 * v for v in measured(entry, results, what)]
    if not values:
        return None
    return Summary(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0, len(values))


def _text(entry: Entry, results: Results, what: str) -> str:
    digits = 3 if what == "auc" else 1
    if entry.paper is not None:
        return f"{entry.paper:.2f}"
    if not entry.cells:
        return "–"
    found = summary(entry, results, what)
    if found is None:
        return NOT_RUN
    text = f"{found.mean:.{digits}f}"
    if found.seeds > 1:
        text += f" ± {found.deviation:.{digits}f}"
    if found.seeds != len(entry.cells):
        text += f" ({found.seeds})"
    return text


def block_title(line: Line) -> str:
    """Data set and pre-training, as a table's heading has them."""
    pretraining = [PRETRAINING_NAMES[line.pretraining]] if line.pretraining != "none" else []
    return ", ".join([DATA_TITLES[line.data], *pretraining])


def source_title(line: Line) -> str:
    """Whose figures, in which settings."""
    if line.source != "published":
        return f"ours, {PRESETS[line.source].title}"
    return "paper, 100 epochs" if line.table == 1 and line.method in ("ldp_g", "ldp_gl") else "paper"


def _is_empty(line: Line, results: Results) -> bool:
    """Ours, and nothing to show."""
    what = "auc" if line.table == 4 else "accuracy"
    return line.source != "published" and all(summary(entry, results, what) is None for entry in line.entries)


def view(number: int, lines: Sequence[Line], results: Results) -> TableView:
    """One table as text, its data sets under headings. Lines of ours without a figure are left to ``missing_view``; a
    data set of which nothing was run takes no line at all, and a note says why."""
    table = paper_table(number)
    epsilons = sorted({e.epsilon for line in lines for e in line.entries if e.epsilon is not None})
    columns = ["method", "source", *(f"ε = {e:g}" for e in epsilons)]
    if any(entry.epsilon is None for line in lines for entry in line.entries):
        columns.insert(2, "no noise")
    out = TableView(f"Table {number}: {table.caption}", columns, [])
    reasons: dict[str, None] = {}
    missing, left_out = [], 0
    for title in dict.fromkeys(block_title(line) for line in lines):
        own = [line for line in lines if block_title(line) == title]
        cells = [cell for line in own for entry in line.entries for cell in entry.cells]
        empty = [line for line in own if _is_empty(line, results)]
        if len(empty) == sum(line.source != "published" for line in own):
            why = next((r for cell in cells if isinstance(r := results.get(cell), str)), "")
            missing.append(f"{title}{f' ({why})' if why else ''}")
            continue
        out.rows.append(("heading", [title]))
        _add_rows(out, [line for line in own if line not in empty], results, number, epsilons, reasons)
        left_out += len(empty)
    out.notes += [f"Not run: {reason}." for reason in (*missing, *reasons)]
    if left_out:
        out.notes.append(
            f"{left_out} lines of which nothing was run are left out here; the list of cells not run has them."
        )
    shown = [cell for kind, row in out.rows if kind != "heading" for cell in row[2:]]
    if any(cell.endswith(")") for cell in shown):
        out.notes.append("In parentheses: the number of seeds, where it is not the one asked for.")
    out.notes += _claim_notes(lines, results)
    return out


def missing_view(layouts: Mapping[int, Sequence[Line]], results: Results) -> TableView:
    """Every line with cells that were not run: how many of how many."""
    columns = ["table", "data", "method", "settings", "cells not run", "of"]
    out = TableView("Cells not run", columns, [], words=True, folded=True)
    every: set[Cell] = set()
    for number, lines in layouts.items():
        for line in (line for line in lines if line.source != "published"):
            cells = [cell for entry in line.entries for cell in entry.cells]
            left = sum(not isinstance(results.get(cell), dict) for cell in cells)
            every.update(cells)
            if left:
                names = [f"Table {number}", block_title(line), line.label, PRESETS[line.source].title]
                out.rows.append((line.source, [*names, str(left), str(len(cells))]))
    missing = sum(not isinstance(results.get(cell), dict) for cell in every)
    out.title = f"Cells not run: {missing:,} of {len(every):,}, in {len(out.rows)} lines"
    return out


def _claim_notes(lines: Sequence[Line], results: Results) -> list[str]:
    """Where the ε of a column is not a proven claim about features and labels, what it is instead."""
    notes: dict[tuple[str, str], str] = {}
    for line in lines:
        key = (METHOD_NAMES[line.method], line.variant)
        for entry in line.entries:
            found = next((r for cell in entry.cells if isinstance(r := results.get(cell), dict)), None)
            if key in notes or found is None or entry.epsilon is None:
                continue
            name = " ".join(filter(None, key))
            parts = []
            covers = found.get("covers", "features and labels")
            if covers != "features and labels":
                claimed = found["claimed_epsilon"]
                there = f", with ε = {claimed:.3g} where the column says {entry.epsilon:g}"
                parts.append(f"the claim covers {covers}{there if claimed > 1.005 * entry.epsilon else ''}")
            if line.presumes:
                parts.append(f"ε is {line.presumes}{_proven_instead(found, entry.epsilon)}")
            if parts:
                notes[key] = f"{name}{MARK if line.presumes else ''}: {'; '.join(parts)}."
    return list(notes.values())


def _proven_instead(found: Mapping[str, Any], epsilon: float) -> str:
    if "proven_epsilon" not in found:
        return ""
    proven = found["proven_epsilon"]
    return "; no ε is proven" if proven is None else f"; proven is ε = {proven:.3g} where the column says {epsilon:g}"


def _add_rows(
    out: TableView,
    lines: Sequence[Line],
    results: Results,
    number: int,
    epsilons: Sequence[float],
    reasons: dict[str, None],
) -> None:
    what = "auc" if number == 4 else "accuracy"
    for line in lines:
        texts = {e.epsilon: _text(e, results, what) for e in line.entries}
        row = [line.label, source_title(line)]
        if "no noise" in out.columns:
            row.append(texts.get(None, "–"))
        out.rows.append((line.source, row + [texts.get(e, "–") for e in epsilons]))
        for entry in line.entries:
            reasons.update(dict.fromkeys(r for c in entry.cells if isinstance(r := results.get(c), str)))
