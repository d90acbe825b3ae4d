"""All ε of a seed in one pass give what the twins give one by one; public projections; bsr in single precision."""

from dataclasses import replace

import numpy as np
import pytest

from tests.not_none import not_none
from vfl.data.scaling import PublicProjection
from vfl.data.sets import load_data
from vfl.dp import NoiseFilter, factorise
from vfl.federation import build_federation
from vfl.local.client import LocalUpdate
from vfl.training import TrainingConfig
from vfl.twins import train_g_bmf, train_g_shuff, train_gl_bmf
from vfl.twins.noise import SinglePrecisionFilter
from vfl.twins.sweep import train_adapters_at_every_epsilon, train_at_every_epsilon


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize(("method", "train"), [("g_bmf", train_g_bmf), ("g_shuff", train_g_shuff)])
def test_every_run_is_its_twin(method, train, optimiser):
    federation = build_federation(load_data("digits"), progress=False)
    momentum = 0.9 if (method, optimiser) == ("g_bmf", "sgd") else 0.0
    config = TrainingConfig(
        epochs=3, batch_size=64, learning_rate=0.2, momentum=momentum, schedule="linear", seed=3,
        accounting="any-order", optimiser=optimiser, weight_decay=0.999,
    )  # fmt: skip
    for run, epsilon in zip(train_at_every_epsilon(method, federation, config, [1.0, 8.0]), (1.0, 8.0), strict=True):
        alone = train(federation, config.with_(epsilon=epsilon))
        np.testing.assert_allclose(run.model.layers[0], alone.model.layers[0], atol=1e-12)
        assert run.test_accuracy == alone.test_accuracy and not_none(run.plan).claim == not_none(alone.plan).claim
        assert run.clipped_share == pytest.approx(alone.clipped_share)


@pytest.mark.parametrize("kind", ["released", "estimated"])
def test_every_run_with_adapters_is_its_twin(kind):
    update = LocalUpdate(kind, learning_rate=0.1, parts="UV" if kind == "released" else "U")
    federation = build_federation(load_data("digits"), lora=True, update=update, progress=False)
    config = TrainingConfig(epochs=2, batch_size=64, learning_rate=0.2, momentum=0.9, seed=3, dtype="float32")
    for run, epsilon in zip(train_adapters_at_every_epsilon(federation, config, [1.0, 8.0]), (1.0, 8.0), strict=True):
        alone = train_gl_bmf(federation, config.with_(epsilon=epsilon))
        np.testing.assert_allclose(run.model.layers[0], alone.model.layers[0], rtol=1e-5, atol=1e-6)
        for mine, other in zip(run.clients, alone.clients, strict=True):
            assert np.abs(not_none(mine.lora).layers[0].up).max() > 0
            own, twins = (not_none(client.lora).layers[0].up for client in (mine, other))
            np.testing.assert_allclose(own, twins, rtol=1e-5, atol=1e-6)
        assert not_none(run.plan).claim == not_none(alone.plan).claim


@pytest.mark.parametrize("kind", ["fifth", "exponential"])
def test_the_average_is_the_twins(kind):
    federation = build_federation(load_data("digits"), progress=False)
    config = TrainingConfig(epochs=2, batch_size=128, epsilon=8.0, accounting="any-order", average=kind)
    (run,) = train_at_every_epsilon("g_bmf", federation, config, [8.0])
    np.testing.assert_allclose(run.model.layers[0], train_g_bmf(federation, config).model.layers[0], atol=1e-12)
    (last,) = train_at_every_epsilon("g_bmf", federation, config.with_(average="none"), [8.0])
    assert np.abs(run.model.layers[0] - last.model.layers[0]).max() > 1e-3
    with pytest.raises(ValueError, match="hidden"):
        train_at_every_epsilon("g_bmf", federation, config.with_(hidden=(8,)), [8.0])


def test_noise_from_outside_takes_the_place_of_the_calibrated_one():
    federation = build_federation(load_data("digits"), progress=False)
    config = TrainingConfig(epochs=1, batch_size=128)
    (own,) = train_at_every_epsilon("g_bmf", federation, config, [1.0])
    less = replace(not_none(own.plan), std=0.0)
    (exact,) = train_at_every_epsilon("g_bmf", federation, config, [1.0], plans=[less])
    (weak,) = train_at_every_epsilon("g_bmf", federation, config, [100.0])
    gaps = [np.abs(run.model.layers[0] - exact.model.layers[0]).max() for run in (weak, own)]
    assert 0 < gaps[0] < 0.1 * gaps[1]
    with pytest.raises(ValueError, match="plans = 1"):
        train_at_every_epsilon("g_bmf", federation, config, [1.0, 2.0], plans=[less])


@pytest.mark.parametrize("bands", [1, 40, 150])
def test_bsr_noise_in_single_precision(bands):
    factorisation = factorise("bsr", 300, bands=bands)
    z = np.random.default_rng(0).standard_normal((300, 5))
    single = SinglePrecisionFilter(factorisation, 5)
    blocks = [single.next_block(z[top : top + 64].astype(np.float32)) for top in range(0, 300, 64)]
    exact = NoiseFilter(factorisation, 5).next_block_float(z)
    np.testing.assert_allclose(np.concatenate(blocks), exact, atol=2e-6)


def test_the_public_projection_whitens_within_classes():
    random = np.random.default_rng(1)
    labels = random.integers(0, 4, 4000)
    means = np.zeros((4, 12))
    means[:, :3] = random.standard_normal((4, 3)) * 3
    rows = means[labels] + random.standard_normal((4000, 12)) * np.linspace(0.2, 5, 12)
    projection = PublicProjection.from_public(rows, labels, width=3, shrinkage=1e-6)
    seen = projection.apply(rows)
    inside = seen - np.stack([seen[labels == k].mean(axis=0) for k in range(4)])[labels]
    np.testing.assert_allclose(inside.T @ inside / 4000, np.eye(3), atol=1e-2)
    # three directions hold what separates four classes
    centres = np.stack([seen[labels == k].mean(axis=0) for k in range(4)])
    nearest = ((seen[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)
    assert (nearest == labels).mean() > 0.95
    with pytest.raises(ValueError, match="width = 13: must be an integer from 1 to 12"):
        PublicProjection.from_public(rows, labels, width=13)
