"""Membership inference: ROC by hand, power against a model that memorises, none against a private one."""

import json

import numpy as np
import pytest

from vfl.attack import METHODS, attack_twin, lira_scores, main, population_attack, roc_report
from vfl.data.embeddings import ClientEmbeddings
from vfl.data.sets import VerticalData
from vfl.federation import build_federation
from vfl.training import TrainingConfig


def memorising_federation(rows=240, width=120, seed=0):
    """Random labels on wide random rows: a model can only memorise."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(2, rows, width // 2)).astype(np.float32)
    y, test_y = random.integers(0, 4, rows), random.integers(0, 4, rows)
    test = random.normal(size=(2, rows, width // 2)).astype(np.float32)
    data = VerticalData("random", 4, tuple(x), y, tuple(test), test_y)
    parts = [ClientEmbeddings(a, b) for a, b in zip(x, test, strict=True)]
    return build_federation(data, embeddings=parts)


def test_roc_of_known_scores():
    report = roc_report("x", np.array([3.0, 2.0, 1.0]), np.array([2.5, 0.5, 0.1]))
    assert report.auc == pytest.approx(7 / 9)
    assert report.tpr_at_fpr_1_percent == pytest.approx(1 / 3)
    assert roc_report("x", np.ones(4), np.ones(5)).auc == pytest.approx(0.5)
    assert roc_report("x", np.array([1.0, 2.0]), np.array([0.0])).auc == 1.0


def test_population_thresholds_are_population_quantiles():
    population = np.linspace(0.1, 1.0, 10)
    report = population_attack(np.array([0.01, 0.05, 0.35]), np.array([0.55, 0.95]), population)
    assert report.auc == 1.0
    # Rank tests do not change when all losses are transformed monotonically together.
    again = population_attack(np.array([0.01, 0.05, 0.35]) ** 2, np.array([0.55, 0.95]) ** 2, population**2)
    assert again.auc == report.auc


def test_lira_formula():
    shadows = np.array([[5.0], [7.0], [1.0], [3.0]])
    included = np.array([[True], [True], [False], [False]])
    assert lira_scores(np.array([6.0]), shadows, included)[0] == pytest.approx((6 - 2) ** 2 / (2 * 2.0))
    assert lira_scores(np.array([2.0]), shadows, included)[0] == pytest.approx(-((6 - 2) ** 2) / (2 * 2.0))
    with pytest.raises(ValueError, match="shadow models"):
        lira_scores(np.array([2.0]), shadows[1:], included[1:])


def test_attacks_find_members_of_a_memorising_model_and_not_of_a_private_one():
    federation = memorising_federation()
    config = TrainingConfig(epochs=30, batch_size=24, epsilon=1.0, delta=1e-5)
    plain = attack_twin(METHODS["Plain"], federation, config, num_shadows=8)
    assert plain[0].auc > 0.9 and plain[1].auc > 0.95
    assert plain[1].tpr_at_fpr_1_percent > 0.3
    for method in ("G-Shuff", "G-BMF"):
        private = attack_twin(METHODS[method], federation, config, num_shadows=8)
        # ε = 1 bounds the advantage: AUC ≤ about 0.73; in practice it is near guessing.
        assert max(r.auc for r in private) < 0.62


def test_command_writes_table_and_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["--shadows", "4", "--epochs", "2", "--out", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {r["method"] for r in rows} == set(METHODS) and (tmp_path / "roc.png").stat().st_size > 10_000
    assert main(["--shadows", "0", "--epochs", "2", "--out", str(tmp_path)]) == 0
    assert "P-Attack" in capsys.readouterr().out
