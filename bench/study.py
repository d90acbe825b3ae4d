"""Utility study with the plaintext twins: ``python -m bench.study``.

Any data set, any local model, several methods, budgets and seeds; a table next to the paper's figures where
it has them, one PNG, JSON. With real data:

    python -m bench.study --data cifar10 --data-root DIR --local-model resnet18 --local-weights FILE --upscale 4
    python -m bench.study --embeddings FEATURES.npz --last-layer WEIGHTS.pth          # precomputed features
    python -m bench.study --columns bank.csv shop.csv --label-column bought           # your own columns

Accuracy is on test rows, which never train; choosing options by it is tuning and outside every claim.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from accel.files import write_text
from accel.validate import require
from bench.evaluation.paper_tables import paper_accuracy
from vfl.data.columns import load_columns
from vfl.data.embeddings import ClientEmbeddings, apply_last_layer, embed
from vfl.data.sets import DATA_SETS, VerticalData, load_data, load_embeddings
from vfl.dp.factorisation import KINDS
from vfl.federation import Federation, build_federation
from vfl.local.client import LocalUpdate
from vfl.local.config import LOCAL_MODELS, LocalModelConfig
from vfl.training import SETTINGS, TrainingConfig
from vfl.twins import train_g_bmf, train_g_shuff, train_gl_bmf, train_gl_sub, train_ldp_g, train_ldp_gl, train_plain

__all__ = ["BASELINES", "METHODS", "StudyRow", "main", "run_study"]

METHODS: dict[str, Callable[..., Any]] = {
    "plain": train_plain,
    "g_shuff": train_g_shuff,
    "g_bmf": train_g_bmf,
    "gl_bmf": train_gl_bmf,
    "gl_sub": train_gl_sub,
    "ldp_g": train_ldp_g,
    "ldp_gl": train_ldp_gl,
}

BASELINES = {
    "split": "train_split_learning",
    "fedbcd": "train_fedbcd",
    "admm": "train_admm",
    "ada_vfed": "train_ada_vfed",
}


@dataclass(frozen=True)
class StudyRow:
    """One method, setting and ε over all seeds."""

    method: str
    setting: int
    epsilon: float | None
    accuracies: tuple[float, ...]
    seconds: float
    num_steps: int
    clipped_share: float
    claimed_epsilon: float | None
    proven: bool
    proven_epsilon: float | None  # None: no ε is proven
    presumes: str  # what an unproven ε rests on
    paper: float | None

    def summary(self) -> dict[str, Any]:
        return {**self.__dict__, "test_accuracy": float(np.mean(self.accuracies))}


@dataclass(frozen=True)
class BaselineOptions:
    """Options of ``BaselineConfig`` but ε and seed, and the baselines' local model."""

    options: dict[str, Any]
    local_model: LocalModelConfig


def run_study(
    federation: Federation,
    config: TrainingConfig,
    methods: Sequence[str],
    settings: Sequence[int],
    epsilons: Sequence[float],
    *,
    seeds: int = 1,
    paper_key: tuple[str, str] | None = None,
    progress: bool = True,
    report: Callable[[StudyRow], None] = lambda row: None,
) -> list[StudyRow]:
    """Every combination; setting 2 applies to the matrix-factorisation methods only.

    ``report`` is called with each row as it comes.
    """
    rows = []
    for method in methods:
        for setting in settings if method in ("g_bmf", "gl_bmf") else settings[:1]:
            for epsilon in epsilons if method != "plain" else [None]:
                options = config.with_(**SETTINGS[setting])
                if epsilon is not None:
                    options = options.with_(epsilon=epsilon)
                results = []
                for seed in range(seeds):
                    extra = {} if method == "ldp_gl" else {"progress": progress}
                    results.append(METHODS[method](federation, options.with_(seed=config.seed + seed), **extra))
                plan = results[0].plan
                paper = None
                if paper_key is not None and epsilon is not None:
                    paper = paper_accuracy(*paper_key, method, setting, epsilon)
                row = StudyRow(
                    method,
                    setting,
                    epsilon,
                    tuple(r.test_accuracy for r in results),
                    float(np.mean([r.seconds for r in results])),
                    results[0].num_steps,
                    float(np.mean([r.clipped_share for r in results])),
                    None if plan is None else plan.claim.epsilon,
                    plan is not None and plan.claim.proven,
                    None if plan is None else plan.claim.proven_epsilon,
                    "" if plan is None else plan.claim.unproven_because,
                    paper,
                )
                rows.append(row)
                report(row)
    return rows


