"""Joint noise: σ² that no server knows, filtered on shares, with its claim, its cost, and never redrawn."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest

import refmpc
from accel.files import write_arrays
from protocols.methods import g_shuff
from protocols.plan.run_plan import Plan, joint_slope, plan_run
from protocols.plan.scales import GRADIENT_BITS
from protocols.run.options import parse_options
from protocols.run.report import estimate
from protocols.server import joint_noise
from protocols.server.joint_noise import JointNoise, joint_noise_cost
from protocols.server.server_noise import insecure_total_noise
from protocols.state.checkpoint import ServerDirectory
from refmpc.mathematics.gaussian import JOINT_DISTANCE, SMOOTHING, joint_slope_error
from tests.protocols.conftest import small_federation
from tests.protocols.secure_runs import released, run_secure, small_training, weight_bound
from tests.protocols.server.crashes import run_until_crash
from tests.protocols.step.agreement import assert_agrees
from vfl.dp import gaussian_epsilon
from vfl.twins import train_g_bmf


@pytest.fixture
def shares(monkeypatch) -> dict[int, dict[int, list[np.ndarray]]]:
    """By step and server: every summand of the joint noise that it used (a list: more than one attempt may ask)."""
    found: dict[int, dict[int, list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))
    real = JointNoise.next_row

    def recording(self):
        step, row = self._step, real(self)
        found[step][self._party.id].append(row.copy())
        return row

    monkeypatch.setattr(JointNoise, "next_row", recording)
    return found


def joint_rows(shares, attempt: int = -1) -> np.ndarray:
    """The joint noise itself: what only all three servers together know."""
    rows = [sum(shares[step][server][attempt] for server in range(3)) for step in sorted(shares)]
    return np.stack(rows) * 2.0**-GRADIENT_BITS


def total_noise(plan: Plan, directory, shares) -> np.ndarray:
    streams = [ServerDirectory(directory / f"server-{i}").noise_stream(plan.fingerprint) for i in range(3)]
    own = insecure_total_noise(plan, streams)
    return joint_rows(shares) + np.stack([own(step) for step in range(plan.schedule.num_steps)])


@pytest.mark.parametrize("hidden", [(), (5,)])
def test_g_bmf_with_joint_noise_is_its_twin(federation, tmp_path, shares, hidden):
    plan = plan_run("g_bmf", federation, small_training(noise="joint", hidden=hidden, learning_rate=0.25, epsilon=3.0))
    result = run_secure(plan, federation, tmp_path)
    noise = total_noise(plan, tmp_path, shares)
    twin = train_g_bmf(federation, plan.training, noise=noise, norm_limit=plan.scales.norm_limit)
    if hidden:
        assert_agrees(plan, federation, released(result), noise, twin)
    else:
        assert np.abs(released(result)[0] - twin.model.layers[0]).max() <= weight_bound(plan)
    quiet = train_g_bmf(federation, plan.training, noise=noise * 0)
    assert np.abs(quiet.model.layers[0] - twin.model.layers[0]).max() > 10 * weight_bound(plan)  # the noise was there
    counted = joint_noise_cost(plan)
    assert result.ledgers[0].phases["noise"].rounds == counted.rounds
    assert sum(ledger.phases["noise"].bytes_sent for ledger in result.ledgers) == counted.bytes
    phases = [phase for ledger in result.ledgers for phase in ledger.phases.values()]
    assert estimate(plan)["bytes"] == sum(phase.bytes_sent for phase in phases)
    assert not list(tmp_path.glob("server-*/joint-*"))  # nothing is kept without checkpoints
    faults = [f"fault in the upload of {name}" for name in plan.client_names]
    assert [r.name for r in result.ledgers[0].releases] == faults + ["global model"] * 2


def test_joint_noise_has_the_claimed_variance_and_each_server_knows_a_small_part(tmp_path, shares):
    """Independent noise of one epoch: 60·4 samples a step, four steps; deviations within 5 of their own deviations."""
    federation = small_federation(64, (40, 19), 4)
    plan = plan_run(
        "g_shuff", federation, small_training(noise="joint", batch_size=16, epsilon=3.0, accounting="any-order")
    )
    result = run_secure(plan, federation, tmp_path, g_shuff.servers)
    target, rows = plan.noise.target_std, joint_rows(shares)
    spread = 5 / math.sqrt(2 * rows.size)
    assert rows.shape == (4, 240)
    assert rows.std() / target == pytest.approx(math.sqrt(1 - 2 * SMOOTHING**2), rel=spread)
    for server in range(3):  # a server's summand alone is as good as uniform words
        words = np.stack([shares[step][server][-1] for step in range(4)]) * 2.0**-GRADIENT_BITS
        assert words.std() > 100 * target
    own = total_noise(plan, tmp_path, shares) - rows
    assert own.std() / target == pytest.approx(math.sqrt(3) * SMOOTHING, rel=spread)
    assert np.isfinite(released(result)[0]).all()


def test_the_claim_counts_sigma_squared_and_what_the_sampler_costs(federation):
    training = small_training(epsilon=3.0, epochs=2)
    joint = plan_run("g_bmf", federation, training.with_(noise="joint"))
    apart = plan_run("g_bmf", federation, training)
    claim, samples = joint.claim, joint.parameters * joint.schedule.num_steps
    assert joint.noise.noise_multiplier == pytest.approx(apart.noise.noise_multiplier, rel=1e-3)
    assert joint.noise.outsider_std == pytest.approx(apart.noise.outsider_std / math.sqrt(1.5), rel=1e-3)
    slope = dict(claim.slack)["slope of the joint sampler"]
    assert joint_slope_error() < joint_slope(joint.noise.target_std) <= slope < 4 * joint_slope_error()
    assert claim.epsilon_addition == pytest.approx(slope * math.sqrt(samples) / claim.noise_multiplier)
    assert claim.statistical_distance >= samples * JOINT_DISTANCE
    found = gaussian_epsilon(claim.noise_multiplier, claim.delta - claim.slack_delta) + claim.epsilon_addition
    assert found <= claim.epsilon * (1 + 1e-9) <= 3.0 * (1 + 2e-9)
    assert "noise counted here is unknown" in claim.adversary
    assert "draw the noise together" in claim.paragraph() and "1.5 times" not in claim.paragraph()
    assert joint.fingerprint != apart.fingerprint


@pytest.mark.parametrize("accounting", ["paper", "any-order", "proven"])
def test_g_shuff_is_calibrated_with_joint_noise(federation, accounting):
    batch = 96 if accounting == "paper" else 32  # a sampling rate of one spares the accountant its series
    delta = 1e-3 if accounting == "proven" else 1e-5
    training = small_training(
        epsilon=3.0, epochs=4, batch_size=batch, noise="joint", accounting=accounting, delta=delta
    )
    plan = plan_run("g_shuff", federation, training)
    assert 0 < plan.claim.epsilon_addition < 1e-3
    assert plan.claim.epsilon <= 3.0
    slope = joint_slope(plan.noise.target_std)
    shift = 4 * math.sqrt(plan.parameters) / plan.noise.noise_multiplier
    assert plan.claim.epsilon_addition == pytest.approx(slope * shift, rel=0.02)
    assert "slope of the joint sampler" in dict(plan.claim.slack)


def test_a_resumed_run_uses_the_noise_that_was_drawn(federation, tmp_path, monkeypatch, shares):
    """Blocks of two steps; the run dies at step 5, in the middle of a block, and goes on from the checkpoint at 4."""
    monkeypatch.setattr(joint_noise, "MOST_ROWS", 2)
    plan = plan_run("g_bmf", federation, small_training(epochs=3, learning_rate=0.1, noise="joint", epsilon=3.0))
    assert plan.factorisation.bands > 1  # rows before the checkpoint matter
    run_until_crash(plan, federation, tmp_path, monkeypatch, 5)
    kept = sorted(file.stem.rsplit("-", 1)[1] for file in (tmp_path / "server-0").glob("joint-*"))
    assert kept == ["00000000", "00000001", "00000002"]  # the checkpoint at 2 still needs the first block
    result = run_secure(plan, federation, tmp_path)
    assert [len(shares[4][server]) for server in range(3)] == [2, 2, 2]
    for server in range(3):
        assert (shares[4][server][0] == shares[4][server][1]).all()
    noise = total_noise(plan, tmp_path, shares)
    twin = train_g_bmf(federation, plan.training, noise=noise)
    assert np.abs(released(result)[0] - twin.model.layers[0]).max() <= weight_bound(plan)
    assert not list(tmp_path.glob("server-*/joint-*"))  # the model is out: nothing needs them


def test_a_block_that_not_all_servers_have_was_used_by_nobody(federation, tmp_path, monkeypatch, shares):
    monkeypatch.setattr(joint_noise, "MOST_ROWS", 2)
    plan = plan_run("g_bmf", federation, small_training(epochs=2, learning_rate=0.1, noise="joint", epsilon=3.0))

    def failing(file, arrays, **options):
        if file.name.endswith("-00000002.npz") and file.parent.name == "server-1":
            raise OSError("power cut")
        write_arrays(file, arrays, **options)

    with monkeypatch.context() as patch:
        patch.setattr(joint_noise, "write_arrays", failing)
        run_until_crash(plan, federation, tmp_path, monkeypatch, 99)
    assert 4 not in shares
    result = run_secure(plan, federation, tmp_path)
    twin = train_g_bmf(federation, plan.training, noise=total_noise(plan, tmp_path, shares))
    assert np.abs(released(result)[0] - twin.model.layers[0]).max() <= weight_bound(plan)


def test_noise_that_is_gone_cannot_be_replaced(federation, tmp_path, monkeypatch):
    plan = plan_run("g_bmf", federation, small_training(epochs=2, learning_rate=0.1, noise="joint", epsilon=3.0))
    run_until_crash(plan, federation, tmp_path, monkeypatch, 3)
    for file in (tmp_path / "server-2").glob("joint-*"):
        file.unlink()
    with pytest.raises(refmpc.PartyFailed, match="which must not be drawn again"):
        run_secure(plan, federation, tmp_path)


def test_what_joint_noise_cannot_do_is_refused(federation):
    with pytest.raises(ValueError, match="factorisation = 'bsr': must be bisr, toeplitz or identity with joint noise"):
        plan_run("g_bmf", federation, small_training(noise="joint", factorisation="bsr", bands=2))
    with pytest.raises(ValueError, match=r"small enough for a noise multiplier of 0\.5"):
        plan_run("g_bmf", federation, small_training(noise="joint", epsilon=20.0))
    wide = plan_run("g_bmf", federation, small_training(noise="joint", epsilon=5.0))
    assert wide.noise.noise_multiplier < 1 and math.isinf(wide.claim.epsilon_replace_one)


def test_the_estimate_of_the_papers_shape():
    """28 MB a step for 20,010 parameters, 1.4 kB each (proofs §7)."""
    options = parse_options("g_bmf", None, ["--noise", "joint", "--epochs", "2"])
    assert options.training.noise == "joint"
    federation = small_federation(256, (1000, 1000), 10)
    plan = plan_run("g_bmf", federation, small_training(noise="joint", batch_size=128, epsilon=3.0))
    each = estimate(plan)["noise_bytes"] / plan.schedule.num_steps
    assert 27e6 < each < 29e6
