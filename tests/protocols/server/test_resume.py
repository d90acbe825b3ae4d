"""A run that loses a participant ends with a sentence, and continues from its checkpoint: same noise, fresh masks."""

from __future__ import annotations

import stat
from collections import defaultdict

import numpy as np
import pytest

import refmpc
from accel.gaussian import SAMPLER_VERSION
from protocols.methods import g_shuff
from protocols.plan.run_plan import plan_run
from protocols.server.training import release_model
from protocols.state import run_identity
from protocols.state.checkpoint import ServerDirectory
from tests.protocols.secure_runs import noise_of_the_servers, released, run_secure, small_training, weight_bound
from tests.protocols.server.crashes import run_until_crash
from vfl.twins import train_g_bmf


@pytest.mark.parametrize("crash_at", [1, 4, 5])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_resumed_run_ends_where_an_uninterrupted_one_would(federation, tmp_path, monkeypatch, crash_at, momentum):
    plan = plan_run("g_bmf", federation, small_training(epochs=2, learning_rate=0.2, momentum=momentum))
    run_until_crash(plan, federation, tmp_path, monkeypatch, crash_at)
    kept = sorted(file.name for file in (tmp_path / "server-0").glob("checkpoint-*"))
    assert kept == [f"checkpoint-{step:08d}.npz" for step in range(2, crash_at + 1, 2)][-2:]
    keys = [(tmp_path / f"server-{i}" / "noise.key").read_bytes() for i in range(3)]
    result = run_secure(plan, federation, tmp_path)
    assert [(tmp_path / f"server-{i}" / "noise.key").read_bytes() for i in range(3)] == keys
    twin = train_g_bmf(federation, plan.training, noise=noise_of_the_servers(plan, tmp_path))
    assert np.abs(released(result)[0] - twin.model.layers[0]).max() <= weight_bound(plan)
    steps = plan.schedule.num_steps - crash_at // 2 * 2
    assert result.ledgers[0].phases["training"].rounds % steps == 0  # only what was missing is computed


def test_servers_one_checkpoint_apart_agree_on_the_older(federation, tmp_path, monkeypatch):
    plan = plan_run("g_bmf", federation, small_training(epochs=2, learning_rate=0.2))
    run_until_crash(plan, federation, tmp_path, monkeypatch, 5)
    (tmp_path / "server-2" / "checkpoint-00000004.npz").unlink()
    result = run_secure(plan, federation, tmp_path)
    twin = train_g_bmf(federation, plan.training, noise=noise_of_the_servers(plan, tmp_path))
    assert np.abs(released(result)[0] - twin.model.layers[0]).max() <= weight_bound(plan)


def test_a_run_whose_noise_was_sampled_otherwise_is_refused(federation, tmp_path, monkeypatch):
    """Noise of earlier steps is drawn again when a run goes on: another sampler would not give the same."""
    plan = plan_run("g_bmf", federation, small_training(epochs=2, learning_rate=0.2))
    monkeypatch.setattr(run_identity, "SAMPLER_VERSION", 1)
    run_until_crash(plan, federation, tmp_path, monkeypatch, 4)
    monkeypatch.setattr(run_identity, "SAMPLER_VERSION", SAMPLER_VERSION)
    with pytest.raises(
        refmpc.PartyFailed, match="another plan: sampler of the noise was 1 and is 2; .*start a new run"
    ):
        run_secure(plan, federation, tmp_path)


def test_g_shuff_resumes_at_an_epoch_boundary(federation, tmp_path, monkeypatch):
    plan = plan_run("g_shuff", federation, small_training(epochs=3, learning_rate=0.2))
    run_until_crash(plan, federation, tmp_path, monkeypatch, 4, g_shuff.servers, every=plan.schedule.num_batches)
    result = run_secure(plan, federation, tmp_path, g_shuff.servers)
    assert "shuffle" in result.ledgers[0].phases and np.isfinite(released(result)[0]).all()
    assert result.ledgers[0].phases["shuffle"].rounds == 2 * 2  # epochs 1 and 2; epoch 0 was done


def test_a_finished_run_resumed_sends_the_same_release_again(federation, tmp_path):
    """Computing the last steps again would round differently: two releases of one step differ by un-noised data."""
    plan = plan_run("g_bmf", federation, small_training(epochs=2, learning_rate=0.2))
    first = run_secure(plan, federation, tmp_path)
    again = run_secure(plan, federation, tmp_path)
    assert (released(again)[0] == released(first)[0]).all()
    assert "training" not in again.ledgers[0].phases


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_crash_around_the_release_never_gives_two_values(federation, tmp_path, monkeypatch, victim):
    """One server dies when it has sent its part, before or after the others have: all send the same parts again."""
    plan = plan_run("g_bmf", federation, small_training(learning_rate=0.2))
    real, sent, dies = release_model, defaultdict(list), [victim]

    def dying(party, plan, weights):
        real(party, plan, weights)
        sent[party.id].append(refmpc.unseal(weights.shares).copy())
        if party.id in dies:
            dies.clear()
            raise OSError("power cut")

    monkeypatch.setattr("protocols.server.training.release_model", dying)
    with pytest.raises(refmpc.PartyFailed):
        run_secure(plan, federation, tmp_path)
    first = sent[victim][0]
    run_secure(plan, federation, tmp_path)
    assert len(sent) == 3 and (sent[victim][1] == first).all()
    assert all((words == found[0]).all() for found in sent.values() for words in found)


def test_a_server_that_has_not_written_the_release_means_nobody_opened_it(federation, tmp_path, monkeypatch):
    plan = plan_run("g_bmf", federation, small_training(learning_rate=0.2))
    real, opened = ServerDirectory.save, []

    def failing(self, step, *layers):
        if self.path.name == "server-2":
            raise OSError("disk full")
        real(self, step, *layers)

    def watching(party, plan, weights):
        opened.append(party.id)

    with monkeypatch.context() as patch:
        patch.setattr(ServerDirectory, "save", failing)
        patch.setattr("protocols.server.training.release_model", watching)
        with pytest.raises(refmpc.PartyFailed, match="server-2 failed: OSError: disk full"):
            run_secure(plan, federation, tmp_path)
    assert opened == []


def test_another_plan_in_the_same_directory_gets_other_noise(federation, tmp_path):
    directory = ServerDirectory(tmp_path / "server-0")
    plans = [plan_run("g_bmf", federation, small_training(learning_rate=rate)) for rate in (0.2, 0.3)]
    rows = [directory.noise_stream(plan.fingerprint)(0).words(4).tolist() for plan in plans]
    assert rows[0] != rows[1]
    assert rows[0] == directory.noise_stream(plans[0].fingerprint)(0).words(4).tolist()


def test_what_a_server_keeps_is_for_its_eyes_only(federation, tmp_path, monkeypatch):
    plan = plan_run("g_bmf", federation, small_training(epochs=2, learning_rate=0.2))
    run_until_crash(plan, federation, tmp_path, monkeypatch, 5)
    for directory in tmp_path.glob("server-*"):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        for file in (directory / "noise.key", *directory.glob("checkpoint-*")):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
    keys = {(tmp_path / f"server-{i}" / "noise.key").read_bytes() for i in range(3)}
    assert len(keys) == 3