def run_baselines(
    data: VerticalData,
    config: BaselineOptions,
    methods: Sequence[str],
    epsilons: Sequence[float],
    *,
    seeds: int = 1,
    paper_key: tuple[str, str] | None = None,
    progress: bool = True,
) -> list[StudyRow]:
    """The paper's baselines with example-level DP; the local model is a small MLP on each client's rows."""
    from vfl import baselines

    rows = []
    for method in methods:
        train = getattr(baselines, BASELINES[method])
        for epsilon in epsilons:
            results = []
            for seed in range(seeds):
                options = baselines.BaselineConfig(epsilon=epsilon, seed=seed, **config.options)
                results.append(train(data, options, config.local_model, progress=progress))
            claim = results[0].claim
            rows.append(
                StudyRow(
                    method,
                    1,
                    epsilon,
                    tuple(r.test_accuracy for r in results),
                    float(np.mean([r.seconds for r in results])),
                    config.options["epochs"] * (data.num_samples // config.options["batch_size"]),
                    0.0,
                    claim.epsilon,
                    claim.proven,
                    claim.proven_epsilon,
                    claim.unproven_because,
                    paper_accuracy(*paper_key, method, 1, epsilon) if paper_key else None,
                )
            )
    return rows


def plot_study(rows: Sequence[StudyRow], title: str, path: Path) -> None:
    """Accuracy against ε, one line per method and setting; the paper's points as crosses."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.6, 4.6), layout="constrained")
    groups = dict.fromkeys((r.method, r.setting) for r in rows if r.epsilon is not None)
    for k, (method, setting) in enumerate(groups):
        mine = [r for r in rows if (r.method, r.setting) == (method, setting) and r.epsilon is not None]
        x = [float(r.epsilon or 0) for r in mine]
        y = [100 * float(np.mean(r.accuracies)) for r in mine]
        axes.plot(x, y, "o-", color=f"C{k}", label=f"{method}{' †' if mine[0].presumes else ''}, setting {setting}")
        printed = [(r.epsilon, r.paper) for r in mine if r.paper is not None]
        if printed:
            axes.plot(*zip(*printed, strict=True), "x", color=f"C{k}", label=f"{method}, setting {setting}: paper")
    for r in rows:
        if r.epsilon is None:
            axes.axhline(100 * float(np.mean(r.accuracies)), ls=":", color="grey", label="no privacy")
    axes.set_xscale("log")
    ticks = sorted({r.epsilon for r in rows if r.epsilon is not None})
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.set_xlabel("ε (†: not proven for the run)")
    axes.set_ylabel("test accuracy in %")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="digits", choices=DATA_SETS)
    parser.add_argument("--data-root", help="folder of the data sets (torchvision's root)")
    parser.add_argument("--embeddings", help="precomputed embeddings (.npz) instead of --data")
    parser.add_argument(
        "--columns",
        nargs="+",
        metavar="FILE",
        help="your own data: one file per client, the label client's last",
    )
    parser.add_argument("--id-column", default="id")
    parser.add_argument("--label-column", default="label")
    parser.add_argument("--public-fraction", type=float, help="rows set aside as public (scaling)")
    parser.add_argument("--last-layer", help="weights whose last layer turns 512 features into 1000 logits")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--local-model", default="identity", choices=LOCAL_MODELS)
    parser.add_argument("--local-weights", help="public weights: a file, or 'imagenet'")
    parser.add_argument("--output-width", type=int)
    parser.add_argument("--stem", default="imagenet", choices=("imagenet", "cifar"))
    parser.add_argument("--upscale", type=int, default=1)
    parser.add_argument("--cache", default=".cache/embeddings", help="folder of cached embeddings")
    parser.add_argument(
        "--methods", nargs="+", default=["plain", "g_shuff", "g_bmf"], choices=["all", *METHODS, *BASELINES]
    )
    parser.add_argument("--settings", nargs="+", type=int, default=[1], choices=(1, 2), help="the paper's (α, β)")
    parser.add_argument("--epsilon", nargs="+", type=float, default=[1.0, 8.0])
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=2.0)
    parser.add_argument("--clip-norm", type=float, default=1.0)
    parser.add_argument("--row-bound", default="1.0", help="R, or 'public' (95 %% quantile of public embeddings)")
    parser.add_argument("--row-rule", default="normalise", choices=("normalise", "clip"))
    parser.add_argument("--hidden", default="", help="hidden layers of the global model, e.g. 128,64")
    parser.add_argument("--noise", default="distributed", choices=("distributed", "joint"))
    parser.add_argument("--factorisation", default="bisr", choices=KINDS)
    parser.add_argument("--accounting", default="proven", choices=("proven", "any-order", "paper"), help="G-Shuff only")
    parser.add_argument("--schedule", default="constant", choices=("constant", "linear", "cosine"))
    parser.add_argument("--local-update", default="released", choices=("released", "estimated"), help="GL-BMF only")
    parser.add_argument("--local-learning-rate", type=float, default=0.2, help="GL methods only")
    parser.add_argument("--baseline-epochs", type=int, default=5, help="every epoch is one more release")
    parser.add_argument("--baseline-learning-rate", type=float, default=1.0)
    parser.add_argument("--server-learning-rate", type=float, default=0.02, help="baselines only")
    parser.add_argument("--baseline-width", type=int, default=16, help="output of the baselines' local MLP")
    parser.add_argument("--max-rows", type=int, help="use the first rows only (and a fifth as many test rows)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--paper-column", choices=("imagenet", "cifar100"), help="compare with this column of Table 1")
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    parser.add_argument("--json", action="store_true")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of the study."""
    from rich.console import Console
    from rich.table import Table

    options = _parser().parse_args(arguments)
    if "all" in options.methods:
        options.methods = [*METHODS, *BASELINES]
    logging.getLogger("absl").setLevel(logging.ERROR)
    console = Console(stderr=options.json)
    started = time.perf_counter()
    data, parts = _load(options)
    hidden = tuple(int(w) for w in options.hidden.split(",") if w)
    lora = any(m in ("gl_bmf", "gl_sub", "ldp_gl") for m in options.methods)
    bound: float | str = options.row_bound if options.row_bound == "public" else float(options.row_bound)
    update = LocalUpdate(kind=options.local_update, learning_rate=options.local_learning_rate)
    federation = build_federation(
        data, embeddings=parts, row_bound=bound, row_rule=options.row_rule, lora=lora, update=update,
        seed=options.seed, dtype=options.dtype,
    )  # fmt: skip
    config = TrainingConfig(
        epochs=options.epochs, batch_size=options.batch_size, learning_rate=options.learning_rate,
        clip_norm=options.clip_norm, delta=options.delta, hidden=hidden, factorisation=options.factorisation,
        noise=options.noise, accounting=options.accounting, schedule=options.schedule, dtype=options.dtype,
        seed=options.seed,
    )  # fmt: skip
    cached = ", from the cache" if all(p.from_cache for p in parts) else ""
    if not options.json:
        console.print(
            f"{data.name}: {data.num_samples} people, {data.classes} classes, widths "
            f"{', '.join(str(p.train.shape[1]) for p in parts)}{cached}; "
            f"{time.perf_counter() - started:.1f} s to load"
        )
        for note in federation.notes:
            console.print(f"  {note}")
        console.print(f"  {config.steps(data.num_samples).sentence}")
    key = None
    if options.paper_column:
        key = ("cifar10" if data.name.startswith("cifar10") else data.name, options.paper_column)
    twins = [m for m in options.methods if m in METHODS]
    rows = run_study(
        federation, config, twins, options.settings, options.epsilon, seeds=options.seeds, paper_key=key,
        progress=not options.json,
    )  # fmt: skip
    others = [m for m in options.methods if m in BASELINES]
    if others:
        shared = {
            "epochs": options.baseline_epochs, "batch_size": options.batch_size, "delta": options.delta,
            "learning_rate": options.baseline_learning_rate, "clip_norm": 1.0,
            "server_learning_rate": options.server_learning_rate,
        }  # fmt: skip
        local = LocalModelConfig("mlp", output_width=options.baseline_width)
        ready = replace(
            data, train=tuple(p.train for p in parts), test=tuple(p.test for p in parts), public=None,
            public_labels=None, are_embeddings=True, value_range=None,
        )  # fmt: skip
        rows += run_baselines(
            ready, BaselineOptions(shared, local), others, options.epsilon, seeds=options.seeds,
            paper_key=key, progress=not options.json,
        )  # fmt: skip
    picture = options.out / f"{data.name}.png"
    plot_study(rows, f"{data.name}, {options.epochs} epochs, {options.seeds} seed(s)", picture)
    write_text(options.out / f"{data.name}.json", json.dumps([r.summary() for r in rows], indent=1))
    if options.json:
        print(json.dumps([r.summary() for r in rows], indent=1))
        return 0
    table = Table(title=f"{data.name}, {config.epochs} epochs, γ = {config.clip_norm:g}, η = {config.learning_rate:g}")
    for column in (
        "method",
        "setting",
        "ε",
        "test %",
        "paper %",
        "clipped",
        "ε proven",
        "steps",
        "s",
    ):
        table.add_column(column, justify="left" if column == "method" else "right")
    for r in rows:
        spread = f" ± {100 * float(np.std(r.accuracies)):.1f}" if len(r.accuracies) > 1 else ""
        table.add_row(
            r.method,
            str(r.setting),
            "–" if r.epsilon is None else f"{r.epsilon:g}",
            f"{100 * float(np.mean(r.accuracies)):.2f}{spread}",
            "–" if r.paper is None else f"{r.paper:.2f}",
            f"{r.clipped_share:.0%}",
            "–" if r.epsilon is None else ("none" if r.proven_epsilon is None else f"{r.proven_epsilon:.3g}"),
            str(r.num_steps),
            f"{r.seconds:.1f}",
        )
    console.print(table)
    for because in dict.fromkeys(r.presumes for r in rows if r.presumes):
        names = ", ".join(dict.fromkeys(r.method for r in rows if r.presumes == because))
        console.print(f"{names}: the ε of the row is {because}.")
    console.print(f"Picture: {picture}; {time.perf_counter() - started:.0f} s in all")
    return 0


def _load(options: argparse.Namespace) -> tuple[VerticalData, list[ClientEmbeddings]]:
    keep = any(m in ("gl_bmf", "gl_sub", "ldp_gl") for m in options.methods)
    if options.embeddings:
        data = load_embeddings(options.embeddings, num_clients=options.clients).first_rows(options.max_rows)
        if options.last_layer:
            return data, apply_last_layer(data, options.last_layer, cache_dir=options.cache, keep_blocks=keep)
        return data, embed(data, LocalModelConfig(), keep_blocks=keep)
    require(options.last_layer is None, "last_layer", options.last_layer, "used with --embeddings only")
    if options.columns:
        data, report = load_columns(
            options.columns,
            id_column=options.id_column,
            label_column=options.label_column,
            public_fraction=0.1 if options.public_fraction is None else options.public_fraction,
        )
        print(report, file=sys.stderr)
    else:
        data = load_data(
            options.data,
            num_clients=options.clients,
            data_root=options.data_root,
            public_fraction=options.public_fraction,
            seed=options.seed,
        )
    data = data.first_rows(options.max_rows)
    config = LocalModelConfig(
        options.local_model,
        output_width=options.output_width,
        weights=options.local_weights,
        stem=options.stem,
        upscale=options.upscale,
    )
    return data, embed(
        data,
        config,
        cache_dir=options.cache,
        keep_blocks=keep,
        public_rows=2000 if options.row_bound == "public" else 0,
        progress=not options.json,
    )


if __name__ == "__main__":
    raise SystemExit(main())
