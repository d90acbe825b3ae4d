"""The commands: tables, pictures and JSON; users' columns end to end; speed of the big twin."""

import csv
import json

import numpy as np
import pytest

from bench import study
from bench.evaluation.paper_tables import paper_accuracy
from tests.not_none import not_none
from vfl.data.embeddings import ClientEmbeddings, apply_last_layer
from vfl.data.sets import VerticalData, load_data, load_embeddings
from vfl.federation import build_federation
from vfl.training import SETTINGS, TrainingConfig
from vfl.twins import train_g_bmf

pytest.importorskip("matplotlib")


def test_study_command(tmp_path, capsys):
    arguments = [
        "--epochs",
        "3",
        "--epsilon",
        "8",
        "--methods",
        "plain",
        "g_bmf",
        "gl_bmf",
        "--settings",
        "1",
        "2",
    ]
    assert study.main([*arguments, "--out", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(r["method"], r["setting"]) for r in rows] == [
        ("plain", 1), ("g_bmf", 1), ("g_bmf", 2), ("gl_bmf", 1), ("gl_bmf", 2)]  # fmt: skip
    assert (
        study.main(["--epochs", "3", "--methods", "g_shuff", "--accounting", "any-order", "--out", str(tmp_path)]) == 0
    )
    assert "g_shuff" in capsys.readouterr().out and (tmp_path / "digits.png").exists()


def test_study_on_the_users_own_columns(tmp_path, capsys):
    data = load_data("breast_cancer", public_fraction=0.0)
    whole = [np.concatenate([a, b]) for a, b in zip(data.train, data.test, strict=True)]
    labels = np.concatenate([data.train_labels, data.test_labels])
    for i, name in enumerate(("clinic.csv", "laboratory.csv")):
        with open(tmp_path / name, "w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(["id", *[f"c{k}" for k in range(whole[i].shape[1])], *(["outcome"] if i else [])])
            for row in np.random.default_rng(i).permutation(len(labels)):
                writer.writerow([f"p{row}", *whole[i][row], *([labels[row]] if i else [])])
    files = [str(tmp_path / "clinic.csv"), str(tmp_path / "laboratory.csv")]
    arguments = ["--columns", *files, "--label-column", "outcome", "--methods", "g_bmf", "--batch-size", "64"]
    assert study.main([*arguments, "--epsilon", "8", "--epochs", "15", "--out", str(tmp_path), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)[0]["test_accuracy"] > 0.85
    assert "569 people are in every file" in captured.err


def test_last_layer_on_precomputed_features(tmp_path):
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(0)
    features = random.normal(size=(20, 8)).astype(np.float32)
    np.savez(
        tmp_path / "f.npz",
        train=features,
        test=features[:5],
        y_train=np.arange(20) % 2,
        y_test=np.arange(5) % 2,
    )
    weight, bias = torch.randn(6, 4), torch.randn(6)
    torch.save({"fc.weight": weight.half(), "fc.bias": bias}, tmp_path / "w.pth")
    data = load_embeddings(tmp_path / "f.npz")
    parts = apply_last_layer(data, tmp_path / "w.pth", cache_dir=tmp_path / "cache", keep_blocks=True)
    expected = features[:, 4:] @ weight.half().float().numpy().T + bias.numpy()
    np.testing.assert_allclose(parts[1].train, expected, atol=1e-5)
    np.testing.assert_array_equal(parts[1].train_blocks[0], features[:, 4:])
    again = apply_last_layer(data, tmp_path / "w.pth", cache_dir=tmp_path / "cache", keep_blocks=True)
    assert again[0].from_cache and not parts[0].from_cache
    np.testing.assert_array_equal(again[0].test, parts[0].test)
    federation = build_federation(data, embeddings=parts, lora=True)
    assert federation.width == 12 and not_none(federation.clients[0].lora).layers[0].down.shape == (8, 4)


def test_paper_figures_are_those_of_table_1():
    assert paper_accuracy("cifar10", "imagenet", "g_bmf", 1, 1.0) == 69.25
    assert paper_accuracy("cifar10", "imagenet", "g_shuff", 1, 8.0) == 73.69
    assert SETTINGS[2] == {"weight_decay": 1.0, "momentum": 0.9}


@pytest.mark.heavy
def test_paper_sized_g_bmf_run():
    """7,800 steps at d = 2000, S = 10, B = 128, noise filter included; single precision."""
    random = np.random.default_rng(0)
    parts = [random.standard_normal((50_000, 1000), dtype=np.float32) for _ in range(2)]
    labels = random.integers(0, 10, 50_000)
    data = VerticalData("random", 10, tuple(parts), labels, tuple(p[:500] for p in parts), labels[:500])
    federation = build_federation(data, embeddings=[ClientEmbeddings(p, p[:500]) for p in parts], dtype=np.float32)
    result = train_g_bmf(federation, TrainingConfig(epochs=20, dtype="float32"))
    assert result.num_steps == 7800 and not_none(result.plan).factorisation.bands == 256
    assert np.isfinite(result.model.layers[0]).all() and result.test_accuracy < 0.2  # random labels teach nothing


def test_study_runs_every_method_on_a_subset(tmp_path, capsys):
    pytest.importorskip("torch")
    arguments = ["--methods", "all", "--epsilon", "8", "--epochs", "2", "--max-rows", "400", "--baseline-epochs", "1"]
    assert study.main([*arguments, "--batch-size", "50", "--out", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [r["method"] for r in rows] == [*study.METHODS, *study.BASELINES]
    assert {r["num_steps"] for r in rows} == {8, 16}
