"""From results to the report: which sections, and which figures are set against each other."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bench.evaluation import plots, texts
from bench.evaluation.cells import Cell
from bench.evaluation.cost import CostRow, load_costs, table_number
from bench.evaluation.paper_tables import METHOD_NAMES, paper_table
from bench.evaluation.presets import LONG, PRESETS, Preset
from bench.evaluation.report import Report, Section
from bench.evaluation.sources import DATA_TITLES, NUM_CLASSES, PRETRAININGS
from bench.evaluation.tables import (
    MARK,
    NOT_RUN,
    Line,
    Results,
    TableView,
    block_title,
    missing_view,
    presumes,
    summary,
    view,
)

__all__ = ["compose", "cost_view", "preset_table", "secure_cells", "secure_view"]

_TITLES = {
    1: "Utility after 20 epochs",
    7: "Utility after 100 epochs",
    2: "Local differential privacy",
    3: "Baselines",
    9: "GL-Sub",
    4: "Membership inference",
}
_SECURE = (
    ("g_shuff", 1, ""),
    ("g_bmf", 1, ""),
    ("g_bmf", 2, ""),
    ("gl_bmf", 1, "released"),
    ("gl_bmf", 1, "estimated"),
)


def secure_cells(data: str, pretraining: str) -> list[Cell]:
    """The handful that three real servers train: every protocol on the embedded digits, G-BMF in full on real data."""
    small = [Cell("secure", "digits", "none", "ours", *row, 8.0, 10, 0) for row in _SECURE]
    if data == "digits":
        return small
    return [*small, *(Cell("secure", data, pretraining, "ours", "g_bmf", 1, "", e, 20, 0) for e in (1.0, 8.0))]


def secure_view(cells: Sequence[Cell], results: Results) -> TableView:
    """Accuracy of the released model beside its twin's."""
    columns = ["method", "data", "ε", "epochs", "steps", "3PC %", "twin %", "MB", "s"]
    out = TableView("Trained by three servers (3PC), and by the plaintext twin", columns, [])
    for cell in cells:
        found = results.get(cell)
        variant = f", {cell.variant}" if cell.variant else ""
        name = f"{METHOD_NAMES[cell.method]} (Setting {cell.setting}{variant})"
        if because := presumes(cell.method, cell.preset):
            name += MARK
            note = f"{METHOD_NAMES[cell.method]}{MARK}: ε is {because}."
            out.notes += [] if note in out.notes else [note]
        figures = [NOT_RUN] * 5
        if isinstance(found, dict):
            accuracies = [f"{100 * found[key]:.2f}" for key in ("accuracy", "twin_accuracy")]
            figures = [str(found["steps"]), *accuracies, f"{found['megabytes']:,.1f}", f"{found['run_seconds']:.0f}"]
        out.rows.append(("", [name, cell.data, f"{cell.epsilon:g}", str(cell.epochs), *figures]))
    return out


def cost_view(rows: Sequence[CostRow], network: str) -> TableView:
    """One of the paper's two cost tables beside what was measured."""
    number = table_number(network)
    columns = ["method", "data", "paper", "MP-SPDZ here, explicit", "ours, explicit"]
    columns += ["ours, secret weights", "ours, open weights", "paper : ours"]
    out = TableView(f"Table {number}: {paper_table(number).caption}", columns, [])
    for row in rows:
        if row.network != network:
            continue
        cells = [
            NOT_RUN if f is None else f"{f.seconds:.3g} s, {f.megabytes:,.4g} MB"
            for f in (row.paper, row.mpspdz, row.ours_explicit, row.ours, row.ours_open)
        ]
        ratio = "–" if row.best is None else ", ".join(row.ratios)
        out.rows.append(("", [row.protocol, f"{row.data}, {row.pretraining}", *cells, ratio]))
    return out


