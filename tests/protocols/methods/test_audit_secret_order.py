"""Audit of a secret order through real shares: canaries whose batch the attacker infers from everybody else's place.

The attacker knows where all other records are (Z) and sees every opened sum, less the noise of one server that it
corrupted. What is left for a canary are the free slots: dummies, and its own. Its best test is the likelihood ratio of
proofs §9.6. With dummies it must not refute the claim; without them the same noise must be refuted, because Z then
tells the batch.

How clearly: at the claimed ε = 1, δ is estimated as P(loss > ε | there) − e^ε·P(loss > ε | not there). Thirty-two
batches need a σ of 0.86 (of a contribution), so without dummies two epochs are one Gaussian mechanism of shift m =
√2·SHIFT/σ = 1.63, whose δ is Φ(m/2 − ε/m) − e^ε·Φ(−m/2 − ε/m) = 0.37, where 0.005 is claimed. With 768 canaries in each
world the estimate has a deviation of 0.03: eleven deviations apart. Tests ask for five, so each fails by chance once in
10^7 runs at most.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from protocols.methods import audit
from protocols.plan.run_plan import Plan, plan_run
from protocols.server.server_noise import insecure_total_noise
from protocols.state.checkpoint import ServerDirectory
from vfl.data.scaling import RowBound
from vfl.dp import gaussian_delta
from vfl.dp.lower_bound import epsilon_lower_bound
from vfl.federation import Federation
from vfl.local.client import make_clients
from vfl.training import TrainingConfig

CANARIES, BATCHES, EPOCHS, RUNS = 128, 32, 2, 12
DEVIATIONS = 5.0
SHIFT = audit.CLIP_NORM * audit.ROW_BOUND / np.hypot(audit.ROW_BOUND, 1.0)  # of a canary in its own column


def canaries(present: np.ndarray) -> Federation:
    rows = np.diag(np.where(present, audit.ROW_BOUND, audit.UNIT))
    labels, half = np.zeros(CANARIES, dtype=np.int64), CANARIES // 2
    columns = [rows[:, :half], rows[:, half:]]
    clients = make_clients(columns, labels, [RowBound(audit.ROW_BOUND, "clip")] * 2)
    return Federation(clients, audit.CLASSES, labels, columns, [], audit.ROW_BOUND * 2**0.5)


def planned(protocol: str) -> Plan:
    training = TrainingConfig(
        epochs=EPOCHS, batch_size=CANARIES // BATCHES, learning_rate=0.01, clip_norm=audit.CLIP_NORM, epsilon=1.0,
        delta=5e-3, order="secret" if protocol == "g_bmf" else "fixed", weights="open", factorisation="identity",
    )  # fmt: skip
    return plan_run(protocol, canaries(np.ones(CANARIES, dtype=bool)), training)


def losses(plan: Plan, seen: list[audit.Observation], own: np.ndarray) -> np.ndarray:
    """The log-likelihood ratio of every canary, given the places of all others."""
    sums = audit._sums(plan, seen)
    left = sums - own.reshape(sums.shape)
    along = (left[:, :CANARIES] @ np.array([-1.0, 1.0])) / np.sqrt(2)  # steps × canaries; Ω = 1
    rows = np.stack([audit._added([one.rows[t] for one in seen]) for t in range(plan.schedule.num_steps)])
    empty = (rows[:, :, -1] == 0).sum(axis=1)  # dummies of each batch
    mine = rows[:, :, :CANARIES].any(axis=1)  # steps × canaries
    batches = plan.schedule.num_batches
    shares = (empty[:, None] + mine) / (plan.schedule.dummies + 1)
    variance = plan.noise.target_std**2
    exponents = (along * SHIFT - SHIFT**2 / 2) / variance
    shares, exponents = (part.reshape(-1, batches, CANARIES) for part in (shares, exponents))
    assert np.allclose(shares.sum(axis=1), 1.0)
    if plan.protocol == "g_bmf":  # the same batch in every epoch
        return np.log((shares[0] * np.exp(exponents.sum(axis=0))).sum(axis=0))
    return np.log((shares * np.exp(exponents)).sum(axis=1)).sum(axis=0)


def measured_delta(absent: np.ndarray, present: np.ndarray, epsilon: float) -> tuple[float, float]:
    """δ(ε) of the test "loss above ε", which is the best one, and its deviation."""
    shares = [float((values > epsilon).mean()) for values in (present, absent)]
    factors = (1.0, np.exp(epsilon))
    variance = sum(
        (f * f) * max(p * (1 - p), 1 / len(values)) / len(values)
        for f, p, values in zip(factors, shares, (present, absent), strict=True)
    )
    return shares[0] - factors[1] * shares[1], float(np.sqrt(variance))


def audited(plan: Plan, tmp_path) -> tuple[np.ndarray, np.ndarray]:
    """Losses of canaries that were not there, and that were."""
    coins, found, worlds = np.random.default_rng(1), [], []
    for number in range(RUNS):
        present = coins.random(CANARIES) < 0.5
        folder = tmp_path / f"{plan.schedule.dummies}-{number}"
        seen = audit._run(plan, canaries(present), folder)
        stream = ServerDirectory(folder / f"server-{number % 3}").noise_stream(plan.fingerprint)
        noise = insecure_total_noise(plan, [stream])
        own = np.stack([noise(step) for step in range(plan.schedule.num_steps)])
        found.append(losses(plan, seen, own))
        worlds.append(present)
    values, there = np.concatenate(found), np.concatenate(worlds)
    return values[~there], values[there]


@pytest.mark.heavy
@pytest.mark.parametrize("protocol", ["g_shuff", "g_bmf"])
def test_the_claim_of_a_secret_order_stands(protocol, tmp_path):
    plan = planned(protocol)
    assert plan.claim.epsilon == 1.0
    absent, present = audited(plan, tmp_path)
    found, deviation = measured_delta(absent, present, plan.claim.epsilon)
    assert found <= plan.claim.delta + DEVIATIONS * deviation
    bound, _, _ = epsilon_lower_bound(absent, present, plan.claim.delta, 1 - 1e-7)
    assert bound <= plan.claim.epsilon
    # the law of the losses is the one that was certified: means of both directions, within sampling error
    for ratio in (np.exp(absent), np.exp(-present)):  # E_Q dP/dQ = E_P dQ/dP = 1
        assert abs(ratio.mean() - 1) < DEVIATIONS * ratio.std() / np.sqrt(len(ratio))


@pytest.mark.heavy
def test_without_dummies_the_same_noise_is_refuted(tmp_path):
    plan = planned("g_shuff")
    bare = replace(plan.schedule, batch_size=CANARIES // BATCHES, dummies=0)
    absent, present = audited(replace(plan, schedule=bare), tmp_path)
    found, deviation = measured_delta(absent, present, plan.claim.epsilon)
    assert found > plan.claim.delta + DEVIATIONS * deviation
    shift = np.sqrt(EPOCHS) * SHIFT / plan.noise.target_std  # and it is the δ of a Gaussian whose order is known
    assert abs(found - gaussian_delta(1 / shift, plan.claim.epsilon)) < DEVIATIONS * deviation
