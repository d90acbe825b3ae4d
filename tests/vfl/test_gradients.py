"""Factored = explicit = torch autograd = Opacus, and the clip really clips."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vfl.gradients import AdapterFactors, GlobalModel, clipped_gradient, per_sample_gradients, with_ones

SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 7), st.integers(2, 6), st.sampled_from([(), (5,), (4, 3)]))


def random_case(shape, seed, with_adapters):
    batch, width, classes, hidden = shape
    random = np.random.default_rng(seed)
    model = GlobalModel.initial(width + 2, classes, hidden)
    model.layers = [random.normal(size=layer.shape) for layer in model.layers]
    rows = with_ones(random.normal(size=(batch, width + 2)) * 2)
    labels = random.integers(0, classes, batch)
    adapters = []
    if with_adapters:
        for columns, parts in ((slice(0, width), "UV"), (slice(width, width + 2), "U")):
            size = columns.stop - columns.start
            adapters.append(
                AdapterFactors(
                    columns,
                    random.normal(size=(batch, 3)),
                    random.normal(size=(batch, 4)),
                    random.normal(size=(size, 3)),
                    0.125,
                    parts,
                )
            )
    return model, rows, labels, adapters


@given(SHAPES, st.integers(0, 2**31), st.floats(0.05, 20.0), st.booleans())
def test_factored_equals_explicit(shape, seed, clip_norm, with_adapters):
    model, rows, labels, adapters = random_case(shape, seed, with_adapters)
    fast = clipped_gradient(model, rows, labels, clip_norm, adapters=adapters)
    slow = clipped_gradient(model, rows, labels, clip_norm, adapters=adapters, method="explicit")
    np.testing.assert_allclose(fast.clip_factors, slow.clip_factors, rtol=1e-10)
    np.testing.assert_allclose(fast.total, slow.total, rtol=1e-9, atol=1e-11 * clip_norm)


@given(SHAPES, st.integers(0, 2**31), st.floats(0.05, 20.0))
def test_no_contribution_exceeds_the_clip_norm(shape, seed, clip_norm):
    model, rows, labels, adapters = random_case(shape, seed, True)
    factors = clipped_gradient(model, rows, labels, clip_norm, adapters=adapters).clip_factors
    norms = np.linalg.norm(per_sample_gradients(model, rows, labels, adapters), axis=1)
    assert (norms * factors <= clip_norm * (1 + 1e-12)).all()
    unclipped = norms < clip_norm * (1 - 1e-9)
    np.testing.assert_array_equal(factors[unclipped], 1.0)


def test_no_clip_norm_gives_the_plain_sum():
    model, rows, labels, _ = random_case((8, 5, 3, (4,)), 1, False)
    total = clipped_gradient(model, rows, labels, None).total
    np.testing.assert_allclose(total, per_sample_gradients(model, rows, labels).sum(axis=0), rtol=1e-10)


@pytest.mark.parametrize("hidden", [(), (7,), (6, 5)])
def test_agrees_with_opacus(hidden):
    torch = pytest.importorskip("torch")
    grad_sample = pytest.importorskip("opacus.grad_sample")
    batch, width, classes = 11, 9, 4
    random = np.random.default_rng(3)
    model = GlobalModel.initial(width, classes, hidden)
    model.layers = [random.normal(size=layer.shape) for layer in model.layers]
    rows, labels = random.normal(size=(batch, width)), random.integers(0, classes, batch)
    modules, sizes = [], [width, *hidden, classes]
    for i, layer in enumerate(model.layers):
        linear = torch.nn.Linear(sizes[i], sizes[i + 1], dtype=torch.float64)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(layer[:-1].T.copy()))
            linear.bias.copy_(torch.from_numpy(layer[-1].copy()))
        modules += [linear] if i == len(model.layers) - 1 else [linear, torch.nn.ReLU()]
    wrapped = grad_sample.GradSampleModule(torch.nn.Sequential(*modules), loss_reduction="sum")
    inputs = torch.from_numpy(rows).requires_grad_()  # opacus warns of inputs without
    loss = torch.nn.functional.cross_entropy(wrapped(inputs), torch.from_numpy(labels), reduction="sum")
    loss.backward()
    expected = []
    for module in wrapped._module:
        if isinstance(module, torch.nn.Linear):
            weight = module.weight.grad_sample.numpy().transpose(0, 2, 1)
            layer = np.concatenate([weight, module.bias.grad_sample.numpy()[:, None, :]], axis=1)
            expected.append(layer.reshape(batch, -1))
    theirs = np.concatenate(expected, axis=1)
    np.testing.assert_allclose(per_sample_gradients(model, with_ones(rows), labels), theirs, atol=1e-12)
    clip = np.median(np.linalg.norm(theirs, axis=1))
    factors = 1 / np.maximum(1, np.linalg.norm(theirs, axis=1) / clip)
    ours = clipped_gradient(model, with_ones(rows), labels, clip).total
    np.testing.assert_allclose(ours, factors @ theirs, atol=1e-12)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan")])
def test_bad_clip_norm_is_named(bad):
    model, rows, labels, _ = random_case((2, 2, 2, ()), 0, False)
    with pytest.raises(ValueError, match="clip_norm = "):
        clipped_gradient(model, rows, labels, bad)
