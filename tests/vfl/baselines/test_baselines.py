"""Baselines: they learn, their noise is the claimed one, and their pieces do what they say."""

import dataclasses
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from vfl.baselines import (  # noqa: E402
    BaselineConfig,
    train_ada_vfed,
    train_admm,
    train_fedbcd,
    train_split_learning,
)
from vfl.baselines.ada_vfed import importance_weights, laplacian_scores  # noqa: E402
from vfl.baselines.admm import solve_auxiliary  # noqa: E402
from vfl.baselines.release import Parties, bound_tensor_rows  # noqa: E402
from vfl.data.sets import load_data  # noqa: E402
from vfl.dp import gaussian_epsilon  # noqa: E402
from vfl.local.config import LocalModelConfig  # noqa: E402

MODEL = LocalModelConfig("mlp", output_width=16, hidden=64)


@pytest.fixture(scope="module")
def digits():
    return load_data("digits")


@pytest.mark.parametrize(
    ("train", "learning_rate", "server_learning_rate", "least"),
    [
        (train_split_learning, 0.5, 1.0, 0.8),
        (train_fedbcd, 0.2, 1.0, 0.8),
        (train_admm, 0.5, 0.05, 0.8),
        (train_ada_vfed, 0.5, 1.0, 0.8),
    ],
)
def test_they_learn_without_noise(digits, train, learning_rate, server_learning_rate, least):
    config = BaselineConfig(
        epochs=15, epsilon=None, learning_rate=learning_rate, server_learning_rate=server_learning_rate
    )
    result = train(digits, config, MODEL)
    assert result.test_accuracy > least and result.claim is None


@pytest.mark.parametrize(
    ("train", "least"),
    [(train_split_learning, 0.3), (train_fedbcd, 0.5), (train_admm, 0.6), (train_ada_vfed, 0.2)],
)
def test_they_train_above_chance_with_example_level_privacy(digits, train, least):
    config = BaselineConfig(epochs=5, epsilon=8.0, learning_rate=1.0, server_learning_rate=0.02)
    result = train(digits, config, MODEL)
    assert result.test_accuracy > least  # chance is 0.1
    assert result.claim.epsilon == pytest.approx(8.0, rel=1e-3)
    assert any("labels" in c for c in result.claim.caveats)


def test_admm_is_not_drowned_by_the_noise_of_many_epochs(digits):
    """Heads that start with logits of the size of the noise reach 0.75 and 0.62 here."""
    for epsilon, clip_norm in ((8.0, 2.0), (4.0, 1.0)):
        config = BaselineConfig(
            epochs=20, epsilon=epsilon, clip_norm=clip_norm, learning_rate=5.0, server_learning_rate=0.005
        )
        assert train_admm(digits, config, MODEL).test_accuracy > 0.9


def test_noise_counts_every_release_about_one_person(digits):
    """Measured noise, all clients and epochs stacked into one vector: the Gaussian mechanism of the claim."""
    config = BaselineConfig(epochs=7, epsilon=3.0, clip_norm=2.0)
    parties = Parties(digits, MODEL, config)
    std = float(parties.noise(torch.zeros(4000, 50)).std())
    # One person: 2 clients × 7 epochs releases, each moving by at most clip_norm.
    shift = np.sqrt(2 * 7) * config.clip_norm
    assert gaussian_epsilon(std / shift, config.delta) == pytest.approx(3.0, rel=0.02)
    rows = parties.embed(0, torch.arange(64))
    assert float(rows.detach().norm(dim=1).max()) <= 2.0 * (1 + 1e-5)
    seen = torch.cat(parties.batches())
    assert sorted(seen.tolist()) == list(range(parties.num_samples))


