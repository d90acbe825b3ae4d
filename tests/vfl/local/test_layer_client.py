"""Layers without factors: Jacobians by torch, the same gradients as autograd, and GL-BMF on top."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from tests.not_none import not_none  # noqa: E402
from vfl.data.embeddings import embed  # noqa: E402
from vfl.data.scaling import RowBound  # noqa: E402
from vfl.data.sets import load_data  # noqa: E402
from vfl.federation import Federation, build_federation  # noqa: E402
from vfl.gradients import AdapterJacobian, GlobalModel, clipped_gradient, per_sample_gradients, with_ones  # noqa: E402
from vfl.local.client import Client, LocalUpdate, concatenate  # noqa: E402
from vfl.local.config import LocalModelConfig  # noqa: E402
from vfl.local.layer_client import LayerClient  # noqa: E402
from vfl.local.models import build_local_model  # noqa: E402
from vfl.training import TrainingConfig  # noqa: E402
from vfl.twins import train_g_bmf, train_gl_bmf  # noqa: E402

CONFIG = LocalModelConfig("mlp", output_width=6, hidden=10)


def layer_federation(kind="released", row_norm=1e6, rows=300, learning_rate=0.3):
    data = load_data("digits")
    clients: list[Client] = []
    start, tests = 0, []
    for i in range(2):
        inputs = data.train[i][:rows].reshape(rows, -1).astype(np.float32) / np.float32(16)
        tests.append(data.test[i].reshape(len(data.test[i]), -1).astype(np.float32) / np.float32(16))
        model = build_local_model(CONFIG, inputs.shape[1:])
        clients.append(
            LayerClient(
                name=f"client {i + 1}",
                embeddings=np.zeros((rows, 6)),
                row_bound=RowBound(row_norm),
                columns=slice(start, start + 6),
                labels=data.train_labels[:rows] if i == 1 else None,
                update=LocalUpdate(kind=kind, learning_rate=learning_rate),
                model=model,
                rows=inputs,
                config=CONFIG,
            )
        )
        start += 6
    return Federation(clients, 10, data.test_labels, tests, [], row_norm * 2**0.5)


def test_jacobian_gradients_equal_autograd():
    federation = layer_federation()
    model = GlobalModel.initial(12, 10)
    model.layers[0][...] = np.random.default_rng(0).normal(size=(13, 10))
    rows = np.arange(5)
    labels = federation.labels[rows]
    adapters = [a for c in federation.clients for a in c.adapters(rows)]
    assert all(isinstance(a, AdapterJacobian) for a in adapters)
    ours = per_sample_gradients(model, with_ones(concatenate(federation.clients, rows)), labels, adapters)
    weights = torch.from_numpy(model.layers[0])
    for j in rows:
        parts = [c.model(torch.from_numpy(c.rows[j : j + 1])).double() for c in federation.clients]
        logits = torch.cat([*parts, torch.ones(1, 1)], dim=1) @ weights
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor([labels[j]]))
        wanted = [p for c in federation.clients for n, p in c.model.named_parameters() if n.startswith("last.")]
        grads = torch.autograd.grad(loss, wanted)
        expected = np.concatenate([g.numpy().ravel() for g in grads])
        np.testing.assert_allclose(ours[j, model.num_parameters :], expected, atol=2e-5)
    inputs = with_ones(concatenate(federation.clients, rows))
    both = [
        clipped_gradient(model, inputs, labels, 0.7, adapters=adapters, method=m).total
        for m in ("factored", "explicit")
    ]
    np.testing.assert_allclose(both[0], both[1], atol=1e-10)


@pytest.mark.parametrize("kind", ["released", "estimated"])
def test_gl_bmf_trains_a_layer_without_factors(kind):
    federation = layer_federation(kind, row_norm=1.0)
    config = TrainingConfig(epochs=6, batch_size=50, epsilon=50.0, learning_rate=1.0)
    before = federation.clients[0].model.last.weight.detach().clone()
    noise = np.zeros((36, 130 + 2 * 66))
    result = train_gl_bmf(federation, config, noise=noise)
    assert torch.equal(federation.clients[0].model.last.weight, before)
    mine = result.clients[0]
    assert isinstance(mine, LayerClient)
    trained: Any = mine.model  # torch does not know the types of submodules
    assert not torch.equal(trained.last.weight, before)
    moved = not torch.equal(trained.first.weight, federation.clients[0].model.first.weight)
    assert moved == (kind == "estimated")
    frozen = train_g_bmf(federation, config, noise=noise[:, :130])
    assert result.test_accuracy >= frozen.test_accuracy - 0.02
    if kind == "estimated":
        assert not_none(result.plan).claim.covers == "labels only" and len(result.clients[1].estimate_log) == 36


def test_unknown_layer_is_named():
    with pytest.raises(ValueError, match="layer = 'middle'"):
        data = load_data("digits")
        rows = data.train[0][:4].reshape(4, -1).astype(np.float32) / np.float32(16)
        LayerClient("c", np.zeros((4, 6)), RowBound(1.0), slice(0, 6), model=build_local_model(CONFIG, (32,)),
                    rows=rows, config=CONFIG, layer="middle")  # fmt: skip


def test_federation_of_embeddings_is_the_layer_client_at_the_start():
    data = load_data("digits")
    parts = embed(data, CONFIG)
    frozen = build_federation(data, embeddings=parts, row_bound=2.0, row_rule="clip")
    federation = layer_federation(row_norm=2.0 / 2**0.5)
    np.testing.assert_allclose(federation.rows(slice(0, 50)), frozen.rows(slice(0, 50)), atol=1e-5)
