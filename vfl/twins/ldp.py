"""LDP-G and LDP-GL: each client noises its own embedding rows before they leave (the paper's local baseline).

Every client clips its rows to R_i and adds N(0, (σ·R_i)²) per coordinate. All N clients' releases concern the
same person, and with local training a row is released once per epoch, so σ is calibrated for
√(clients·releases) participations of sensitivity R_i each (zero-out). Everything after the release is
post-processing, so the global model is trained without clipping or further noise. LDP-GL's clients train on
their raw rows, so a record also moves later releases of other rows: its ε is that of the record's own rows
alone and is not proven for the run. Labels reach the servers
un-noised, as in the paper; ``label_epsilon`` adds k-ary randomised response for them, on top of ε.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from accel.validate import require, require_real
from vfl.data.scaling import bound_rows
from vfl.dp import Claim, any_order_sigma, example_level, ldp_claim, with_delta_checked
from vfl.dp.factorisation import factorise
from vfl.federation import Federation
from vfl.gradients import GlobalModel, clipped_gradient, with_ones
from vfl.training import TrainingConfig
from vfl.twins.engine import TwinResult, start_model, train_frozen
from vfl.twins.mechanisms import NoisePlan
from vfl.twins.noise import no_noise

__all__ = ["ldp_sigma", "noised_rows", "randomised_response", "train_ldp_g", "train_ldp_gl"]

Floats = npt.NDArray[np.floating]


def ldp_sigma(config: TrainingConfig, num_clients: int, releases: int) -> float:
    """Noise multiplier for (ε, δ) over all clients' releases about one person together."""
    config.require_single_rows("LDP")
    return any_order_sigma(config.epsilon, config.delta, num_clients * releases)


def _claim(sigma: float, config: TrainingConfig, federation: Federation, releases: int, frozen: bool) -> Claim:
    bound = max(c.row_bound.norm for c in federation.clients)
    clients = federation.num_clients
    # Headline: everything that concerns one person, which is what σ was calibrated for.
    claim = example_level(ldp_claim(sigma, config.delta, bound, releases, clients, frozen=frozen), clients)
    claim = with_delta_checked(claim, federation.num_samples)
    return dataclasses.replace(claim, row_bound=federation.row_bound)


def noised_rows(federation: Federation, sigma: float, seed: list[int], rows: object = slice(None)) -> Floats:
    """Every client's bounded rows plus its own noise of σ·R_i per coordinate, concatenated."""
    parts = []
    for i, client in enumerate(federation.clients):
        block = client.embedding_rows(rows)  # type: ignore[arg-type]
        random = np.random.default_rng([*seed, i, 0x6C6470])
        parts.append(block + sigma * client.row_bound.norm * random.standard_normal(block.shape))
    return np.concatenate(parts, axis=1)


def randomised_response(
    labels: npt.NDArray[np.int64], classes: int, epsilon: float, seed: int
) -> npt.NDArray[np.int64]:
    """k-ary randomised response: the true label with probability e^ε/(e^ε + k − 1), else a uniform other
    one.
    """
    require_real("label_epsilon", epsilon, 0.0, open_low=True)
    random = np.random.default_rng([seed, 0x7272])
    keep = random.random(len(labels)) < math.exp(epsilon) / (math.exp(epsilon) + classes - 1)
    other = (labels + random.integers(1, classes, len(labels))) % classes
    return np.where(keep, labels, other)