@pytest.mark.parametrize("train", [train_split_learning, train_fedbcd, train_admm, train_ada_vfed])
def test_one_record_moves_the_releases_of_others_and_the_claim_says_so(digits, monkeypatch, train):
    """Same seeds, same noise, one record replaced: what is sent of OTHER rows moves by more than three times what the
    claim would allow for everything together."""
    sent: list[Any] = []
    noise = Parties.noise

    def watched(self, like, *arguments):
        if like.norm(dim=1).max() > 0.5:  # embeddings; Ada-VFed's returned gradients have norm 0.01
            sent.append(like.detach().clone())
        return noise(self, like, *arguments)

    monkeypatch.setattr(Parties, "noise", watched)
    rate = 5.0 if train is train_admm else 1.0  # its heads start small, and move the clients less at first
    config = BaselineConfig(epochs=6, epsilon=8.0, learning_rate=rate, server_learning_rate=0.5)
    changed = replace_record(digits, 7)
    runs = []
    for data in (digits, changed):
        sent.clear()
        claim = train(data, config, MODEL).claim
        runs.append(torch.cat(sent))
    # the record's own rows, at 2 clients in every epoch, move by at most 2C each: that is all the claim counts
    allowed = 2 * config.clip_norm * (2 * config.epochs) ** 0.5
    moved = (runs[0] - runs[1]).norm(dim=1)
    assert int((moved > 1e-3).sum()) > 10 * 2 * config.epochs  # many rows besides its own
    if train is not train_ada_vfed:  # which clips the returned gradients to 0.01 of the rows
        assert float(moved.square().sum()) - allowed**2 > 9 * allowed**2
    assert not claim.proven and claim.proven_epsilon is None
    assert "OTHER rows" in claim.paragraph() and "NOT a proven bound" in claim.paragraph()


def replace_record(data, row):
    """``data`` with one record's features at all clients replaced by those of the row farthest from it."""
    parts = []
    for part in data.train:
        flat = part.reshape(len(part), -1).astype(float)
        other = int(((flat - flat[row]) ** 2).sum(axis=1).argmax())
        part = part.copy()
        part[row] = part[other]
        parts.append(part)
    return dataclasses.replace(data, train=tuple(parts))


def test_same_seed_same_result(digits):
    config = BaselineConfig(epochs=1)
    for train in (train_split_learning, train_admm):
        assert train(digits, config, MODEL).test_accuracy == train(digits, config, MODEL).test_accuracy


def test_auxiliary_problem_is_solved():
    random = torch.Generator().manual_seed(0)
    sums = 3 * torch.randn(200, 10, generator=random, dtype=torch.float64)
    duals = torch.randn(200, 10, generator=random, dtype=torch.float64) * 0.3
    one_hot = torch.eye(10, dtype=torch.float64)[torch.arange(200) % 10]
    for penalty in (0.1, 0.5, 2.0):
        z = solve_auxiliary(sums, duals, one_hot, penalty)
        gradient = torch.softmax(z, dim=1) - one_hot - duals + penalty * (z - sums)
        assert float(gradient.norm(dim=1).max()) < 1e-5


@pytest.mark.parametrize("rule", ["clip", "normalise"])
def test_weighted_bound_keeps_the_sensitivity(rule):
    rows = torch.randn(300, 8, generator=torch.Generator().manual_seed(1)) * 3
    weights = importance_weights(torch.randn(100, 8, generator=torch.Generator().manual_seed(2)))
    assert float(weights.square().mean()) == pytest.approx(1.0, rel=1e-5)
    bounded = bound_tensor_rows(rows, 1.5, rule, weights)
    assert float((bounded / weights).norm(dim=1).max()) <= 1.5 * (1 + 1e-5)


def test_laplacian_score_prefers_smooth_columns():
    random = torch.Generator().manual_seed(3)
    cluster = torch.arange(120) % 2
    smooth = cluster[:, None] * 4.0 + 0.1 * torch.randn(120, 1, generator=random)
    rough = 0.1 * torch.randn(120, 1, generator=random)
    scores = laplacian_scores(torch.cat([smooth, rough], dim=1))
    assert scores[0] < scores[1]


@pytest.mark.parametrize(
    ("field", "value"),
    [("epsilon", -1.0), ("epochs", 0), ("local_steps", 0), ("penalty", 0.0), ("row_rule", "x")],
)
def test_bad_options_name_themselves(field, value):
    with pytest.raises(ValueError, match=field):
        BaselineConfig(**{field: value})
