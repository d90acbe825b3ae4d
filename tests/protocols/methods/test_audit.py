"""The end-to-end audit on shares: the claims stand with the calibrated noise, and planted faults are refuted."""

from __future__ import annotations

import importlib.metadata
import json

import numpy as np
import pytest

import protocols.methods.audit
import protocols.step.low_round
from protocols.methods.audit import protocol_scores
from protocols.server.training import TrainingRun
from tests.not_none import not_none
from vfl.dp import protocol_audit
from vfl.dp.audit import main
from vfl.dp.protocol_audit import ProtocolAudit, find_auditor, judge

TRIALS = 768  # three runs, each server corrupted once


def audited(protocol: str, noise_scale: float = 1.0, trials: int = TRIALS, weights: str | None = None) -> ProtocolAudit:
    found = protocol_scores(
        protocol, epsilon=2.0, delta=1e-2, trials=trials, noise_scale=noise_scale, seed=1, weights=weights
    )
    return judge(found, noise_scale, 0.9999)


@pytest.mark.parametrize(
    ("protocol", "weights"),
    [
        ("g_bmf", "open"),
        ("g_bmf", "secret"),
        ("g_shuff", "open"),
        ("gl_bmf", "open"),
        pytest.param("gl_bmf", "secret", marks=pytest.mark.heavy),
    ],
)
def test_the_claim_stands_and_half_the_noise_is_refuted(protocol, weights):
    kept, halved = audited(protocol, weights=weights), audited(protocol, 0.5, weights=weights)
    assert kept.refutations == () and kept.epsilon_lower_bound <= kept.claimed_epsilon == pytest.approx(2.0)
    assert kept.deviation == pytest.approx(kept.claimed_deviation, rel=0.12)  # 4.5 standard errors
    assert kept.shift == pytest.approx(kept.allowed_shift, abs=0.35 * kept.claimed_deviation)  # the worst gradient
    assert not halved.within_claim
    assert halved.deviation == pytest.approx(0.5 * kept.claimed_deviation, rel=0.12)
    if protocol == "gl_bmf":
        assert 1 <= not_none(kept.layer_deviation_ratio) < 1.2 and not_none(halved.layer_deviation_ratio) < 0.7


@pytest.mark.parametrize("weights", ["open", "secret"])
def test_a_contribution_that_is_not_clipped_is_refuted(monkeypatch, weights):
    """Rows taken for rows of length zero, whose clip factor is one: a record moves the sum by far more than γ."""
    clipped = protocols.step.low_round.clipped_updates

    async def unclipped(logits, labels, norms, scales, weights=()):
        return await clipped(logits, labels, norms - norms, scales, weights)

    monkeypatch.setattr(protocols.step.low_round, "clipped_updates", unclipped)
    result = audited("g_bmf", trials=512, weights=weights)
    assert any("a record shifts by" in sentence for sentence in result.refutations)


def test_a_server_that_forgets_its_noise_is_refuted(monkeypatch):
    own_noise = TrainingRun.own_noise

    def forgetful(run):
        return own_noise(run) * (run.party.id != 1)

    monkeypatch.setattr(TrainingRun, "own_noise", forgetful)
    found = protocol_scores("g_bmf", epsilon=2.0, delta=1e-2, trials=256, seed=1)  # server 0 is the corrupted one
    assert any("the noise deviates by" in sentence for sentence in judge(found, 1.0, 0.999).refutations)


@pytest.mark.heavy
@pytest.mark.parametrize("protocol", ["g_bmf", "g_shuff", "gl_bmf"])
def test_the_attack_alone_refutes_half_the_noise(protocol):
    """With the command's default number of canaries, ε from below passes the claim when the noise is halved."""
    kept, halved = audited(protocol, trials=12_000), audited(protocol, 0.5, trials=12_000)
    assert kept.within_claim and kept.epsilon_lower_bound > 0.6
    assert halved.epsilon_lower_bound > halved.claimed_epsilon


def test_the_command_prints_json_and_its_exit_status(capsys):
    assert main(["--protocol", "g_shuff", "--trials", "512", "--confidence", "0.99999", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    kept, halved = output["results"]
    assert output["as_wanted"] and kept["within_claim"] and halved["refutations"]
    assert main(["--protocol", "g_bmf", "--trials", "10"]) == 2
    assert "trials = 10" in capsys.readouterr().out
    assert main(["--protocol", "sgd"]) == 2
    assert "protocol = 'sgd': must be one of g_bmf, g_shuff, gl_bmf" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--protocol", "g_bmf", "--momentum", "0.5"])


def test_auditors_are_found_without_entry_points_and_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    assert find_auditor("gl_bmf") is protocol_scores
    monkeypatch.setitem(protocol_audit.AUDITORS, "g_bmf", "no_such_package.audit:protocol_scores")
    with pytest.raises(ValueError, match="'no_such_package', which is not installed; install the whole of ppvfl"):
        find_auditor("g_bmf")


def test_scores_that_are_no_numbers_are_refused():
    found = protocol_audit.ProtocolScores(
        "g_bmf", 1.0, 1e-2, 1.0, 1.0, 4, 1, protocol_audit.Scores(np.full(500, np.nan), np.arange(500) % 2 == 0)
    )
    with pytest.raises(ValueError, match="scores = 'not finite'"):
        judge(found, 1.0, 0.999)