class _Figures:
    """Accuracies in per cent by seed of the lines of one data set, for (source, method, setting, variant, ε)."""

    def __init__(self, lines: Sequence[Line], results: Results) -> None:
        self._values: dict[tuple[Any, ...], dict[int, float]] = {}
        self._means: dict[tuple[Any, ...], float] = {}
        for line in lines:
            for entry in line.entries:
                key = (line.source, line.method, line.setting, line.variant, entry.epsilon)
                runs = {cell.seed: results.get(cell) for cell in entry.cells}
                own = {seed: 100 * run["accuracy"] for seed, run in runs.items() if isinstance(run, dict)}
                self._values[key] = own if entry.paper is None else {0: entry.paper}
                if entry.paper is not None:
                    self._means[key] = entry.paper
                elif (found := summary(entry, results)) is not None:
                    self._means[key] = found.mean

    def mean(
        self, source: str, method: str, setting: int = 1, variant: str = "", epsilon: float | None = None
    ) -> float | None:
        return self._means.get((source, method, setting, variant, epsilon))

    def gain(self, source: str, setting: int, variant: str, epsilon: float | None) -> str:
        """What GL-BMF gains over G-BMF: mean and standard error over the seeds that both were run with."""
        if (source, "gl_bmf", setting, variant, epsilon) not in self._values:
            return "–"
        frozen = self._values.get((source, "g_bmf", setting, "", epsilon), {})
        joint = self._values.get((source, "gl_bmf", setting, variant, epsilon), {})
        both = [joint[seed] - frozen[seed] for seed in joint if seed in frozen]
        if not both:
            return NOT_RUN
        error = f" ± {np.std(both, ddof=1) / len(both) ** 0.5:.2f}" if len(both) > 1 else ""
        return f"{np.mean(both):+.2f}{error}"


def _lead(figures: _Figures, epsilon: float, where: str) -> list[str]:
    """G-BMF at the smallest ε, and how far it is from the same layer without privacy."""
    out = []
    for setting in (1, 2):
        key = ("g_bmf", setting, "", epsilon)
        paper, ours, printed = (figures.mean(s, *key) for s in ("paper", "ours", "published"))
        if paper is None or ours is None:
            continue
        beside = "" if printed is None else f" (the paper prints {printed:.1f} %)"
        out.append(
            f"{where}, G-BMF, Setting {setting}, ε = {epsilon:g}: {paper:.1f} % in the paper's settings{beside}, "
            f"{ours:.1f} % in ours: {ours - paper:+.1f} points at the same ε, δ, data and local models."
        )
    plain = figures.mean("ours", "plain")
    if out and plain is not None:
        out.append(
            f"Without privacy (Plain), the same layer on the same features reaches {plain:.1f} % in our settings."
        )
    return out


def _of_data(lines: Sequence[Line]) -> dict[tuple[str, str], list[Line]]:
    """The lines of a table by (data set, pre-training), in their order."""
    out: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        out.setdefault((line.data, line.pretraining), []).append(line)
    return out


def _own_weights(lines: Sequence[Line], results: Results, about_cell: Callable[[Cell], dict[str, Any]]) -> list[str]:
    """Which file the lines of our own network are of: that of the last digest of a cell."""
    cells = (cell for line in lines if line.pretraining == "own" for entry in line.entries for cell in entry.cells)
    files = {
        (about_cell(cell).get("files") or ["unknown"])[-1] for cell in cells if isinstance(results.get(cell), dict)
    }
    return [texts.own_weights(sorted(files))] if files else []


