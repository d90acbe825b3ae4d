"""How our preset was chosen: ``python -m bench.paper choose --data-root DIR``. Public data only.

The stand-in task is ten superclasses of CIFAR-100 (10,000 rows to train, 2,500 to measure); the projection is fitted
on the other ten, as it will meet classes it has not seen. The private set has five times the rows. A mean gradient
feels noise as std/B, so the stand-in takes a fifth of the batch size and a fifth of the noise that the private run
needs: number of steps, factorisation, sensitivity and noise per mean are then those of the real run, and what is best
here should be best there. ``--order`` and ``--noise`` search at the noise of a secret order, or of joint noise.

Coordinate search from the preset: one option at a time, the best mean over budgets and seeds is kept. The baselines'
learning rates are searched on the same stand-in, so that they are not beaten for want of tuning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from bench.evaluation.cells import train_baseline
from bench.evaluation.presets import BASELINE_RATES, Preset
from bench.evaluation.sources import DataOptions, public_task
from vfl.dp import KINDS, any_order_epsilon, any_order_sigma
from vfl.federation import build_federation
from vfl.run_mechanism import choose_schedule
from vfl.training import AVERAGES, TrainingConfig
from vfl.twins import train_gl_bmf, train_ldp_g
from vfl.twins.mechanisms import NoisePlan, plan_method
from vfl.twins.sweep import train_at_every_epsilon

__all__ = ["OPTIONS", "Trial", "choose", "choose_baseline_rates", "stand_in_accuracy"]

Change = Callable[[Preset, Any], Preset]

SHRINK = 5  # rows of the private set for each row of the stand-in


@dataclass(frozen=True)
class Trial:
    """One option tried: mean accuracy on the stand-in at each ε."""

    option: str
    value: Any
    accuracies: tuple[float, ...]
    kept: bool = False

    @property
    def mean(self) -> float:
        return float(np.mean(self.accuracies))


def _training(name: str) -> Change:
    return lambda preset, value: replace(preset, training=preset.training.with_(**{name: value}))


def _preset(name: str) -> Change:
    return lambda preset, value: replace(preset, **{name: value})


def _rate_for_clip(preset: Preset, value: float) -> Preset:
    """Another γ at the same η·γ: clipped gradients then move the weights as before."""
    old = preset.training
    return replace(preset, training=old.with_(clip_norm=value, learning_rate=old.learning_rate * old.clip_norm / value))


# How an option is changed, the values tried, and the method and setting (β = 0 or 0.9) it is measured with.
OPTIONS: dict[str, tuple[Change, tuple[Any, ...], str, int]] = {
    "projection": (_preset("projection"), (0, 64, 128, 256, 384, 512), "g_bmf", 1),
    "batch_size": (_training("batch_size"), (250, 500, 1000, 2500, 5000), "g_bmf", 1),
    "clip_norm": (_rate_for_clip, (0.125, 0.25, 0.5, 1.0), "g_bmf", 1),
    "learning_rate": (_training("learning_rate"), (2.0, 4.0, 8.0, 16.0, 32.0, 64.0), "g_bmf", 1),
    "schedule": (_training("schedule"), ("constant", "linear", "cosine"), "g_bmf", 1),
    "factorisation": (_training("factorisation"), KINDS, "g_bmf", 1),
    "average": (_training("average"), AVERAGES, "g_bmf", 1),
    "momentum_rate": (_preset("momentum_rate"), (0.05, 0.1, 0.2), "g_bmf", 2),
    "local_rate": (_preset("local_rate"), (0.2, 2.0, 20.0, 200.0), "gl_bmf", 1),
    "ldp_projection": (_preset("ldp_projection"), (16, 32, 64, 128, 256), "ldp_g", 1),
    "ldp_rate": (_preset("ldp_rate"), (0.01, 0.05, 0.25, 0.5), "ldp_g", 1),
}


def stand_in_accuracy(
    preset: Preset,
    data: DataOptions,
    epsilons: Sequence[float],
    *,
    method: str = "g_bmf",
    setting: int = 1,
    epochs: int = 20,
    seeds: int = 2,
) -> tuple[float, ...]:
    """Mean accuracy of a preset on the stand-in, at noise that stands for each ε of the private set."""
    ldp = method == "ldp_g"
    rows, parts = public_task(data, preset.ldp_projection if ldp else preset.projection)
    federation = build_federation(
        rows,
        embeddings=parts,
        row_bound=preset.ldp_bound if ldp else preset.row_bound,
        row_rule=preset.row_rule,
        lora=method == "gl_bmf",
        lora_alpha=preset.lora_alpha,
        update=preset.update("released", setting),
        dtype=np.float32,
    )
    found = []
    for seed in range(seeds):
        private = preset.config(setting, epochs=epochs, seed=seed)
        if method != "g_bmf":
            private = private.with_(order="fixed")  # others have no choice of it
        config = private.with_(batch_size=max(1, min(private.batch_size // SHRINK, federation.num_samples // 4)))
        if ldp:  # noise on each row: it knows no number of rows, and is not scaled
            config = config.with_(learning_rate=config.learning_rate * preset.ldp_rate)
            runs = [train_ldp_g(federation, config.with_(epsilon=e)) for e in epsilons]
        elif method == "gl_bmf":
            runs = [train_gl_bmf(federation, config.with_(epsilon=_weaker(e, config.delta))) for e in epsilons]
        else:
            plans = [_shrunk_plan(method, private.with_(epsilon=e), federation.num_samples) for e in epsilons]
            runs = train_at_every_epsilon(method, federation, config, epsilons, plans=plans)
        found.append([run.test_accuracy for run in runs])
    return tuple(float(a) for a in np.mean(found, axis=0))


def _weaker(epsilon: float, delta: float) -> float:
    """The ε for which a fixed order needs a fifth of the noise."""
    return any_order_epsilon(any_order_sigma(epsilon, delta, 1) / SHRINK, delta, 1)


def _shrunk_plan(method: str, private: TrainingConfig, rows: int) -> NoisePlan:
    """The mechanism of the private run, which has five times the rows, at a fifth of its noise."""
    plan = plan_method(method, private, choose_schedule(method, private, SHRINK * rows))
    return replace(plan, std=plan.std / SHRINK)


def _at(name: str, epochs: int) -> str:
    """The option as the report names it: the presets are for 20 epochs unless something else is said."""
    return name if epochs == 20 else f"{name}, {epochs} epochs"


def choose(
    start: Preset,
    data: DataOptions,
    epsilons: Sequence[float] = (1.0, 8.0),
    *,
    options: Sequence[str] = tuple(OPTIONS),
    epochs: int = 20,
    seeds: int = 2,
    report: Callable[[Trial], None] = lambda trial: None,
) -> Preset:
    """Coordinate search over ``OPTIONS`` in order, from ``start``."""
    best = start
    for name in options:
        change, values, method, setting = OPTIONS[name]
        base, score = best, -1.0
        for value in values:
            tried = change(base, value)
            accuracies = stand_in_accuracy(
                tried, data, epsilons, method=method, setting=setting, epochs=epochs, seeds=seeds
            )
            kept = float(np.mean(accuracies)) > score
            if kept:
                best, score = tried, float(np.mean(accuracies))
            report(Trial(_at(name, epochs), value, accuracies, kept))
    return best


# Rates tried for each baseline: those of a client, those of the server.
_RATES = {
    "admm": ((1.0, 5.0, 20.0), (0.001, 0.005)),
    "fedbcd": ((5.0, 20.0, 80.0), (0.0005, 0.002)),
    "split": ((5.0, 20.0, 80.0), (0.0005, 0.002)),
    "ada_vfed": ((0.005, 0.05, 0.5), (0.00005, 0.0005, 0.005)),
}


def choose_baseline_rates(
    method: str,
    data: DataOptions,
    epsilons: Sequence[float] = (1.0, 8.0),
    *,
    epochs: int = 20,
    seeds: int = 1,
    report: Callable[[Trial], None] = lambda trial: None,
) -> tuple[float, float]:
    """The pair of rates with the best mean on the stand-in; noise on each row knows no number of rows, so ε is ε."""
    rows, _ = public_task(data, 0)
    best, score = BASELINE_RATES[method], -1.0
    for rates in product(*_RATES[method]):
        accuracies = tuple(
            float(
                np.mean(
                    [train_baseline(method, rows, e, epochs, 2.0, seed, rates).test_accuracy for seed in range(seeds)]
                )
            )
            for e in epsilons
        )
        kept = float(np.mean(accuracies)) > score
        if kept:
            best, score = rates, float(np.mean(accuracies))
        report(Trial(_at(f"{method} rates", epochs), f"{rates[0]:g}, {rates[1]:g}", accuracies, kept))
    return best
