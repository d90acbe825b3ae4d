"""Utility study with the plaintext twins: ``python -m vfl.study``.

Any data set, any local model, several methods, budgets and seeds; a table next to the paper's figures where
it has them, one PNG, JSON. With real data:

    python -m vfl.study --data cifar10 --data-root DIR --local-model resnet18 --local-weights FILE --upscale 4
    python -m vfl.study --embeddings FEATURES.npz --last-layer WEIGHTS.pth          # precomputed features
    python -m vfl.study --columns bank.csv shop.csv --label-column bought           # your own columns

Accuracy is on test rows, which never train; choosing options by it is tuning and outside every claim.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from accel.validate import require
from vfl.client import LocalUpdate
from vfl.columns import load_columns
from vfl.data import DATA_SETS, VerticalData, load_data, load_embeddings
from vfl.embeddings import ClientEmbeddings, apply_last_layer, embed
from vfl.federation import Federation, build_federation
from vfl.local_config import LOCAL_MODELS, LocalModelConfig
from vfl.twins import (
    SETTINGS,
    TrainingConfig,
    train_g_bmf,
    train_g_shuff,
    train_gl_bmf,
    train_gl_sub,
    train_ldp_g,
    train_ldp_gl,
    train_plain,
)

__all__ = ["METHODS", "PAPER_ACCURACY", "StudyRow", "main", "run_study"]

METHODS: dict[str, Callable[..., Any]] = {
    "plain": train_plain,
    "g_shuff": train_g_shuff,
    "g_bmf": train_g_bmf,
    "gl_bmf": train_gl_bmf,
    "gl_sub": train_gl_sub,
    "ldp_g": train_ldp_g,
    "ldp_gl": train_ldp_gl,
}

# Table 1 of the paper: 20 epochs, B = 128, γ = 1.2, δ = 1e-5, η = 0.01; Pre-ImageNet and Pre-Cifar100.
PAPER_ACCURACY: dict[tuple[str, str, str, int], dict[float, float]] = {
    ("cifar10", "imagenet", "g_shuff", 1): {1: 69.38, 2: 71.78, 5: 73.27, 8: 73.69, 10: 73.76},
    ("cifar10", "imagenet", "g_bmf", 1): {1: 69.25, 2: 70.73, 5: 71.19, 8: 71.22, 10: 71.24},
    ("cifar10", "imagenet", "g_bmf", 2): {1: 51.74, 2: 58.69, 5: 67.29, 8: 70.27, 10: 71.59},
    ("cifar10", "imagenet", "gl_bmf", 1): {1: 69.63, 2: 71.09, 5: 71.48, 8: 71.53, 10: 71.56},
    ("cifar10", "imagenet", "gl_bmf", 2): {1: 54.41, 2: 60.45, 5: 68.19, 8: 71.01, 10: 72.34},
    ("cifar10", "cifar100", "g_shuff", 1): {1: 81.19, 2: 81.51, 5: 81.62, 8: 81.67, 10: 81.69},
    ("cifar10", "cifar100", "g_bmf", 1): {1: 77.22, 2: 77.28, 5: 77.31, 8: 77.34, 10: 77.37},
    ("cifar10", "cifar100", "g_bmf", 2): {1: 72.03, 2: 77.39, 5: 80.68, 8: 81.12, 10: 81.38},
    ("emnist", "imagenet", "g_shuff", 1): {1: 73.96, 2: 76.71, 5: 78.37, 8: 78.94, 10: 79.22},
    ("emnist", "imagenet", "g_bmf", 1): {1: 73.62, 2: 74.53, 5: 74.89, 8: 75.03, 10: 75.05},
    ("emnist", "imagenet", "g_bmf", 2): {1: 73.44, 2: 78.95, 5: 81.48, 8: 81.99, 10: 82.06},
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
    paper: float | None

    def summary(self) -> dict[str, Any]:
        return {**self.__dict__, "test_accuracy": float(np.mean(self.accuracies))}


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
                    results.append(
                        METHODS[method](federation, options.with_(seed=config.seed + seed), **extra)
                    )
                plan = results[0].plan
                paper = None
                if paper_key is not None and epsilon is not None:
                    paper = PAPER_ACCURACY.get((*paper_key, method, setting), {}).get(epsilon)
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
                    paper,
                )
                rows.append(row)
                report(row)
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
        axes.plot(x, y, "o-", color=f"C{k}", label=f"{method}, setting {setting}")
        printed = [(r.epsilon, r.paper) for r in mine if r.paper is not None]
        if printed:
            axes.plot(
                *zip(*printed, strict=True), "x", color=f"C{k}", label=f"{method}, setting {setting}: paper"
            )
    for r in rows:
        if r.epsilon is None:
            axes.axhline(100 * float(np.mean(r.accuracies)), ls=":", color="grey", label="no privacy")
    axes.set_xscale("log")
    ticks = sorted({r.epsilon for r in rows if r.epsilon is not None})
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.set_xlabel("ε")
    axes.set_ylabel("test accuracy in %")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vfl.study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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
    parser.add_argument("--methods", nargs="+", default=["plain", "g_shuff", "g_bmf"], choices=list(METHODS))
    parser.add_argument(
        "--settings", nargs="+", type=int, default=[1], choices=(1, 2), help="the paper's (α, β)"
    )
    parser.add_argument("--epsilon", nargs="+", type=float, default=[1.0, 8.0])
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=2.0)
    parser.add_argument("--clip-norm", type=float, default=1.0)
    parser.add_argument(
        "--row-bound", default="1.0", help="R, or 'public' (95 %% quantile of public embeddings)"
    )
    parser.add_argument("--row-rule", default="normalise", choices=("normalise", "clip"))
    parser.add_argument("--hidden", default="", help="hidden layers of the global model, e.g. 128,64")
    parser.add_argument("--noise", default="distributed", choices=("distributed", "joint"))
    parser.add_argument("--factorisation", default="bisr", choices=("bisr", "bsr", "identity"))
    parser.add_argument("--accounting", default="paper", choices=("paper", "proven"), help="G-Shuff only")
    parser.add_argument("--schedule", default="constant", choices=("constant", "linear", "cosine"))
    parser.add_argument(
        "--local-update", default="released", choices=("released", "estimated"), help="GL-BMF only"
    )
    parser.add_argument("--local-learning-rate", type=float, default=0.2, help="GL methods only")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--paper-column", choices=("imagenet", "cifar100"), help="compare with this column of Table 1"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    parser.add_argument("--json", action="store_true")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of the study."""
    from rich.console import Console
    from rich.table import Table

    options = _parser().parse_args(arguments)
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
    rows = run_study(
        federation, config, options.methods, options.settings, options.epsilon, seeds=options.seeds,
        paper_key=key, progress=not options.json,
    )  # fmt: skip
    picture = options.out / f"{data.name}.png"
    plot_study(rows, f"{data.name}, {options.epochs} epochs, {options.seeds} seed(s)", picture)
    (options.out / f"{data.name}.json").write_text(json.dumps([r.summary() for r in rows], indent=1))
    if options.json:
        print(json.dumps([r.summary() for r in rows], indent=1))
        return 0
    table = Table(
        title=f"{data.name}, {config.epochs} epochs, γ = {config.clip_norm:g}, η = {config.learning_rate:g}"
    )
    for column in (
        "method",
        "setting",
        "ε",
        "accuracy %",
        "paper %",
        "clipped",
        "proven",
        "steps",
        "s per run",
    ):
        table.add_column(column, justify="left" if column in ("method", "proven") else "right")
    for r in rows:
        spread = f" ± {100 * float(np.std(r.accuracies)):.1f}" if len(r.accuracies) > 1 else ""
        table.add_row(
            r.method,
            str(r.setting),
            "–" if r.epsilon is None else f"{r.epsilon:g}",
            f"{100 * float(np.mean(r.accuracies)):.2f}{spread}",
            "–" if r.paper is None else f"{r.paper:.2f}",
            f"{r.clipped_share:.0%}",
            "–" if r.epsilon is None else ("yes" if r.proven else "no"),
            str(r.num_steps),
            f"{r.seconds:.1f}",
        )
    console.print(table)
    console.print(f"Picture: {picture}; {time.perf_counter() - started:.0f} s in all")
    return 0


def _load(options: argparse.Namespace) -> tuple[VerticalData, list[ClientEmbeddings]]:
    keep = any(m in ("gl_bmf", "gl_sub", "ldp_gl") for m in options.methods)
    if options.embeddings:
        data = load_embeddings(options.embeddings, num_clients=options.clients)
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
    config = LocalModelConfig(
        options.local_model,
        output_width=options.output_width,
        weights=options.local_weights,
        stem=options.stem,
        upscale=options.upscale,
    )
    return data, embed(data, config, cache_dir=options.cache, keep_blocks=keep, progress=not options.json)


if __name__ == "__main__":
    raise SystemExit(main())