def _adapters(lines: Sequence[Line], results: Results, epsilons: Sequence[float]) -> Section:
    """GL-BMF against G-BMF at the same ε, and why the difference is what it is."""
    section = Section("GL-BMF against G-BMF", [texts.ADAPTERS])
    for (data, pretraining), own in _of_data(lines).items():
        where = DATA_TITLES[data] if pretraining == PRETRAININGS[data][0] else block_title(own[0])
        title = f"Points that GL-BMF gains over G-BMF, same seeds (mean ± standard error): {where}"
        bare = any(line.method == "gl_bmf" and entry.epsilon is None for line in own for entry in line.entries)
        budgets: list[float | None] = [*([None] if bare else []), *epsilons]
        columns = ["settings", "local update", *("no noise" if e is None else f"ε = {e:g}" for e in budgets)]
        gains = TableView(title, columns, [])
        for source, name, setting, variant in _gain_lines(own):
            update = "estimated" if source == "published" else variant
            known = [_Figures(own, results).gain(source, setting, variant, e) for e in budgets]
            if set(known) - {NOT_RUN, "–"}:
                gains.rows.append((source, [name, update, *known]))
        if any(kind != "published" for kind, _ in gains.rows):
            section.tables.append(gains)
    section.tables += _estimates(lines, results)
    return section


def _gain_lines(lines: Sequence[Line]) -> list[tuple[str, str, int, str]]:
    """(source, its name, setting, local update) of every line of the table of gains."""
    out = []
    for source in ("published", *PRESETS):
        if any(line.source == source for line in lines):
            title = "paper" if source == "published" else f"ours, {PRESETS[source].title}"
            for setting in (1, 2):
                for variant in ("released",) if source == "published" else ("released", "estimated"):
                    out.append((source, f"{title}, Setting {setting}", setting, variant))
    return out


def _estimates(lines: Sequence[Line], results: Results) -> list[TableView]:
    """What the estimated per-sample gradients of the first data set are made of in the last step, at both ends of ε."""
    columns = ["settings", "ε", "signal, at most", "deviation of the error", "share of the gradient kept"]
    out = TableView("Per-sample gradients as a client estimates them (norms of a batch, over its size)", columns, [])
    for line in (line for line in next(iter(_of_data(lines).values())) if line.variant == "estimated"):
        for entry in dict.fromkeys((line.entries[0], line.entries[-1])):
            found = next((r for c in entry.cells if isinstance(r := results.get(c), dict) and "estimate" in r), None)
            name, budget = f"{PRESETS[line.source].title}, Setting {line.setting}", f"{entry.epsilon:g}"
            if found is not None:
                parts = found["estimate"]
                figures = [f"{parts['signal']:.2g}", f"{parts['error']:.2g}", f"{parts['kept']:.1e}"]
                out.rows.append((line.source, [name, budget, *figures]))
    return [out] if out.rows else []


def preset_table() -> TableView:
    """What differs between the presets, as the report shows it."""

    def describe(preset: Preset) -> list[str]:
        t = preset.training
        projected = f", {preset.projection} public directions a client" if preset.projection else ""
        return [
            preset.features + projected,
            str(preset.ldp_projection or "all"),
            "none that acts" if preset.row_rule == "clip" else f"every row to norm {preset.row_bound:g}",
            str(t.batch_size),
            f"{t.clip_norm:g}",
            f"{t.learning_rate:g} / {t.learning_rate * preset.momentum_rate:g}",
            t.schedule,
            t.factorisation.upper(),
            {"joint": "joint, σ²", "distributed": "of each server, 1.5σ² outside"}[t.noise],
        ]

    names = [
        "embeddings",
        "LDP: directions a client",
        "row bound",
        "batch size",
        "γ",
        "η, Setting 1 / 2",
        "schedule of η",
        "factorisation",
        "noise",
    ]
    shown = {p.title: p for p in PRESETS.values()} | {f"{p.title}, 100 epochs": p for p in LONG.values()}
    rows = zip(names, *map(describe, shown.values()), strict=True)
    columns = ["option", *shown]
    return TableView("The two presets", columns, [("", list(row)) for row in rows], words=True)


def _search(file: Path) -> dict[str, Any]:
    """What ``bench.paper choose`` has stored; empty without it."""
    stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return stored


