"""One cell of a table: what is run, and running it. Cells carry their whole configuration, so that a result can be kept
on disk and found again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.evaluation.presets import BASELINE_RATES, Preset, preset_for
from bench.evaluation.sources import DataOptions, load_parts
from vfl.attack import confidences, confidences_of, population_attack
from vfl.data.sets import VerticalData
from vfl.federation import Federation, build_federation
from vfl.local.config import LocalModelConfig
from vfl.training import TrainingConfig
from vfl.twins import TwinResult, train_gl_sub, train_ldp_g, train_ldp_gl, train_plain
from vfl.twins.sweep import train_adapters_at_every_epsilon, train_at_every_epsilon

if TYPE_CHECKING:
    from vfl.baselines import BaselineResult

__all__ = ["JOINT", "RESULTS_VERSION", "SECRET", "Cell", "group_cells", "run_cells", "train_baseline"]

# Raise whenever a change of the code changes a result: kept results of other versions are then ignored.
RESULTS_VERSION = 2

SECRET, JOINT = "secret order", "joint noise"  # variants of G-BMF

_TOGETHER = ("g_bmf", "g_shuff", "gl_bmf")  # all ε of a seed in one pass
_WITH_LORA = ("gl_bmf", "gl_sub", "ldp_gl")
_LDP = ("ldp_g", "ldp_gl")


@dataclass(frozen=True)
class Cell:
    """``variant``: the local update of GL methods (released, estimated), or order and noise of G-BMF if not the
    preset's. ``clip_norm`` None: the preset's own. ``epsilon`` None: without noise, and Plain without clipping too.
    ``kind``: utility (test accuracy), attack (AUC of P-Attack) or secure (real three-party run beside its twin).
    """

    kind: str
    data: str
    pretraining: str
    preset: str
    method: str
    setting: int
    variant: str
    epsilon: float | None
    epochs: int
    seed: int
    clip_norm: float | None = None

    @property
    def name(self) -> str:
        variant = f" {self.variant}" if self.variant else ""
        budget = "" if self.epsilon is None else f" ε={self.epsilon:g}"
        return f"{self.kind} {self.data} {self.preset} {self.method}{variant} s{self.setting}{budget} seed {self.seed}"

    def settings(self) -> str:
        """Hash of the cell, of every option of its preset, and of the code's version: all but the files."""
        return _digest(self._content())

    def key(self, data: DataOptions) -> str:
        """Hash of all that a result depends on: ``settings``, and the files behind its data."""
        return _digest({**self._content(), "data": data.identity(self.data, self.pretraining)})

    def _content(self) -> dict[str, Any]:
        return {
            "version": RESULTS_VERSION,
            "cell": asdict(self),
            "preset": asdict(preset_for(self.preset, self.epochs)),
            "baseline_rates": BASELINE_RATES.get(self.method),
        }


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def group_cells(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Jobs: cells that one pass trains together, in the order in which they first appear."""
    jobs: dict[Cell, list[Cell]] = {}
    for cell in cells:
        together = cell.method in _TOGETHER and cell.kind == "utility" and cell.epsilon is not None
        jobs.setdefault(dataclasses.replace(cell, epsilon=-1.0) if together else cell, []).append(cell)
    return list(jobs.values())


@lru_cache(maxsize=2)
def _federation(
    data: str, pretraining: str, p: Preset, ldp: bool, lora: str, setting: int, seed: int, options: DataOptions
) -> Federation:
    rows, parts = load_parts(data, pretraining, p.features, p.ldp_projection if ldp else p.projection, options)
    return build_federation(
        rows,
        embeddings=parts,
        row_bound=p.ldp_bound if ldp else p.row_bound,
        row_rule=p.row_rule,
        lora=bool(lora),
        lora_alpha=p.lora_alpha,
        update=p.update(lora or "released", setting),
        seed=seed,
        dtype=np.float32,
    )


def federation_of(cell: Cell, options: DataOptions) -> Federation:
    """The cell's clients; those of frozen methods are shared by all seeds."""
    lora = (cell.variant or "released") if cell.method in _WITH_LORA else ""
    setting, seed = (cell.setting, cell.seed) if lora else (1, 0)
    preset = preset_for(cell.preset, cell.epochs)
    return _federation(cell.data, cell.pretraining, preset, cell.method in _LDP, lora, setting, seed, options)


def run_cells(cells: Sequence[Cell], options: DataOptions) -> list[dict[str, Any]]:
    """Results in the order of the cells, plain numbers. Called in a worker: everything it needs is in its arguments."""
    import logging

    logging.getLogger("absl").setLevel(logging.ERROR)  # dp_accounting warns while it searches for σ
    started = time.perf_counter()
    first = cells[0]
    if first.kind == "secure":
        from bench.evaluation.secure import run_secure

        federation = federation_of(first, options)
        results = [run_secure(first, federation, _config(first, federation.num_samples))]
    elif first.kind == "attack":
        results = [_attack(first, federation_of(first, options), options)]
    elif first.method in BASELINE_RATES:
        results = [_baseline(first, options)]
    elif first.method in _TOGETHER and first.epsilon is not None:
        federation = federation_of(first, options)
        epsilons = [cell.epsilon for cell in cells if cell.epsilon is not None]
        runs = _train_together(first, federation, epsilons)
        results = [_summary(run) for run in runs]
    else:
        results = [_summary(_train(first, federation_of(first, options)))]
    seconds = (time.perf_counter() - started) / len(cells)
    return [{**result, "seconds": seconds} for result in results]


def _config(cell: Cell, num_samples: int) -> TrainingConfig:
    preset = preset_for(cell.preset, cell.epochs)
    changes: dict[str, Any] = {"epochs": cell.epochs, "seed": cell.seed}
    if cell.epsilon is not None:
        changes["epsilon"] = cell.epsilon
    if cell.clip_norm is not None and cell.preset == "paper":
        changes["clip_norm"] = cell.clip_norm
    # a set too small for four batches of the preset's size takes four batches
    changes["batch_size"] = min(preset.training.batch_size, max(1, num_samples // 4))
    if SECRET in cell.variant:
        changes["order"] = "secret"
    if JOINT in cell.variant:
        changes["noise"] = "joint"
    config = preset.config(cell.setting, **changes)
    if cell.method in _LDP:
        config = config.with_(learning_rate=config.learning_rate * preset.ldp_rate)
    return config


def _train(cell: Cell, federation: Federation) -> TwinResult:
    config = _config(cell, federation.num_samples)
    if cell.epsilon is None and cell.method != "plain":  # the same steps, clipped, without the noise
        local = "lora" if cell.method in _WITH_LORA else "none"
        return train_plain(federation, config, local_training=local, shuffle=False, clip=True)
    if cell.method in _TOGETHER:
        return _train_together(cell, federation, [config.epsilon])[0]
    if cell.method == "plain":
        return train_plain(federation, config)
    train = {"gl_sub": train_gl_sub, "ldp_g": train_ldp_g, "ldp_gl": train_ldp_gl}
    return train[cell.method](federation, config)  # type: ignore[operator]


def _train_together(cell: Cell, federation: Federation, epsilons: Sequence[float]) -> list[TwinResult]:
    config = _config(cell, federation.num_samples)
    if cell.method == "gl_bmf":
        return train_adapters_at_every_epsilon(federation, config, epsilons)
    return train_at_every_epsilon(cell.method, federation, config, epsilons)


def _summary(run: TwinResult) -> dict[str, Any]:
    plan = run.plan
    out: dict[str, Any] = {"accuracy": run.test_accuracy, "steps": run.num_steps, "clipped": run.clipped_share}
    if plan is not None:
        last = min(run.num_steps, plan.factorisation.num_steps) - 1
        out |= {
            "claimed_epsilon": plan.claim.epsilon,
            "covers": plan.claim.covers,
            "proven": plan.claim.proven,
            "proven_epsilon": plan.claim.proven_epsilon,
            "presumes": plan.claim.unproven_because,
            "noise_multiplier": plan.noise_multiplier,
            "noise_of_mean": plan.step_std(last) / run.config.batch_size,
            "bands": plan.factorisation.bands,
        }
    if run.clients and run.clients[0].estimate_log:
        # of the last step at the first client: the signal's norm at most, the error's deviation, and how much of the
        # released gradient the regularised estimate lets through at best
        record = run.clients[0].estimate_log[-1]
        top = record.error.largest_eigenvalue
        out["estimate"] = {
            "signal": run.config.clip_norm / run.config.batch_size**0.5,
            "error": record.error.variance**0.5,
            "kept": top / (top + record.regularisation),
        }
    return out


def _attack(cell: Cell, federation: Federation, options: DataOptions) -> dict[str, Any]:
    """Train on a random half of the rows; P-Attack with the test rows as population, the other half as non-members."""
    random = np.random.default_rng([cell.seed, 0x617474])
    count = federation.num_samples // 2 * 2
    order = random.permutation(count)
    members, others = order[: count // 2], order[count // 2 :]
    if cell.variant == "full":
        summary, losses, population = _train_fully(cell, members, others, options)
    else:
        run = _train(cell, federation.subset(members))
        summary = _summary(run)
        # the adapters are the trained ones, the rows those of all people
        parts = [
            now.embed_other_rows(whole.embeddings[:count], [x[:count] for x in whole.block_outputs])
            for now, whole in zip(run.clients, federation.clients, strict=True)
        ]
        losses = confidences(run.model, np.concatenate(parts, axis=1), federation.labels[:count])[0][order]
        trained = dataclasses.replace(federation, clients=run.clients)
        population = confidences(run.model, trained.test_rows(), federation.test_labels)[0]
    report = population_attack(losses[: count // 2], losses[count // 2 :], population)
    rates = report.false_positive_rates
    picked = np.unique(np.searchsorted(rates, np.linspace(0, 1, 201)).clip(max=len(rates) - 1))
    roc = np.stack([rates, report.true_positive_rates], axis=1)[picked].round(4)
    return {**summary, "auc": report.auc, "tpr_at_fpr_1_percent": report.tpr_at_fpr_1_percent, "roc": roc.tolist()}


def _train_fully(
    cell: Cell, members: np.ndarray, others: np.ndarray, options: DataOptions
) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """Plain as in the paper, local models trained too: here an MLP at each client. (summary, losses of members and
    others, losses of the population)."""
    import torch

    from vfl.baselines import BaselineConfig, train_split_learning

    torch.set_num_threads(1)
    rows = _feature_data(cell, options)
    everybody = np.concatenate([members, others])
    asked = dataclasses.replace(
        rows,
        train=tuple(a[members] for a in rows.train),
        train_labels=rows.train_labels[members],
        test=tuple(np.concatenate([a[everybody], b]) for a, b in zip(rows.train, rows.test, strict=True)),
        test_labels=np.concatenate([rows.train_labels[everybody], rows.test_labels]),
    )
    config = BaselineConfig(
        epochs=cell.epochs, epsilon=None, learning_rate=0.01, server_learning_rate=0.01, seed=cell.seed
    )
    run = train_split_learning(asked, config, LocalModelConfig("mlp", output_width=60))
    assert run.test_logits is not None
    losses = confidences_of(run.test_logits, asked.test_labels)[0]
    right = run.test_logits.argmax(axis=1) == asked.test_labels
    return {"accuracy": float(right[len(everybody) :].mean())}, losses[: len(everybody)], losses[len(everybody) :]


def _feature_data(cell: Cell, options: DataOptions) -> VerticalData:
    """The clients' frozen features as data, for methods that train local models of their own on them."""
    rows, parts = load_parts(cell.data, cell.pretraining, "penultimate", 0, options)
    return dataclasses.replace(
        rows, train=tuple(p.train for p in parts), test=tuple(p.test for p in parts), public=None, public_labels=None,
        are_embeddings=True, value_range=None,
    )  # fmt: skip


def _baseline(cell: Cell, options: DataOptions) -> dict[str, Any]:
    """One of the paper's baselines on the clients' frozen features."""
    data = _feature_data(cell, options)
    found = train_baseline(
        cell.method, data, cell.epsilon, cell.epochs, cell.clip_norm or 1.0, cell.seed, BASELINE_RATES[cell.method]
    )
    claim = found.claim
    return {
        "accuracy": found.test_accuracy,
        "claimed_epsilon": None if claim is None else claim.epsilon,
        "covers": "nothing" if claim is None else claim.covers,
        "proven": claim is not None and claim.proven,
        "proven_epsilon": None if claim is None else claim.proven_epsilon,
        "presumes": "" if claim is None else claim.unproven_because,
    }


def train_baseline(
    method: str,
    features: VerticalData,
    epsilon: float | None,
    epochs: int,
    clip_norm: float,
    seed: int,
    rates: tuple[float, float],
) -> BaselineResult:
    """One of the paper's baselines, a small trainable MLP of 60 outputs at each client; ``rates``: client's,
    server's."""
    import torch

    from vfl import baselines

    torch.set_num_threads(1)
    train = {
        "admm": baselines.train_admm,
        "fedbcd": baselines.train_fedbcd,
        "split": baselines.train_split_learning,
        "ada_vfed": baselines.train_ada_vfed,
    }[method]
    config = baselines.BaselineConfig(
        epochs=epochs,
        batch_size=min(128, max(1, features.num_samples // 4)),
        clip_norm=clip_norm,
        epsilon=epsilon,
        seed=seed,
        learning_rate=rates[0],
        server_learning_rate=rates[1],
    )
    return train(features, config, LocalModelConfig("mlp", output_width=60))
