"""G-BMF, G-Shuff and GL-BMF at several ε in one pass: the engine of utility tables.

At another ε the noise of a seed is the same noise, scaled, and the batches are the same. So R runs share every batch
and every noise row. The weights of frozen runs stand side by side in one matrix of R·S columns, about three times
faster than R runs (linear global models only); GL-BMF's runs, whose embeddings differ, go in step and share the noise,
which is half of their work. Each run gives what its own twin gives (a test compares them).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from accel.validate import require, require_choice
from vfl.federation import Federation
from vfl.gradients import GlobalModel, with_ones
from vfl.methods import G_BMF, G_SHUFF, GL_BMF, facts
from vfl.progress import progress_bar
from vfl.run_mechanism import choose_schedule
from vfl.training import TrainingConfig, averaging_share
from vfl.twins.engine import AdapterRun, Optimiser, TwinResult
from vfl.twins.g_shuff import epoch_order
from vfl.twins.gl_bmf import is_estimated, release_size
from vfl.twins.mechanisms import NoisePlan, plan_matrix_factorisation, plan_method
from vfl.twins.noise import filtered_noise

__all__ = ["train_adapters_at_every_epsilon", "train_at_every_epsilon"]

Floats = npt.NDArray[np.floating]


def train_at_every_epsilon(
    method: str,
    federation: Federation,
    config: TrainingConfig,
    epsilons: Sequence[float],
    *,
    plans: Sequence[NoisePlan] = (),
    progress: bool = False,
) -> list[TwinResult]:
    """One result per ε. ``plans``: noise to take in the place of what this federation's own claim needs, one for each
    ε."""
    started = time.perf_counter()
    require_choice("method", method, (G_BMF, G_SHUFF))
    require(not config.hidden, "hidden", config.hidden, "() for several ε at once", "train each ε with its own twin")
    require(len(epsilons) > 0, "epsilons", list(epsilons), "at least one ε")
    require(len(plans) in (0, len(epsilons)), "plans", len(plans), "none, or one for each ε")
    schedule = choose_schedule(method, config, federation.num_samples)
    configs = [config.with_(epsilon=epsilon) for epsilon in epsilons]
    plans = plans or [plan_method(method, each, schedule) for each in configs]
    runs, classes, dtype = len(plans), federation.classes, np.dtype(config.dtype)
    rows = with_ones(federation.rows().astype(dtype, copy=False))
    lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    one_hot = np.eye(classes, dtype=dtype)[federation.labels]
    width = rows.shape[1]
    # with a secret order each ε has its own filter; the same fresh noise goes through all of them
    unit = {
        plan.factorisation.digest: filtered_noise(plan.factorisation, width * classes, 1.0, config.seed, dtype)
        for plan in plans
    }
    filters = [plan.factorisation.digest for plan in plans]
    stds = np.array([plan.std for plan in plans], dtype=dtype)[:, None]
    weights = np.zeros((width, runs * classes), dtype=dtype)
    optimiser, clipped = Optimiser(config, weights), np.zeros(runs)
    averaged = np.zeros_like(weights)
    order: npt.NDArray[np.int64] | None = None
    with progress_bar(f"{method}, {runs} ε", schedule.num_steps, progress) as advance:
        for step in range(schedule.num_steps):
            here: slice | npt.NDArray[np.int64] = schedule.rows(step)
            if method == G_SHUFF or schedule.dummies:
                if step == 0 or (method == G_SHUFF and step % schedule.num_batches == 0):
                    order = epoch_order(config.seed, schedule.epoch(step), schedule.num_rows)
                assert order is not None
                here = schedule.records(step, order)
            x = rows[here]
            delta = _softmax_per_run((x @ weights).reshape(-1, runs, classes)) - one_hot[here][:, None, :]
            norms = lengths[here][:, None] * np.sqrt(np.einsum("jrs,jrs->jr", delta, delta))
            factors = config.clip_norm / np.maximum(norms, config.clip_norm)
            clipped += (factors < 1).mean(axis=0)
            delta *= factors[:, :, None]
            gradient = x.T @ delta.reshape(len(x), -1)
            filtered = {each: noise(step).reshape(width, classes) for each, noise in unit.items()}
            gradient += (np.stack([filtered[each] for each in filters], axis=1) * stds).reshape(width, -1)
            gradient /= dtype.type(schedule.divisor)
            rate = config.learning_rate * config.learning_rate_factor(step, schedule.num_steps)
            step_stds = [plan.step_std(step) / schedule.divisor for plan in plans]
            optimiser.move(weights, gradient, rate, np.repeat(step_stds, classes))
            if share := averaging_share(config.average, step, schedule.num_steps):
                averaged += (weights - averaged) * dtype.type(share)
            advance(1)
    if config.average != "none":
        weights = averaged
    seconds = (time.perf_counter() - started) / runs
    test, name = federation.test_rows().astype(dtype), facts(method).title
    results = []
    for run, (plan, each) in enumerate(zip(plans, configs, strict=True)):
        model = GlobalModel([np.ascontiguousarray(weights[:, run * classes : (run + 1) * classes])])
        accuracy = model.accuracy(test, federation.test_labels)
        results.append(
            TwinResult(
                name, model, accuracy, schedule.num_steps, seconds, plan.about(federation), each, [],
                federation.clients, [schedule.sentence], float(clipped[run] / schedule.num_steps),
            )
        )  # fmt: skip
    return results


def train_adapters_at_every_epsilon(
    federation: Federation, config: TrainingConfig, epsilons: Sequence[float], *, progress: bool = False
) -> list[TwinResult]:
    """GL-BMF, one result per ε."""
    started = time.perf_counter()
    require(len(epsilons) > 0, "epsilons", list(epsilons), "at least one ε")
    estimated = is_estimated(federation)
    schedule = choose_schedule(GL_BMF, config, federation.num_samples)
    configs = [config.with_(epsilon=epsilon) for epsilon in epsilons]
    plans = [plan_matrix_factorisation(each, schedule, labels_only=estimated) for each in configs]
    dtype, steps = np.dtype(config.dtype), schedule.num_steps
    runs = [AdapterRun(federation, each, plan, steps) for each, plan in zip(configs, plans, strict=True)]
    noise = filtered_noise(plans[0].factorisation, release_size(federation, config), 1.0, config.seed, dtype)
    with progress_bar(f"gl_bmf, {len(runs)} ε", steps, progress) as advance:
        for step in range(steps):
            here, unit = schedule.rows(step), noise(step)
            for run, plan in zip(runs, plans, strict=True):
                run.step(step, here, unit * dtype.type(plan.std))
            advance(1)
    seconds = (time.perf_counter() - started) / len(runs)
    name = f"GL-BMF ({'estimated' if estimated else 'released'})"
    return [run.result(name, seconds, []) for run in runs]


def _softmax_per_run(logits: Floats) -> Floats:
    logits -= logits.max(axis=2, keepdims=True)
    np.exp(logits, out=logits)
    logits /= logits.sum(axis=2, keepdims=True)
    return logits
