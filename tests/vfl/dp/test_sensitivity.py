"""Sensitivities against brute force over all participation patterns and signs."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import toeplitz

from vfl.dp.factorisation import factorise, root_coefficients
from vfl.dp.sensitivity import fixed_order, gram_bound, participation_sensitivity


def lower(column):
    return toeplitz(column, np.zeros(len(column)))


def patterns(steps, kappa, b, exact):
    """All sets of at most κ steps at least b apart (or exactly b apart)."""
    if exact:
        return [tuple(range(i, steps, b))[:kappa] for i in range(steps)]
    return [
        chosen
        for size in range(1, kappa + 1)
        for chosen in itertools.combinations(range(steps), size)
        if all(y - x >= b for x, y in itertools.pairwise(chosen))
    ]


@pytest.mark.parametrize("kind", ["bisr", "bsr"])
@pytest.mark.parametrize("steps,b", [(6, 2), (9, 3), (10, 4), (11, 3), (12, 4), (12, 5)])
def test_theorem_2_equals_brute_force_over_all_patterns(kind, steps, b):
    for bands in range(1, steps + 1):
        for beta in (0.0, 0.9):
            f = factorise(kind, steps, momentum=beta, bands=bands)
            omega = lower(f.strategy_coefficients())
            for kappa in range(1, -(-steps // b) + 1):
                report = f.sensitivity_report(kappa, b)
                assert report.exact and report.method.startswith("sum of columns")
                brute = max(np.linalg.norm(omega[:, list(p)].sum(axis=1)) for p in patterns(steps, kappa, b, False))
                assert report.value == pytest.approx(brute, rel=1e-12)


def test_root_kappa_times_norm_is_wrong_beyond_b_and_is_not_used():
    steps, b, kappa = 12, 4, 3
    for bands in (3, 5, 8):
        c = np.zeros(steps)
        c[:bands] = root_coefficients(1.0, 0.9, bands)
        value = participation_sensitivity(c, kappa, b).value
        shortcut = np.sqrt(kappa) * np.linalg.norm(c)
        if bands <= b:
            assert value == pytest.approx(shortcut, rel=1e-12)
        else:
            assert value > 1.05 * shortcut  # calibrating by the shortcut would break the claim
            assert (round(shortcut, 2), round(value, 2)) == {5: (3.52, 3.87), 8: (4.18, 5.16)}[bands]


@given(seed=st.integers(0, 10**6), steps=st.integers(2, 14), b=st.integers(1, 5), bands=st.integers(1, 14))
def test_the_gram_bound_equals_dense_and_covers_every_sign(seed, steps, b, bands):
    rng = np.random.default_rng(seed)
    b = min(b, steps)
    c = np.zeros(steps)
    c[: min(bands, steps)] = rng.normal(size=min(bands, steps))
    c[0] = 1.0
    omega = lower(c)
    kappa = int(rng.integers(1, -(-steps // b) + 1))
    dense = 0.0
    for pattern in patterns(steps, kappa, b, True):
        columns = omega[:, list(pattern)]
        dense = max(dense, np.abs(columns.T @ columns).sum())
        for signs in itertools.product((-1, 1), repeat=min(len(pattern), 6)):
            part = columns[:, : len(signs)] @ np.array(signs)
            assert np.linalg.norm(part) <= gram_bound(c, kappa, b) * (1 + 1e-12)
    assert gram_bound(c, kappa, b) == pytest.approx(np.sqrt(dense), rel=1e-10)
    report = participation_sensitivity(c, kappa, b)
    if not (np.all(c >= 0) and np.all(np.diff(c) <= 0)):
        assert report.value == pytest.approx(np.sqrt(dense), rel=1e-10)
        assert report.method.startswith("Gram")


def test_the_gram_bound_agrees_with_theorem_2_where_both_apply():
    f = factorise("bisr", 400, bands=30, momentum=0.9)
    c = f.strategy_coefficients()
    assert gram_bound(c, 8, 50) == pytest.approx(participation_sensitivity(c, 8, 50).value, rel=1e-12)


def test_quantised_taps_of_a_banded_strategy_need_the_gram_bound():
    """Proofs §5.3: quantised Ω⁻¹ of BSR: Ω̂ is no longer non-negative or decreasing; 12 bits."""
    from scipy.signal import lfilter

    impulse = np.zeros(7800)
    impulse[0] = 1.0
    taps = lfilter([1.0], root_coefficients(1.0, 0.0, 390), impulse)
    quantised = np.round(taps * 2**12) / 2**12
    strategy = lfilter([1.0], quantised, impulse)
    report = participation_sensitivity(strategy, 20, 390)
    assert strategy.min() < 0 and report.method.startswith("Gram")
    assert report.value == pytest.approx(9.435, rel=2e-3)


def test_participation_of_the_papers_runs():
    run = fixed_order(50_000, 128, 20)
    assert (run.min_separation, run.max_participations, run.num_steps, run.dropped) == (390, 20, 7800, 80)


@pytest.mark.parametrize(
    "call,match",
    [
        (lambda: fixed_order(100, 101, 1), r"batch_size = 101: .* from 1 to 100; a batch cannot be larger"),
        (lambda: fixed_order(100, 10, 0), r"epochs = 0: must be an integer of at least 1"),
        (
            lambda: participation_sensitivity(np.ones(10), 4, 4),
            r"max_participations = 4: .*10 steps hold at most 3",
        ),
        (lambda: participation_sensitivity(np.ones(10), 1, 11), r"min_separation = 11: .* from 1 to 10"),
        (lambda: participation_sensitivity(np.ones(10), 1, 0), r"min_separation = 0"),
    ],
)
def test_bad_input_is_named(call, match):
    with pytest.raises(ValueError, match=match):
        call()
