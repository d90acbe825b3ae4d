"""From results to the report: which sections, which sentences, which figures are set against each other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bench.evaluation import plots
from bench.evaluation.cells import Cell
from bench.evaluation.cost import CostRow, load_costs, table_number
from bench.evaluation.presets import PRESETS, Preset
from bench.evaluation.report import Report, Section
from bench.evaluation.tables import Line, Results, TableView, measured, view
from vfl.paper_tables import METHOD_NAMES, paper_table

__all__ = ["compose", "cost_view", "secure_cells", "secure_view"]

_TITLES = {
    1: "Utility after 20 epochs",
    7: "Utility after 100 epochs",
    2: "Local differential privacy",
    3: "Baselines",
    9: "GL-Sub",
    4: "Membership inference",
}


def secure_cells(data: str, pretraining: str) -> list[Cell]:
    """The handful that three real servers train: every protocol on the embedded digits, G-BMF on real embeddings."""
    small = [
        Cell("secure", "digits", "none", "ours", method, setting, variant, 8.0, 2, 0)
        for method, setting, variant in (
            ("g_shuff", 1, ""), ("g_bmf", 1, ""), ("g_bmf", 2, ""), ("gl_bmf", 1, "released"), ("gl_bmf", 1, "estimated")
        )
    ]  # fmt: skip
    if data == "digits":
        return small
    return [*small, *(Cell("secure", data, pretraining, "ours", "g_bmf", 1, "", e, 1, 0) for e in (1.0, 8.0))]


def secure_view(cells: Sequence[Cell], results: Results) -> TableView:
    """Accuracy of the released model beside its twin's."""
    columns = ["method", "data", "ε", "epochs", "steps", "three servers %", "twin %", "MB sent", "rounds", "s"]
    out = TableView("Trained by three servers, and by the plaintext twin", columns, [])
    for cell in cells:
        found = results.get(cell)
        variant = f", {cell.variant}" if cell.variant else ""
        start = [
            f"{METHOD_NAMES[cell.method]} (Setting {cell.setting}{variant})",
            cell.data,
            f"{cell.epsilon:g}",
            str(cell.epochs),
        ]
        if not isinstance(found, dict):
            out.rows.append(("ours", [*start, *["not run"] * 6]))
            continue
        out.rows.append(
            ("ours", [*start, str(found["steps"]), f"{100 * found['accuracy']:.2f}", f"{100 * found['twin_accuracy']:.2f}",
                      f"{found['megabytes']:.1f}", f"{found['rounds']:,}", f"{found['run_seconds']:.1f}"])
        )  # fmt: skip
    return out


def cost_view(rows: Sequence[CostRow], network: str) -> TableView:
    """One of the paper's two cost tables beside what was measured."""
    number = table_number(network)
    columns = ["method", "data", "paper", "MP-SPDZ here, explicit", "ours, explicit", "ours, factored", "paper : ours"]
    out = TableView(f"Table {number}: {paper_table(number).caption}", columns, [])
    for row in rows:
        if row.network != network:
            continue
        cells = [
            "not run" if f is None else f"{f.seconds:.3g} s, {f.megabytes:,.4g} MB"
            for f in (row.paper, row.mpspdz, row.ours_explicit, row.ours)
        ]
        ratio = "–"
        if row.ours is not None:
            ratio = f"{row.paper.seconds / row.ours.seconds:.0f}, {row.paper.megabytes / row.ours.megabytes:.0f}"
        out.rows.append(("ours", [row.protocol, f"{row.data}, {row.pretraining}", *cells, ratio]))
    return out


class _Figures:
    """Means over seeds of the first data set, in per cent, by (source, method, setting, variant, ε)."""

    def __init__(self, lines: Sequence[Line], results: Results, what: str = "accuracy") -> None:
        self._values: dict[tuple[str, str, int, str, float | None], list[float]] = {}
        for line in lines:
            if (line.data, line.pretraining) != (lines[0].data, lines[0].pretraining):
                continue
            for entry in line.entries:
                key = (line.source, line.method, line.setting, line.variant, entry.epsilon)
                self._values[key] = measured(entry, results, what)

    def mean(
        self, source: str, method: str, setting: int = 1, variant: str = "", epsilon: float | None = None
    ) -> float | None:
        values = self._values.get((source, method, setting, variant, epsilon))
        return float(np.mean(values)) if values else None

    def gain(self, first: tuple[Any, ...], second: tuple[Any, ...]) -> float | None:
        """second − first in points."""
        a, b = self.mean(*first), self.mean(*second)
        return None if a is None or b is None else 100 * (b - a)


