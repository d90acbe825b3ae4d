"""Optimised Toeplitz coefficients: gradients, never worse than truncated roots, exact integers, sensitivity by brute
force."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import toeplitz
from scipy.optimize import approx_fprime

from accel.prg import KEY_BYTES, Stream
from tests.not_none import not_none
from vfl.dp import (
    NoiseFilter,
    NoiseSource,
    Padding,
    calibrate_matrix_factorisation,
    calibrate_secret_order,
    certificate_cache,
    factorise,
    workload_factorisation,
)
from vfl.dp.factorisation import Factorisation, root_coefficients
from vfl.dp.secret_order import BandSearch, amplified_factorisation
from vfl.dp.toeplitz import NoiseObjective, optimised_strategy, optimised_taps

WORKLOADS = [(1.0, 0.0), (1.0, 0.9), (0.99, 0.5)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PPVFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(certificate_cache, "_memory", {})


def lower(column: np.ndarray) -> np.ndarray:
    return toeplitz(column, np.zeros(len(column)))


def product(f: Factorisation, b: int) -> float:
    return f.sensitivity(-(-f.num_steps // b), b) * f.workload_error("mean")


@pytest.mark.parametrize("steps,b", [(20, 5), (17, 5), (9, 9)])
@pytest.mark.parametrize("own", [1.0, 0.3])
def test_the_objective_and_its_gradients_equal_dense_matrices(steps, b, own):
    alpha, beta = 0.99, 0.5
    objective = NoiseObjective(steps, b, alpha, beta, own)
    c = np.abs(np.random.default_rng(steps).normal(size=steps))
    c[0] = 1.0
    j = np.arange(steps)
    workload = lower((alpha ** (j + 1) - beta ** (j + 1)) / (alpha - beta))
    omega = lower(c)
    d = np.linalg.inv(omega)[:, 0]
    assert objective.error(d)[0] == pytest.approx(np.linalg.norm(workload @ lower(d)) ** 2 / steps)
    one, every = omega[:, ::b].sum(axis=1), omega.sum(axis=1)
    assert objective.sensitivity(c)[0] == pytest.approx(own * one @ one + (1 - own) * every @ every / b)
    for function, at in ((objective.error, d), (objective.sensitivity, c)):
        numeric = approx_fprime(at, lambda x, f=function: f(x)[0], 1e-7)
        assert np.allclose(function(at)[1], numeric, rtol=1e-4, atol=1e-4 * np.abs(numeric).max())
    through = objective.inverse_gradient(d, objective.error(d)[1])
    # the inverse of c is d: the error as a function of c
    numeric = approx_fprime(c, lambda x: objective.error(np.linalg.inv(lower(x))[:, 0])[0], 1e-7)
    assert np.allclose(through, numeric, rtol=1e-3, atol=1e-3 * np.abs(numeric).max())


@given(b=st.integers(1, 16), epochs=st.integers(1, 6), bands=st.integers(1, 24), workload=st.sampled_from(WORKLOADS))
@settings(max_examples=15)
def test_never_worse_than_truncated_roots_of_the_same_band(b, epochs, bands, workload):
    (alpha, beta), steps = workload, b * epochs
    bands = min(bands, steps)
    made = {"weight_decay": alpha, "momentum": beta, "bands": bands}
    bisr, bsr = (product(factorise(kind, steps, **made), b) for kind in ("bisr", "bsr"))
    linear = factorise("toeplitz", steps, **made, min_separation=b, linear=True)
    either = factorise("toeplitz", steps, **made, min_separation=b)
    assert not linear.is_recursive and product(linear, b) <= bisr * (1 + 1e-12)
    assert product(either, b) <= min(bisr, bsr, product(linear, b)) * (1 + 1e-12)
    for f in (linear, either):
        assert f.bands <= bands and np.all(f.strategy_coefficients() >= 0)
        assert f.sensitivity_report(epochs, b).exact


def test_what_is_gained_where_we_train():
    """CIFAR-10 in our settings: 50 batches, 20 epochs (proofs §5.5)."""
    products = {kind: product(workload_factorisation(kind, 1000, 50), 50) for kind in ("bisr", "bsr", "toeplitz")}
    filtered = workload_factorisation("toeplitz", 1000, 50, linear=True)
    assert products == pytest.approx({"bisr": 20.92, "bsr": 20.98, "toeplitz": 19.23}, abs=0.01)
    assert product(filtered, 50) == pytest.approx(20.38, abs=0.01) and filtered.bands < 20
    short = factorise("toeplitz", 1000, bands=8, min_separation=50)
    assert product(short, 50) < 0.7 * product(factorise("bisr", 1000, bands=8), 50)


def test_a_local_minimum():
    """No single coefficient can be moved to gain more than the tolerance."""
    steps, b = 60, 12
    for optimised, inverse in ((optimised_taps, True), (optimised_strategy, False)):
        found = optimised(root_coefficients(1.0, 0.0, 10, inverse=inverse), steps, b)

        def value(x: np.ndarray, inverse: bool = inverse) -> float:
            first = np.zeros(steps)
            first[: len(x)] = x
            other = np.linalg.inv(lower(first))[:, 0]
            taps, strategy = (first, other) if inverse else (other, first)
            objective = NoiseObjective(steps, b, 1.0, 0.0, 1.0)
            return float(np.log(objective.error(taps)[0] * objective.sensitivity(strategy)[0]))

        best = value(found)
        for k, move in itertools.product(range(1, 10), (1e-3, -1e-3)):
            other = found.copy()
            other[k] += move
            allowed = other[k] <= 0 if inverse else other[k] >= 0
            assert not allowed or value(other) > best - 1e-6


@pytest.mark.parametrize("steps,b", [(6, 2), (9, 3), (11, 3), (12, 4)])
@pytest.mark.parametrize("linear", [True, False])
def test_sensitivity_equals_brute_force(steps, b, linear):
    for bands, beta in itertools.product((1, 2, 3, steps), (0.0, 0.9)):
        f = factorise("toeplitz", steps, momentum=beta, bands=bands, min_separation=b, linear=linear)
        omega = lower(f.strategy_coefficients())
        for kappa in range(1, -(-steps // b) + 1):
            columns = [list(range(i, steps, b))[:kappa] for i in range(b)]
            brute = max(np.linalg.norm(omega[:, own].sum(axis=1)) for own in columns)
            assert f.sensitivity(kappa, b) == pytest.approx(brute, rel=1e-12)


@pytest.mark.parametrize("linear", [True, False])
def test_integers_run_exactly(linear):
    f = factorise("toeplitz", 60, bands=8, min_separation=8, linear=linear)
    assert f.is_recursive != linear
    z = np.random.default_rng(0).integers(-(2**40), 2**40, (60, 3))
    out = NoiseFilter(f, 3).next_block(z)
    if linear:
        taps = not_none(f.integer_taps)
        assert taps[0] == 2**16 and np.all(taps[1:] <= 0) and taps[-1] < 0
        for t in range(60):
            want = [sum(int(taps[k]) * int(z[t - k, j]) for k in range(min(t + 1, f.bands))) for j in range(3)]
            assert out[t].tolist() == want
    else:
        strategy = not_none(f.integer_strategy)
        assert strategy[0] == 2**20 and np.all(strategy >= 0)
        released = (out >> f.tap_bits).astype(object)
        for t in range(60):
            past = sum(int(strategy[k]) * released[t - k] for k in range(1, min(t + 1, f.bands)))
            assert np.all(abs(released[t] - z[t] + past / 2**20) <= 0.5 + 1e-9)


def test_a_run_that_resumes_draws_the_same_noise():
    def stream(step: int) -> Stream:
        return Stream(step.to_bytes(KEY_BYTES, "little"))

    for linear in (True, False):
        f = factorise("toeplitz", 30, bands=6, min_separation=6, linear=linear)
        whole, later = NoiseSource(f, 4, 1e6, stream), NoiseSource(f, 4, 1e6, stream, start=17)
        rows = [whole.next_row() for _ in range(30)]
        assert all(np.array_equal(row, later.next_row()) for row in rows[17:])


def test_kept_on_disk_and_checked_when_read(tmp_path, monkeypatch):
    monkeypatch.setenv("PPVFL_CACHE", str(tmp_path))
    f = factorise("toeplitz", 40, bands=5, min_separation=10, linear=True)
    (file,) = tmp_path.glob("toeplitz-*.json")
    monkeypatch.setattr(certificate_cache, "_memory", {})
    again = factorise("toeplitz", 40, bands=5, min_separation=10, linear=True)
    assert again.digest == f.digest and again == f
    content = json.loads(file.read_text())
    content["result"]["taps"] = [2**16, 2**15]  # ĉ alternates
    file.write_text(json.dumps(content))
    monkeypatch.setattr(certificate_cache, "_memory", {})
    with pytest.raises(ValueError, match="without negative coefficients"):
        factorise("toeplitz", 40, bands=5, min_separation=10, linear=True)


def test_claims_name_it_and_less_noise_is_needed():
    claims = {}
    for kind in ("bisr", "toeplitz"):
        f = workload_factorisation(kind, 200, 20)
        noise = calibrate_matrix_factorisation(1.0, 1e-5, 1.0, f, 10, 20)
        claims[kind] = noise.target_std * f.workload_error("mean"), noise.claim.mechanism
    assert claims["toeplitz"][0] < 0.92 * claims["bisr"][0]
    assert "optimised Toeplitz strategy, 20 bands" in claims["toeplitz"][1]


SHAPE = Padding(60, 4, 20)
SECRET: dict[str, Any] = {"weight_decay": 1.0, "momentum": 0.0, "delta": 1e-3}


def test_a_secret_order_takes_filters_only_and_leaves_more_to_the_order():
    few = amplified_factorisation("toeplitz", SHAPE, 3, epsilon=0.5, **SECRET)
    known = factorise("toeplitz", 12, bands=4, min_separation=4, linear=True)
    # at small ε less of the noise cancels: the sum of the taps is larger
    assert not few.is_recursive and few.noising_taps.sum() > known.noising_taps.sum() + 0.05
    claim = calibrate_secret_order(0.5, 1e-3, 1.0, few, SHAPE, 3).claim
    assert "optimised Toeplitz filter" in claim.mechanism
    recursive = factorise("toeplitz", 12, bands=4, min_separation=4)
    assert recursive.is_recursive
    with pytest.raises(ValueError, match="a toeplitz filter with a secret order"):
        calibrate_secret_order(0.5, 1e-3, 1.0, recursive, SHAPE, 3)


@pytest.mark.heavy
@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_with_a_secret_order_it_is_not_worse_than_bisr(epsilon):
    shape = Padding(200, 10, 26)
    search = BandSearch("toeplitz", shape, 3, 1.0, 0.0, epsilon, 1e-3)
    found, bisr = (amplified_factorisation(k, shape, 3, epsilon=epsilon, **SECRET) for k in ("toeplitz", "bisr"))
    assert search.score(found) < 1.01 * search.score(bisr)  # both σ are sampled, to half a percent


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"min_separation = None: must be an integer .*toeplitz is optimised for it"):
        factorise("toeplitz", 10)
    with pytest.raises(ValueError, match=r"own = 0: must be"):
        factorise("toeplitz", 10, min_separation=5, own=0)
    with pytest.raises(ValueError, match=r"start = '3 coefficients': must be from 1 to num_steps = 2"):
        optimised_taps(np.array([1.0, 0.0, 0.0]), 2, 1)
