"""LoRA gradients = autograd; Kronecker ridge = dense ridge; the client's two local updates."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.errors import InvalidArgument
from tests.not_none import not_none
from vfl.data.scaling import RowBound
from vfl.gradients import GlobalModel, clipped_gradient, per_sample_gradients, with_ones
from vfl.local.client import LocalUpdate, concatenate, make_clients
from vfl.local.estimate import (
    dense_system,
    error_bound,
    estimate_from_jacobian,
    estimate_per_sample_gradients,
    regulariser,
)
from vfl.local.lora import ParallelLora, choose_layers


def small_federation(row_norm=1e9, update=None, seed=0):
    random = np.random.default_rng(seed)
    embeddings = [random.normal(size=(12, 5)), random.normal(size=(12, 4))]
    blocks = [[random.normal(size=(12, 3)), random.normal(size=(12, 6))], [random.normal(size=(12, 2))]]
    labels = random.integers(0, 3, 12)
    clients = make_clients(
        embeddings, labels, [RowBound(row_norm)] * 2, block_outputs=blocks, rank=2, update=update, seed=seed
    )
    for client in clients:
        for layer in not_none(client.lora).layers:
            layer.up[...] = random.normal(size=layer.up.shape)
    return clients, labels


def test_lora_gradients_equal_torch_autograd():
    torch = pytest.importorskip("torch")
    clients, labels = small_federation()
    model = GlobalModel.initial(9, 3)
    model.layers[0][...] = np.random.default_rng(5).normal(size=(10, 3))
    rows = np.array([1, 4, 7, 9])
    adapters = [f for c in clients for f in c.lora_factors(rows)]
    ours = per_sample_gradients(model, with_ones(concatenate(clients, rows)), labels[rows], adapters)

    tensors, pieces = [], []
    for client in clients:
        h = torch.from_numpy(client.embeddings[rows])
        for x, layer in zip(client.block_outputs, client.lora.layers, strict=True):
            up = torch.tensor(layer.up, requires_grad=True)
            down = torch.tensor(layer.down, requires_grad=True)
            h = h + client.lora.scale * torch.from_numpy(x[rows]) @ down.T @ up.T
            tensors += [up, down]
        pieces.append(h)
    weights = torch.tensor(model.layers[0][:-1], requires_grad=True)
    bias = torch.tensor(model.layers[0][-1], requires_grad=True)
    logits = torch.cat(pieces, dim=1) @ weights + bias
    losses = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels[rows]), reduction="none")
    for j in range(len(rows)):
        grads = torch.autograd.grad(losses[j], [weights, bias, *tensors], retain_graph=True)
        expected = np.concatenate([g.numpy().ravel() for g in grads])
        np.testing.assert_allclose(ours[j], expected, atol=1e-12)


def test_lora_jacobian_gives_the_same_gradient():
    lora = ParallelLora.initial([4, 3], 5, rank=2, seed=1)
    random = np.random.default_rng(0)
    lora.layers[1].up[...] = random.normal(size=(5, 2))
    blocks = [random.normal(size=(6, 4)), random.normal(size=(6, 3))]
    at_embedding = random.normal(size=(6, 5))
    jacobian = lora.jacobian(1, blocks[1])
    up, down = lora.gradients(blocks, at_embedding)[1]
    np.testing.assert_allclose(
        np.einsum("jd,jdn->n", at_embedding, jacobian), np.concatenate([up.ravel(), down.ravel()]), atol=1e-12
    )


@pytest.mark.parametrize(
    ("choice", "count", "blocks"),
    [
        ("all", 3, (0, 1, 2)),
        ("first", 3, (0,)),
        ("last", 3, (2,)),
        ("3, 1", 3, (0, 2)),
        ("2", 2, (1,)),
        ("last", 1, (0,)),
    ],
)
def test_layers_are_chosen_by_word_or_number(choice, count, blocks):
    assert choose_layers(choice, count) == blocks


@pytest.mark.parametrize("choice", ["0", "4", "-1", "1,1", "1,", "", "middle", "first,last", "²", "1.0"])
def test_layers_that_do_not_exist_are_refused(choice):
    with pytest.raises(InvalidArgument) as refused:
        choose_layers(choice, 3, "client 2")
    assert str(refused.value) == (
        f"lora_layers = {choice!r}: must be all, first, last, or different numbers from 1 to 3 with commas between "
        f"them; "
        "client 2 has 3 blocks"
    )


def test_lora_starts_as_the_frozen_model():
    lora = ParallelLora.initial([4], 5)
    assert np.abs(lora.output([np.ones((2, 4))])).max() == 0
    assert lora.scale == 1 / 8
    assert lora.layers[0].up.shape == (5, 8)


@given(
    st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4), st.integers(1, 5)),
    st.integers(0, 2**31),
    st.floats(1e-4, 10.0),
    st.booleans(),
)
def test_kronecker_ridge_equals_dense_ridge(shape, seed, lam, with_down):
    batch, width, rank, m = shape
    random = np.random.default_rng(seed)
    x, down, up = (
        random.normal(size=(batch, m)),
        random.normal(size=(rank, m)),
        random.normal(size=(width, rank)),
    )
    a, scale = x @ down.T, 0.125
    y_up = random.normal(size=(width, rank))
    y_down = random.normal(size=(rank, m)) if with_down else None
    right = y_up.ravel() if y_down is None else np.concatenate([y_up.ravel(), y_down.ravel()])
    dense = dense_system(a, x, up, scale, with_down=with_down)
    expected = np.linalg.solve(dense.T @ dense + lam * np.eye(batch * width), dense.T @ right)
    for solver in ("direct", "lsqr"):
        got = estimate_per_sample_gradients(y_up, y_down, a, x, up, scale, regularisation=lam, solver=solver)
        np.testing.assert_allclose(got.ravel(), expected, rtol=1e-6, atol=1e-7 * np.abs(expected).max())


@pytest.mark.parametrize("with_down", [False, True])
def test_least_squares_is_the_smallest_norm_solution(with_down):
    random = np.random.default_rng(2)
    x, down, up = random.normal(size=(5, 4)), random.normal(size=(2, 4)), random.normal(size=(3, 2))
    y_up, y_down = random.normal(size=(3, 2)), random.normal(size=(2, 4)) if with_down else None
    dense = dense_system(x @ down.T, x, up, 0.5, with_down=with_down)
    right = y_up.ravel() if y_down is None else np.concatenate([y_up.ravel(), y_down.ravel()])
    got = estimate_per_sample_gradients(y_up, y_down, x @ down.T, x, up, 0.5, estimator="ls")
    np.testing.assert_allclose(got.ravel(), np.linalg.pinv(dense) @ right, atol=1e-9)


@pytest.mark.parametrize("lam", [0.0, 0.3])
def test_estimate_from_jacobian_equals_the_factored_one(lam):
    clients, _ = small_federation()
    client, rows = clients[0], np.arange(4)
    factor = client.lora_factors(rows)[0]
    released = np.random.default_rng(1).normal(size=factor.num_parameters)
    up, down = factor.split(released)
    estimator = "ridge" if lam else "ls"
    fast = estimate_per_sample_gradients(
        up,
        down,
        factor.projected,
        factor.inputs,
        factor.up,
        factor.scale,
        estimator=estimator,
        regularisation=lam,
    )
    slow = estimate_from_jacobian(released, client.layer_jacobian(rows, 0), estimator=estimator, regularisation=lam)
    np.testing.assert_allclose(fast, slow, atol=1e-8)


def test_noiseless_overdetermined_estimate_is_exact():
    random = np.random.default_rng(4)
    batch, width, rank = 3, 4, 6
    x, down, up = random.normal(size=(batch, 8)), random.normal(size=(rank, 8)), np.zeros((width, rank))
    q = random.normal(size=(batch, width))
    y_up = 0.125 * q.T @ (x @ down.T)
    got = estimate_per_sample_gradients(y_up, None, x @ down.T, x, up, 0.125, estimator="ls")
    np.testing.assert_allclose(got, q, atol=1e-9)


def test_variance_term_of_the_error_bound_is_measured():
    random = np.random.default_rng(6)
    batch, width, rank, m, scale, lam, std = 5, 3, 2, 4, 0.5, 0.02, 0.1
    x, down, up = (
        random.normal(size=(batch, m)),
        random.normal(size=(rank, m)),
        random.normal(size=(width, rank)),
    )
    a = x @ down.T
    errors = []
    for _ in range(4000):
        noise_up, noise_down = random.normal(size=(width, rank)) * std, random.normal(size=(rank, m)) * std
        e = estimate_per_sample_gradients(noise_up, noise_down, a, x, up, scale, regularisation=lam)
        errors.append((e**2).sum())
    bound = error_bound(
        a, x, up, scale, with_down=True, noise_std=std, regularisation=lam, clip_norm=1.0, signal_bound=1.0
    )
    assert np.mean(errors) == pytest.approx(bound.variance, rel=0.05)
    assert bound.bound >= bound.variance and bound.paper > 0


def test_regulariser_rules():
    assert regulariser("noise", noise_std=0.5) == 0.25
    assert regulariser("paper", noise_std=0.5, noise_row_norm=2.0) == 1.0
    assert regulariser("mmse", noise_std=0.5, prior_variance=0.1) == pytest.approx(2.5)
    assert regulariser(0.3, noise_std=0.5) == 0.3
    with pytest.raises(ValueError, match="lambda = 'other'"):
        regulariser("other", noise_std=0.5)
    with pytest.raises(ValueError, match="prior_variance"):
        regulariser("mmse", noise_std=0.5)


def test_released_update_uses_nothing_but_the_release():
    update = LocalUpdate(kind="released", learning_rate=0.1)
    clients, _ = small_federation(update=update)
    client = clients[0]
    before = [(l.up.copy(), l.down.copy()) for l in client.lora.layers]
    n = sum(f.num_parameters for f in client.lora_factors(slice(0, 4)))
    released = np.random.default_rng(8).normal(size=n)
    # Other rows in the batch: the same update, because only the released vector is applied.
    twin = small_federation(update=update)[0][0]
    client.receive_gradient(np.arange(4), released, step=0)
    twin.receive_gradient(np.arange(6, 10), released, step=0)
    for layer, other, (up, down) in zip(client.lora.layers, twin.lora.layers, before, strict=True):
        np.testing.assert_array_equal(layer.up, other.up)
        np.testing.assert_array_equal(layer.down, other.down)
        assert np.abs(layer.up - up).max() > 0 and np.abs(layer.down - down).max() > 0


@pytest.mark.parametrize("estimator", ["ls", "ridge", "mmse"])
def test_estimated_update_without_noise_descends(estimator):
    update = LocalUpdate(kind="estimated", learning_rate=0.5, estimator=estimator)
    clients, labels = small_federation(update=update)
    model = GlobalModel.initial(9, 3)
    model.layers[0][...] = np.random.default_rng(5).normal(size=(10, 3))
    rows = np.arange(12)
    losses = []
    for step in range(30):
        adapters = [f for c in clients for f in c.lora_factors(rows)]
        assert len(adapters) == 2  # one shared layer per client
        result = clipped_gradient(model, with_ones(concatenate(clients, rows)), labels, 5.0, adapters=adapters)
        losses.append(result.losses.mean())
        start = model.num_parameters
        for client, adapter in zip(clients, adapters, strict=True):
            part = result.total[start : start + adapter.num_parameters] / 12
            client.receive_gradient(rows, part, step=step, noise_std=1e-3, clip_norm=5.0)
            start += adapter.num_parameters
    assert losses[-1] < 0.8 * losses[0]
    assert len(clients[0].estimate_log) == 30
    assert clients[0].estimate_log[0].error.variance > 0


def test_row_bound_holds_with_adapters():
    clients, _ = small_federation(row_norm=0.7)
    assert np.linalg.norm(clients[0].embedding_rows(), axis=1).max() <= 0.7
    with pytest.raises(ValueError, match="released"):
        clients[0].receive_gradient(np.arange(3), np.zeros(3), step=0)