def _choice(file: Path) -> Section:
    section = Section("How our settings were chosen", [texts.CHOICE], [preset_table()])
    stored = _search(file) or {"trials": []}
    if not stored["trials"]:
        return section
    columns = ["option", "value", *(f"ε = {e:g}" for e in stored["epsilons"]), "chosen"]
    # "kept" marks the best so far; the last one of an option was chosen
    chosen = {trial["option"]: index for index, trial in enumerate(stored["trials"]) if trial["kept"]}
    search = TableView("The search on the stand-in: test accuracy (%)", columns, [], folded=True)
    for index, trial in enumerate(stored["trials"]):
        best = index == chosen.get(trial["option"])
        figures = [f"{100 * a:.1f}" for a in trial["accuracies"]]
        row = [trial["option"], str(trial["value"]), *figures, "yes" if best else ""]
        search.rows.append(("ours" if best else "", row))
    section.tables.append(search)
    return section


def _costs(file: Path | None) -> Section:
    section = Section("Cost of a batch over LAN and WAN")
    if file is None or not file.exists():
        section.paragraphs.append("Not in this report: `python -m bench.paper cost --json > FILE`, then `--cost FILE`.")
        return section
    rows, about = load_costs(file)
    section.paragraphs.append(
        f"Measured on {about['processor']}, {about['cores']} cores, load {about['load before the run']}, "
        f"{about['date']}; ours with noise."
    )
    picture = plots.plot_costs(rows)
    if picture:
        section.pictures.append((picture, f"{rows[0].data}, {rows[0].pretraining}, one batch of 128."))
    section.tables += [cost_view(rows, network) for network in dict.fromkeys(row.network for row in rows)]
    return section


def compose(
    layouts: Mapping[int, Sequence[Line]],
    results: Results,
    facts: list[tuple[str, str]],
    *,
    cost_file: Path | None,
    choice: Path,
    secure: Sequence[Cell] = (),
    num_samples: int | None = None,
    about_cell: Callable[[Cell], dict[str, Any]] = lambda cell: {},
) -> Report:
    """All sections for the tables asked for. ``about_cell``: what the JSON says about a result beside it."""
    sections: list[Section] = []
    lead: list[str] = []
    for number in sorted((n for n, lines in layouts.items() if lines), key=list(_TITLES).index):
        lines = layouts[number]
        section = Section(_TITLES[number], tables=[view(number, lines, results)])
        section.tables[0].notes += _own_weights(lines, results, about_cell)
        sections.append(section)
        epsilons = sorted({e.epsilon for line in lines for e in line.entries if e.epsilon is not None})
        if number == 4:
            section.paragraphs.append(texts.ATTACK)
            if roc := plots.plot_roc(lines, results):
                section.pictures.append((roc, "ROC of P-Attack, one seed. Solid: the paper's settings; dashed: ours."))
        elif number in (3, 9):
            section.paragraphs.append(texts.BASELINES)
        elif number in (1, 7) and epsilons:
            figures = _Figures(next(iter(_of_data(lines).values())), results)
            lead += _lead(figures, epsilons[0], f"{paper_table(number).epochs} epochs")
            if picture := plots.plot_accuracy(lines, results, NUM_CLASSES[lines[0].data]):
                section.pictures.append((picture, "Accuracy against ε; bars are one standard deviation over seeds."))
            if any(line.method == "gl_bmf" for line in lines):
                adapters = _adapters(lines, results, epsilons)
                if number != 1 and 1 in layouts:  # said once
                    adapters.title, adapters.paragraphs = f"{adapters.title}, {paper_table(number).epochs} epochs", []
                sections += [adapters] if adapters.tables or adapters.paragraphs else []
        if number == 1:
            sections.append(_choice(choice))
            if num_samples and epsilons:
                sections[-1].pictures.append((plots.plot_noise(num_samples, epsilons), texts.NOISE))
    sections.append(_costs(cost_file))
    if secure:
        sections.append(Section("Trained by three servers", [texts.SECURE], [secure_view(secure, results)]))
    sections.append(Section("Not run", tables=[missing_view(layouts, results)]))
    cells = [{**asdict(cell), **about_cell(cell), "result": result} for cell, result in results.items()]
    return Report("The paper's tables, and ours beside them", lead, facts, sections, cells, _search(choice))