def _lead(figures: _Figures, epsilons: Sequence[float]) -> list[str]:
    out = []
    for setting in (1, 2):
        e = min(epsilons, default=1.0)
        a, b = figures.mean("paper", "g_bmf", setting, "", e), figures.mean("ours", "g_bmf", setting, "", e)
        if a is not None and b is not None:
            out.append(
                f"G-BMF, Setting {setting}, ε = {e:g}: {100 * a:.1f} % with the paper's settings, {100 * b:.1f} % with ours, "
                f"{100 * (b - a):+.1f} points at the same ε and δ."
            )
    return out


def _adapters(figures: _Figures, epsilons: Sequence[float]) -> list[str]:
    """GL-BMF against G-BMF at the same ε, and why the difference is what it is."""
    rows = []
    for preset in PRESETS:
        for setting in (1, 2):
            for variant in ("released", "estimated"):
                gains = [
                    (e, figures.gain((preset, "g_bmf", setting, "", e), (preset, "gl_bmf", setting, variant, e)))
                    for e in epsilons
                ]
                known = [f"{g:+.2f} at ε = {e:g}" for e, g in gains if g is not None]
                if known:
                    rows.append(f"{PRESETS[preset].title}, Setting {setting}, {variant}: {', '.join(known)}")
    if not rows:
        return ["GL-BMF was not run."]
    return [
        "Points of accuracy that GL-BMF gains over G-BMF at the same ε: " + "; ".join(rows) + ".",
        "The paper finds +0.2 to +2.7. With precomputed features LoRA reads one block, the penultimate layer, of which the "
        "embedding is an affine image; the global layer is linear in the embedding, so adapters add no function that the "
        "global layer cannot represent, and a gain can only come from a better path of the optimisation. Against it stand "
        "the clip, which now runs over the global gradient and all layer gradients together, and the step of the layers: "
        "U starts at zero and receives s·W_i·δ·aᵀ with s = 1/8 and η_i = 0.001. Earlier blocks carry information that the "
        "embedding has lost; `--from-images` runs the networks over the images and gives LoRA all eight.",
    ]


def _preset_table() -> TableView:
    def describe(p: Preset) -> list[str]:
        t = p.training
        noise = {"joint": "joint, σ²", "distributed": "of each server, 1.5σ² outside"}[t.noise]
        kept = f"{p.features}, {p.projection} public directions a client" if p.projection else p.features
        rule = "none that acts" if p.row_rule == "clip" else f"every row to norm {p.row_bound:g}"
        return [kept, rule, str(t.batch_size), f"{t.clip_norm:g}", f"{t.learning_rate:g} / {t.learning_rate * p.momentum_rate:g}",
                t.schedule, t.factorisation.upper(), noise]  # fmt: skip

    names = [
        "embeddings",
        "row bound",
        "batch size",
        "γ",
        "η (Setting 1 / 2)",
        "schedule of η",
        "factorisation",
        "noise",
    ]
    rows = zip(names, *(describe(p) for p in PRESETS.values()), strict=True)
    return TableView(
        "The two presets", ["option", *(p.title for p in PRESETS.values())], [("", list(r)) for r in rows], words=True
    )


