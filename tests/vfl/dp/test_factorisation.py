"""Factorisations against dense matrices, the published formula, and the figures of proofs §5.3."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import toeplitz

from tests.not_none import not_none
from vfl.dp.factorisation import default_bands, factorise, root_coefficients

SETTINGS = [(1.0, 0.0), (1.0, 0.9), (0.999, 0.5), (0.9, 0.3)]


def lower(column: np.ndarray) -> np.ndarray:
    return toeplitz(column, np.zeros(len(column)))


def workload(steps: int, alpha: float, beta: float) -> np.ndarray:
    j = np.arange(steps)
    return lower((alpha ** (j + 1) - beta ** (j + 1)) / (alpha - beta))


@pytest.mark.parametrize("alpha,beta", SETTINGS)
def test_the_root_squares_to_the_workload_and_equals_theorem_1(alpha, beta):
    steps = 40
    c = root_coefficients(alpha, beta, steps)
    assert np.abs(lower(c) @ lower(c) - workload(steps, alpha, beta)).max() < 1e-12
    r = np.cumprod(np.concatenate([[1.0], (2 * np.arange(1, steps) - 1) / (2 * np.arange(1, steps))]))
    i = np.arange(steps)
    published = np.convolve(alpha**i * r, beta**i * r)[:steps]
    assert np.allclose(c, published, rtol=1e-12)
    d = root_coefficients(alpha, beta, steps, inverse=True)
    assert np.abs(lower(c) @ lower(d) - np.eye(steps)).max() < 1e-12


def test_the_recurrence_is_stable_over_a_long_run():
    steps = 40_000
    c = root_coefficients(1.0, 0.9, steps)
    i = np.arange(steps)
    r = np.cumprod(np.concatenate([[1.0], (2 * i[1:] - 1) / (2 * i[1:])]))
    head = 0.9 ** i[:400] * r[:400]  # β^i is below 10^-18 beyond
    exact = sum(head[k] * r[steps - 1 - k] for k in range(400))
    assert abs(c[-1] / exact - 1) < 1e-9


@pytest.mark.parametrize("kind", ["bisr", "bsr", "identity"])
@given(
    steps=st.integers(1, 30),
    bands=st.integers(1, 30),
    setting=st.sampled_from(SETTINGS),
    bits=st.integers(6, 20),
)
def test_norms_and_errors_equal_dense_matrices(kind, steps, bands, setting, bits):
    alpha, beta = setting
    bands = None if kind == "identity" else min(bands, steps)
    f = factorise(kind, steps, weight_decay=alpha, momentum=beta, bands=bands, tap_bits=bits, strategy_bits=bits)
    if kind == "bsr":
        column = np.zeros(steps)
        column[:bands] = f.integer_strategy / 2**bits
        omega = lower(column)
        inverse = np.linalg.inv(omega)
        assert np.abs(f.integer_strategy / 2**bits - root_coefficients(alpha, beta, bands)).max() <= 2.0**-bits
    else:
        column = np.zeros(steps)
        column[: f.bands] = f.integer_taps / 2**bits
        inverse = lower(column)
        omega = np.linalg.inv(inverse)
        assert f.integer_taps is not None
        assert f.integer_taps[0] == 2**bits and f.integer_taps.dtype == np.int64
        ideal = root_coefficients(alpha, beta, f.bands, inverse=True)
        assert np.abs(column[: f.bands] - ideal).max() <= 2.0**-bits
    assert np.allclose(f.strategy_coefficients(), omega[:, 0], atol=1e-10)
    assert np.allclose(f.noise_norms(), np.linalg.norm(inverse, axis=1), atol=1e-10)
    assert np.allclose(f.noising_taps, inverse[: len(f.noising_taps), 0], atol=1e-10)
    error = np.linalg.norm(workload(steps, alpha, beta) @ inverse, axis=1)
    assert np.isclose(f.workload_error("final"), error[-1], rtol=1e-9)
    assert np.isclose(f.workload_error("mean"), np.sqrt(np.mean(error**2)), rtol=1e-9)
    assert f.strategy_norm >= np.linalg.norm(omega, 2) - 1e-9


@pytest.mark.parametrize(
    "kind,bands,beta,sens,final,product",
    [
        ("identity", None, 0.0, 4.472, 88.3, 395.0),
        ("bsr", 390, 0.0, 7.701, 4.243, 32.67),
        ("bsr", 390, 0.9, 20.12, 13.13, 264.2),
        ("bisr", 8, 0.0, 6.125, 18.54, 113.5),
        ("bisr", 64, 0.0, 7.180, 6.428, 46.15),
        ("bisr", 192, 0.0, 8.289, 3.925, 32.53),
        ("bisr", 256, 0.0, 8.838, 3.498, 30.92),
        ("bisr", 390, 0.0, 9.887, 3.004, 29.70),
        ("bisr", 8, 0.9, 15.20, 38.39, 583.5),
        ("bisr", 192, 0.9, 22.51, 11.90, 267.8),
    ],
)
def test_the_figures_of_protocols(kind, bands, beta, sens, final, product):
    f = factorise(kind, 7800, momentum=beta, bands=bands)
    report = f.sensitivity_report(20, 390)
    assert report.exact
    assert report.value == pytest.approx(sens, rel=1e-3)
    assert f.workload_error() == pytest.approx(final, rel=1e-3)
    assert report.value * f.workload_error() == pytest.approx(product, rel=1e-3)


def test_one_hundred_epochs():
    products = []
    for kind, bands in (("bisr", 256), ("bsr", 390)):
        f = factorise(kind, 39_000, bands=bands)
        products.append(f.sensitivity(100, 390) * f.workload_error())
    assert products == pytest.approx([142.4, 154.9], rel=1e-3)


@pytest.mark.parametrize("b,epochs", [(390, 20), (390, 100), (975, 20), (975, 100)])
@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_the_default_bands_beat_the_papers_choice(b, epochs, beta):
    products = []
    for kind, bands in (("bisr", default_bands(b)), ("bsr", b)):
        f = factorise(kind, b * epochs, momentum=beta, bands=bands)
        products.append(f.sensitivity(epochs, b) * f.workload_error())
    assert products[0] < products[1]


@pytest.mark.parametrize(
    "change,match",
    [
        ({"kind": "dct"}, r"kind = 'dct': must be one of 'bisr', 'bsr', 'toeplitz', 'identity'"),
        ({"num_steps": 0}, r"num_steps = 0: must be an integer of at least 1"),
        ({"bands": 11}, r"bands = 11: must be an integer from 1 to 10; a strategy has at most"),
        ({"momentum": 0.9, "weight_decay": 0.9}, r"momentum = 0.9: must be below weight_decay = 0.9"),
        ({"momentum": -0.1}, r"momentum = -0.1: must be a finite number in \[0, 1\)"),
        ({"weight_decay": 1.1}, r"weight_decay = 1.1: must be a finite number in \(0, 1\]; 1 means no"),
        ({"tap_bits": 30}, r"tap_bits = 30: must be an integer from 1 to 20"),
        ({"kind": "identity", "bands": 3}, r"bands = 3: must be 1 \(or left out\)"),
    ],
)
def test_bad_input_is_named(change, match):
    arguments = {"kind": "bisr", "num_steps": 10} | change
    with pytest.raises(ValueError, match=match):
        factorise(**arguments)


def test_taps_that_round_to_zero_are_dropped():
    f = factorise("bisr", 2000, momentum=0.9, bands=585)
    assert f.integer_taps is not None
    assert f.bands == len(f.integer_taps) == 511 and f.integer_taps[-1] != 0


def test_arrays_cannot_be_changed_and_equality_is_by_parameters():
    f = factorise("bisr", 10, bands=4)
    with pytest.raises(ValueError):
        not_none(f.integer_taps)[0] = 1
    assert f == factorise("bisr", 10, bands=4)
    assert f != factorise("bisr", 10, bands=5)


def test_jax_privacy_agrees():
    pytest.importorskip("jax_privacy")
    import jax

    jax.config.update("jax_enable_x64", True)
    from jax_privacy.matrix_factorization import toeplitz as jp

    steps, b, kappa = 300, 30, 10
    assert np.allclose(root_coefficients(1.0, 0.0, steps), jp.optimal_max_error_strategy_coefs(steps), rtol=1e-9)
    inverse = root_coefficients(1.0, 0.0, steps, inverse=True)
    assert np.allclose(inverse, jp.optimal_max_error_noising_coefs(steps), rtol=1e-9, atol=1e-14)
    for kind in ("bsr", "bisr"):
        for bands in (1, 10, 30, 80):
            for beta in (0.0, 0.9):
                f = factorise(kind, steps, momentum=beta, bands=bands)
                report = f.sensitivity_report(kappa, b)
                assert report.method.startswith("sum of columns")
                theirs = jp.minsep_sensitivity_squared(f.strategy_coefficients(), b, kappa, steps)
                assert report.value**2 == pytest.approx(float(theirs), rel=1e-9)
                taps = np.zeros(steps)
                taps[: len(f.noising_taps)] = f.noising_taps
                assert np.allclose(jp.inverse_coef(f.strategy_coefficients(), steps), taps, atol=1e-9)
