"""All methods side by side on an embedded data set: ``python -m bench.demo``.

Plaintext twins of the protocols and the paper's baselines, at ε = 1 and 8 (change with --epsilon), one table
and one picture. Nothing is downloaded. The baselines need torch; without it they are left out and said so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from accel.files import write_text
from accel.validate import require_integer
from vfl.data.sets import VerticalData, load_data
from vfl.federation import Federation, build_federation
from vfl.local.client import LocalUpdate
from vfl.progress import progress_bar
from vfl.training import SETTINGS, TrainingConfig
from vfl.twins import train_g_bmf, train_g_shuff, train_gl_bmf, train_gl_sub, train_ldp_g, train_ldp_gl, train_plain

__all__ = ["Outcome", "main", "run_demo"]


@dataclass(frozen=True)
class Outcome:
    """One method at one ε, averaged over seeds; ``epsilon`` is None without privacy."""

    method: str
    epsilon: float | None
    accuracies: tuple[float, ...]
    seconds: float
    claimed_epsilon: float | None
    covers: str
    proven: bool
    proven_epsilon: float | None  # None: no ε is proven
    presumes: str

    @property
    def accuracy(self) -> float:
        return float(np.mean(self.accuracies))

    def summary(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "epsilon": self.epsilon,
            "test_accuracy": self.accuracy,
            "runs": list(self.accuracies),
            "seconds": self.seconds,
            "claimed_epsilon": self.claimed_epsilon,
            "covers": self.covers,
            "proven": self.proven,
            "proven_epsilon": self.proven_epsilon,
            "claimed_epsilon_presumes": self.presumes,
        }


Run = Callable[[float, int], Any]


def _methods(data: VerticalData, config: TrainingConfig) -> list[tuple[str, Run, bool]]:
    """(name, run(ε, seed), needs ε) for every method."""
    frozen = build_federation(data, progress=False)

    def adapted(kind: str) -> Federation:
        update = LocalUpdate(kind=kind, learning_rate=0.2 if kind == "released" else 0.02)
        return build_federation(data, lora=True, update=update, progress=False)

    released, estimated = adapted("released"), adapted("estimated")
    momentum = config.with_(learning_rate=config.learning_rate / 10, **SETTINGS[2])
    gentle = config.with_(learning_rate=config.learning_rate / 4)

    def twin(train: Callable[..., Any], federation: Federation, options: TrainingConfig) -> Run:
        return lambda epsilon, seed: train(federation, options.with_(epsilon=epsilon, seed=seed))

    methods: list[tuple[str, Run, bool]] = [
        ("Plain, frozen", lambda e, s: train_plain(frozen, config.with_(seed=s)), False),
        (
            "Plain, LoRA",
            lambda e, s: train_plain(released, config.with_(seed=s), local_training="lora"),
            False,
        ),
        ("G-Shuff, paper's ε", twin(train_g_shuff, frozen, config.with_(accounting="paper")), True),
        ("G-Shuff, proven ε", twin(train_g_shuff, frozen, config.with_(accounting="proven")), True),
        ("G-BMF setting 1", twin(train_g_bmf, frozen, config), True),
        ("G-BMF setting 2", twin(train_g_bmf, frozen, momentum), True),
        ("GL-BMF released", twin(train_gl_bmf, released, config), True),
        ("GL-BMF estimated", twin(train_gl_bmf, estimated, config), True),
        ("GL-Sub", twin(train_gl_sub, released, config), True),
        ("LDP-G", twin(train_ldp_g, frozen, gentle), True),
        ("LDP-GL", twin(train_ldp_gl, released, gentle), True),
    ]
    if importlib.util.find_spec("torch") is None:
        return methods
    from vfl.baselines import (
        BaselineConfig,
        train_ada_vfed,
        train_admm,
        train_fedbcd,
        train_split_learning,
    )
    from vfl.local.config import LocalModelConfig

    local = LocalModelConfig("mlp", output_width=16, hidden=64)

    def baseline(train: Callable[..., Any], learning_rate: float, server_learning_rate: float) -> Run:
        def run(epsilon: float, seed: int) -> Any:
            options = BaselineConfig(
                epochs=min(5, config.epochs),
                batch_size=config.batch_size,
                delta=config.delta,
                epsilon=epsilon,
                learning_rate=learning_rate,
                server_learning_rate=server_learning_rate,
                seed=seed,
            )
            return train(data, options, local)

        return run

    full = BaselineConfig(
        epochs=20, batch_size=config.batch_size, epsilon=None, learning_rate=0.5, server_learning_rate=1.0
    )
    methods.insert(
        2,
        (
            "Plain, full local",
            lambda e, s: train_split_learning(data, replace(full, seed=s), local),
            False,
        ),
    )
    return [
        *methods,
        ("Split learning", baseline(train_split_learning, 1.0, 0.02), True),
        ("FedBCD", baseline(train_fedbcd, 1.0, 0.02), True),
        ("ADMM", baseline(train_admm, 0.5, 0.02), True),
        ("Ada-VFed (rebuilt)", baseline(train_ada_vfed, 1.0, 0.02), True),
    ]


def run_demo(
    data: VerticalData,
    config: TrainingConfig,
    epsilons: Sequence[float],
    *,
    seeds: int = 3,
    progress: bool = True,
) -> list[Outcome]:
    """Run every method for every ε and ``seeds`` seeds."""
    require_integer("seeds", seeds, 1)
    methods = _methods(data, config)
    outcomes: list[Outcome] = []
    total = sum(len(epsilons) if private else 1 for _, _, private in methods) * seeds
    with progress_bar("training", total, progress) as advance:
        for name, run, private in methods:
            for epsilon in epsilons if private else [None]:
                started, accuracies, claim = time.perf_counter(), [], None
                for seed in range(seeds):
                    result = run(epsilon or 1.0, seed)
                    accuracies.append(result.test_accuracy)
                    plan = getattr(result, "plan", None)
                    claim = plan.claim if plan is not None else getattr(result, "claim", None)
                    advance(1)
                outcomes.append(
                    Outcome(
                        name,
                        epsilon,
                        tuple(accuracies),
                        (time.perf_counter() - started) / seeds,
                        None if claim is None else claim.epsilon,
                        "nothing" if claim is None else _short(claim.covers),
                        claim is not None and claim.proven,
                        None if claim is None else claim.proven_epsilon,
                        "" if claim is None else claim.unproven_because,
                    )
                )
    return outcomes


def _short(covers: str) -> str:
    return "features" if covers.startswith("the features") else covers.replace(" and ", ", ").replace(" only", "")


def plot_outcomes(outcomes: Sequence[Outcome], epsilons: Sequence[float], title: str, path: Path) -> None:
    """Accuracy by method, one bar per ε, spread over seeds as error bars."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(o.method for o in outcomes))
    figure, axes = plt.subplots(figsize=(8.6, 0.42 * len(names) + 1.6), layout="constrained")
    height = 0.8 / max(1, len(epsilons))
    labelled: set[str] = set()
    for o in outcomes:
        row = len(names) - 1 - names.index(o.method)
        at = 0.0 if o.epsilon is None else (0.5 * (len(epsilons) - 1) - list(epsilons).index(o.epsilon)) * height
        colour = "0.6" if o.epsilon is None else f"C{list(epsilons).index(o.epsilon)}"
        label = "no privacy" if o.epsilon is None else f"ε = {o.epsilon:g}"
        axes.barh(
            row + at,
            100 * o.accuracy,
            height=height if o.epsilon is not None else 0.5,
            color=colour,
            xerr=100 * float(np.std(o.accuracies)),
            error_kw={"lw": 1},
            label=None if label in labelled else label,
        )
        labelled.add(label)
    unproven = {o.method for o in outcomes if o.presumes}
    axes.set_yticks(range(len(names)), [f"{name} †" if name in unproven else name for name in names[::-1]])
    axes.set_xlabel("test accuracy in %; †: this ε is not proven for the run")
    axes.set_xlim(0, 100)
    axes.set_title(title)
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=1 + len(epsilons), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of the demonstration."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="digits", choices=("digits", "breast_cancer"))
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 8.0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, help="default 128, or a quarter of the rows if those are few")
    parser.add_argument("--learning-rate", type=float, default=2.0)
    parser.add_argument("--seeds", type=int, default=3, help="runs per figure, averaged")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for picture and JSON")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    # dp_accounting warns while it searches for σ; the result is checked, the search is not news.
    logging.getLogger("absl").setLevel(logging.ERROR)
    if importlib.util.find_spec("torch") is not None:
        import torch

        # The baselines' matrices are small: a second thread only waits for the first.
        torch.set_num_threads(1)
    data = load_data(options.data, num_clients=options.clients)
    config = TrainingConfig(
        epochs=options.epochs,
        batch_size=options.batch_size or min(128, data.num_samples // 4),
        learning_rate=options.learning_rate,
    )
    started = time.perf_counter()
    outcomes = run_demo(data, config, options.epsilon, seeds=options.seeds, progress=not options.json)
    seconds = time.perf_counter() - started
    title = f"{options.data}, {options.clients} clients, {data.num_samples} people, {options.seeds} seeds"
    picture = options.out / f"{options.data}.png"
    plot_outcomes(outcomes, options.epsilon, title, picture)
    rows = [o.summary() for o in outcomes]
    write_text(options.out / f"{options.data}.json", json.dumps(rows, indent=1))
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    console = Console()
    table = Table(title=title)
    for column, side in (("method", "left"), ("ε", "right"), ("accuracy %", "right"), ("ε claimed", "right"),
                         ("for", "left"), ("ε proven", "right"), ("s", "right")):  # fmt: skip
        table.add_column(column, justify=side, no_wrap=column == "method")  # type: ignore[arg-type]
    previous = ""
    for o in outcomes:
        table.add_row(
            o.method if o.method != previous else "",
            "–" if o.epsilon is None else f"{o.epsilon:g}",
            f"{100 * o.accuracy:.1f} ± {100 * float(np.std(o.accuracies)):.1f}",
            "–" if o.claimed_epsilon is None else f"{o.claimed_epsilon:.3g}",
            o.covers,
            "–" if o.epsilon is None else ("none" if o.proven_epsilon is None else f"{o.proven_epsilon:.3g}"),
            f"{o.seconds:.2f}",
        )
        previous = o.method
    console.print(table)
    if importlib.util.find_spec("torch") is None:
        console.print("Baselines left out: they need torch (pip install 'ppvfl[vision]').")
    for because in dict.fromkeys(o.presumes for o in outcomes if o.presumes):
        names = ", ".join(dict.fromkeys(o.method for o in outcomes if o.presumes == because))
        console.print(f"{names}: ε claimed is {because}.")
    console.print(
        "Baselines and LDP cover features only, not labels, and not the clients' own trained models; "
        "Ada-VFed is rebuilt from its abstract; GL-BMF with estimated updates covers labels only, and a "
        "changed label counts twice."
    )
    console.print(f"Picture: {picture}; {seconds:.0f} s in all")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