def _choice_section(choice: Path) -> Section:
    section = Section(
        "How our settings were chosen",
        [
            "On public data only: ten superclasses of CIFAR-100 stand in for the private task, the projection is fitted on the "
            "other ten, and noise and batch are scaled so that a mean gradient is as noisy as in the real run. Each option was "
            "varied with the others fixed, the best mean over ε = 1 and 8 kept. No private row, train or test, took part. "
            "`python -m bench.paper choose --data-root DIR` repeats it."
        ],
        [_preset_table()],
    )
    if choice.exists():
        stored = json.loads(choice.read_text(encoding="utf-8"))
        columns = ["option", "value", *(f"ε = {e:g}" for e in stored["epsilons"]), "chosen"]
        # "kept" marks the best so far; the last one of an option was chosen
        chosen = {trial["option"]: index for index, trial in enumerate(stored["trials"]) if trial["kept"]}
        rows = []
        for index, trial in enumerate(stored["trials"]):
            best = index == chosen.get(trial["option"])
            figures = [f"{100 * a:.1f}" for a in trial["accuracies"]]
            rows.append(
                ("ours" if best else "", [trial["option"], str(trial["value"]), *figures, "yes" if best else ""])
            )
        section.tables.append(TableView("The search on the stand-in: test accuracy (%)", columns, rows))
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
) -> Report:
    """All sections for the tables asked for."""
    sections, lead = [], []
    for number in sorted(layouts, key=list(_TITLES).index):
        lines = layouts[number]
        if not lines:
            continue
        section = Section(_TITLES[number], tables=[view(number, lines, results)])
        epsilons = sorted({e.epsilon for line in lines for e in line.entries if e.epsilon is not None})
        if number in (1, 7):
            figures = _Figures(lines, results)
            lead += [f"{s[:-1]} ({_TITLES[number].lower()})." for s in _lead(figures, epsilons)]
            picture = plots.plot_accuracy(lines, results)
            if picture:
                section.pictures.append((picture, "Accuracy against ε; bars are one standard deviation over seeds."))
            sections.append(section)
            if any(line.method == "gl_bmf" for line in lines):
                sections.append(
                    Section(f"GL-BMF against G-BMF, {paper_table(number).epochs} epochs", _adapters(figures, epsilons))
                )
            if number == 1:
                sections.append(_choice_section(choice))
                if num_samples:
                    svg = plots.plot_noise(num_samples, epsilons)
                    sections[-1].pictures.append(
                        (
                            svg,
                            "Noise in one coordinate of the last iterate, over the largest signal the clip allows; both presets, 20 epochs.",
                        )
                    )
            continue
        if number == 4:
            section.paragraphs.append(
                "The target trains on a random half of the rows; the other half are non-members, the test rows are the attacker's "
                "population. Plain here trains the global model on frozen local models, without clipping or noise; the paper's "
                "also trains the local models, which memorise more."
            )
            roc = plots.plot_roc(lines, results)
            if roc:
                section.pictures.append((roc, "ROC of P-Attack, one seed. Solid: the paper's settings; dashed: ours."))
        if number in (3, 9):
            section.paragraphs.append(
                "Baselines run at example-level DP: every client, every epoch and both clients together count for one person. "
                "The published codes clip a whole batch and count one client, hence their higher figures; Ada-VFed is rebuilt "
                "from its abstract. Their local model here is an MLP with 60 outputs on the frozen features."
            )
        sections.append(section)
    section = Section("Cost of a batch over LAN and WAN")
    if cost_file is not None and cost_file.exists():
        rows, about = load_costs(cost_file)
        section.paragraphs.append(
            f"Measured on {about['processor']}, {about['cores']} cores, load {about['load before the run']}, {about['date']}; noise included."
        )
        picture = plots.plot_costs(rows)
        if picture:
            section.pictures.append((picture, f"{rows[0].data}, {rows[0].pretraining}, one batch of 128."))
        section.tables += [cost_view(rows, n) for n in dict.fromkeys(row.network for row in rows)]
    else:
        section.paragraphs.append("Not run: `python -m bench.paper cost --json > FILE`, then `--cost FILE`.")
    sections.append(section)
    if secure:
        text = (
            "Three processes over loopback, our settings. The twin gets the servers' own noise, so that the two differ by fixed "
            "point rounding; G-Shuff's secret order lies nowhere, so its twin draws order and noise of its own. All 20 epochs of "
            "CIFAR-10: `python -m protocols.g_bmf --embeddings cifar10_strips_x4.npz --epochs 20 --epsilon 1 --twin`."
        )
        sections.append(Section("Trained by three servers", [text], [secure_view(secure, results)]))
    cells = [{**asdict(cell), "result": result} for cell, result in results.items()]
    return Report("The paper's tables, and ours beside them", lead, facts, sections, cells)