def train_ldp_g(
    federation: Federation,
    config: TrainingConfig,
    *,
    label_epsilon: float | None = None,
    initial: GlobalModel | None = None,
    evaluate_every: int = 0,
    progress: bool = False,
) -> TwinResult:
    """LDP-G: frozen local models, so each row is released once and re-used in every epoch."""
    schedule = config.steps(federation.num_samples)
    sigma = ldp_sigma(config, federation.num_clients, 1)
    # Post-processing: noised rows are brought back to norm R, or the learning rate would depend on the noise.
    rows = bound_rows(noised_rows(federation, sigma, [config.seed]), federation.row_bound, "normalise")
    labels = federation.labels
    if label_epsilon is not None:
        labels = randomised_response(labels, federation.classes, label_epsilon, config.seed)
    size = start_model(federation, config, initial).num_parameters
    result = train_frozen(
        "LDP-G",
        federation,
        config,
        _plan(sigma, config, federation, 1, schedule.num_steps, frozen=True),
        schedule.rows,
        schedule.num_steps,
        no_noise(size, config.dtype),
        clip=False,
        initial=initial,
        embeddings=rows,
        labels=labels,
        evaluate_every=evaluate_every,
        progress=progress,
    )
    result.notes.append(_label_note(label_epsilon))
    return result


def train_ldp_gl(
    federation: Federation,
    config: TrainingConfig,
    *,
    label_epsilon: float | None = None,
    evaluate_every: int = 0,
) -> TwinResult:
    """LDP-GL: adapters are trained too, so a row is released afresh in every epoch (√epochs more noise).

    The server returns ∂L/∂H of the noised rows; the client back-propagates it through its adapters.
    """
    import time

    started = time.perf_counter()
    require(federation.clients[0].lora is not None, "lora", None, "present", "build the federation with lora=True")
    federation = federation.fresh()
    schedule = config.steps(federation.num_samples)
    sigma = ldp_sigma(config, federation.num_clients, schedule.epochs)
    labels = federation.labels
    if label_epsilon is not None:
        labels = randomised_response(labels, federation.classes, label_epsilon, config.seed)
    model = start_model(federation, config, None)
    flat = model.flatten()
    model.layers = model.unflatten(flat)
    velocity, curve = np.zeros_like(flat), []
    for step in range(schedule.num_steps):
        here = schedule.rows(step)
        noisy = noised_rows(federation, sigma, [config.seed, step], here)
        rows = bound_rows(noisy, federation.row_bound, "normalise").astype(config.dtype)
        result = clipped_gradient(model, with_ones(rows), labels[here], None)
        inputs, _ = model.forward(with_ones(rows))
        deltas = model.backward(inputs, result.logit_deltas)
        factor = config.learning_rate_factor(step, schedule.num_steps)
        for client in federation.clients:
            at_embedding = deltas[0] @ model.layers[0][client.columns].T / config.batch_size
            client.apply_gradient_at_embedding(here, at_embedding, factor)
        velocity = config.momentum * velocity + result.total / config.batch_size
        flat *= config.weight_decay
        flat -= config.learning_rate * factor * velocity
        if evaluate_every and (step + 1) % (schedule.num_batches * evaluate_every) == 0:
            now = model.accuracy(federation.test_rows(), federation.test_labels)
            curve.append(((step + 1) // schedule.num_batches, now))
    return TwinResult(
        "LDP-GL",
        model,
        model.accuracy(federation.test_rows(), federation.test_labels),
        schedule.num_steps,
        time.perf_counter() - started,
        _plan(sigma, config, federation, schedule.epochs, schedule.num_steps, frozen=False),
        config,
        curve,
        federation.clients,
        [schedule.sentence, _label_note(label_epsilon)],
    )


def _plan(
    sigma: float, config: TrainingConfig, federation: Federation, releases: int, num_steps: int, *, frozen: bool
) -> NoisePlan:
    bound = max(c.row_bound.norm for c in federation.clients)
    identity = factorise("identity", num_steps)
    claim = _claim(sigma, config, federation, releases, frozen)
    return NoisePlan(sigma, bound, sigma * bound, identity, claim, identity.noise_norms())


def _label_note(label_epsilon: float | None) -> str:
    if label_epsilon is None:
        return "labels reach the servers un-noised and are not covered by the LDP claim, as in the paper"
    return f"labels: randomised response with ε = {label_epsilon:g}, in addition to the claim on features"
