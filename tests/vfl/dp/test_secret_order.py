"""A secret order: small cases by quadrature against the bound, the certificate, the search, and what is refused."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import queue
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from vfl.dp import (
    FixedPointSlack,
    Padding,
    calibrate_matrix_factorisation,
    calibrate_secret_order,
    certificate_cache,
    factorise,
    gaussian_delta,
    padding,
)
from vfl.dp.random_allocation import certificate, convolution, monte_carlo
from vfl.dp.random_allocation.allocation import allocation_every_epoch, allocation_once
from vfl.dp.random_allocation.certificate import certified_noise
from vfl.dp.random_allocation.convolution import COARSE, FINE, convolved_deltas
from vfl.dp.random_allocation.monte_carlo import deltas, samples_for, search_delta, search_sigma
from vfl.run_mechanism import choose_schedule, has_secret_order
from vfl.training import TrainingConfig

GRID = np.linspace(-9.0, 9.0, 361)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PPVFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(certificate_cache, "_memory", {})


# Theorem 7 in small: two batches, exact by quadrature ---------------------------------------------


def density(means: Counter[tuple[float, float]], sigma: float) -> np.ndarray:
    """Density of a mixture of Gaussians in the plane, on the grid; ``means`` counts how often each occurs."""
    total = sum(means.values())
    x, y = np.meshgrid(GRID, GRID, indexing="ij")
    found = np.zeros_like(x)
    for (a, b), count in means.items():
        found += count / total * np.exp(-((x - a) ** 2 + (y - b) ** 2) / (2 * sigma**2))
    return found / (2 * math.pi * sigma**2)


def hockey_stick(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
    step = GRID[1] - GRID[0]
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * step**2)


def shuffled(others: tuple[float, ...], own: float, dummies: int, sigma: float) -> np.ndarray:
    """Sums of two batches when all rows and dummies are shuffled: every order counted."""
    values = (*others, own, *(0.0 for _ in range(dummies)))
    half = len(values) // 2
    means: Counter[tuple[float, float]] = Counter()
    for first in combinations(range(len(values)), half):
        inside = sum(values[i] for i in first)
        means[inside, sum(values) - inside] += 1
    return density(means, sigma)


def bound(records: int, dummies: int, sigma: float, epsilon: float) -> float:
    """Theorem 7 for two batches and one epoch: the mean over the free slots d, both directions."""
    slots = (records + dummies) // 2
    absent = density(Counter({(0.0, 0.0): 1}), sigma)
    total = np.zeros(2)
    for subset in combinations(range(2 * slots), dummies + 1):
        d = sum(slot < slots for slot in subset)
        present = density(Counter({(1.0, 0.0): d, (0.0, 1.0): dummies + 1 - d}), sigma)
        total += hockey_stick(present, absent, epsilon), hockey_stick(absent, present, epsilon)
    return float(total.max() / math.comb(2 * slots, dummies + 1))


@pytest.mark.parametrize("others", [(-1.0, -1.0, -1.0), (1.0, 1.0, 1.0), (-1.0, 0.5, 1.0), (0.0, 0.0, 0.0)])
@pytest.mark.parametrize(("epsilon", "sigma"), [(1.0, 0.5), (0.5, 1.0), (2.0, 0.4)])
def test_the_padded_shuffle_stays_within_the_bound(others, epsilon, sigma):
    with_it, without_it = (shuffled(others, own, 4, sigma) for own in (1.0, 0.0))
    exact = max(hockey_stick(with_it, without_it, epsilon), hockey_stick(without_it, with_it, epsilon))
    assert exact <= bound(4, 4, sigma, epsilon) * (1 + 1e-3)


def test_a_plain_shuffle_does_not():
    """Others −1, the record +1: who knows the others' batches knows the last one, so the sum of all tells."""
    epsilon, sigma, others = 1.0, 0.5, (-1.0, -1.0, -1.0)
    plain, padded = (
        hockey_stick(shuffled(others, 1.0, dummies, sigma), shuffled(others, 0.0, dummies, sigma), epsilon)
        for dummies in (0, 4)
    )
    assert padded <= bound(4, 4, sigma, epsilon) < 0.85 * plain
    # and with no dummies the theorem promises no amplification at all: it is right again
    assert plain <= bound(4, 0, sigma, epsilon) * (1 + 1e-3)
    assert bound(4, 0, sigma, epsilon) == pytest.approx(gaussian_delta(sigma, epsilon), rel=1e-2)


@pytest.mark.parametrize("share", [0.5, 0.2])
@pytest.mark.parametrize("rule", [np.sign, np.cos, lambda x: -np.ones_like(x), lambda x: np.where(x > 0.3, 1.0, -0.2)])
def test_gradients_that_follow_earlier_releases_are_no_worse(rule, share):
    """Two correlated steps: in batch 1 the record moves step 1 by one and step 2 by c; in batch 2 it moves step 2 by
    what it likes, having seen step 1, of norm at most one. δ at arbitrary π against the modes (1, c) and (0, 1)."""
    sigma, epsilon, c = 0.6, 0.7, 0.5
    x, y = np.meshgrid(GRID, GRID, indexing="ij")

    def normal(a, b):
        return np.exp(-((x - a) ** 2 + (y - b) ** 2) / (2 * sigma**2)) / (2 * math.pi * sigma**2)

    absent = normal(0.0, 0.0)
    adaptive = share * normal(1.0, c) + (1 - share) * normal(0.0, rule(x))
    modes = share * normal(1.0, c) + (1 - share) * normal(0.0, 1.0)
    for one, other in (((adaptive, absent), (modes, absent)), ((absent, adaptive), (absent, modes))):
        assert hockey_stick(*one, epsilon) <= hockey_stick(*other, epsilon) * (1 + 1e-6) + 1e-9


def test_sampling_agrees_with_quadrature():
    allocation = allocation_every_epoch(Padding(4, 2, 4), 1)
    exact = bound(4, 4, 0.5, 1.0)
    assert max(deltas(allocation, 0.5, 1.0, 1 << 17, 3)) == pytest.approx(exact, rel=0.02)
    assert exact * (1 - 1e-4) <= max(convolved_deltas(allocation, 0.5, 1.0, exact)) <= 1.005 * exact
    once = allocation_once(Padding(4, 2, 4), 1, factorise("identity", 2), -60)
    assert max(deltas(once, 0.5, 1.0, 1 << 17, 3)) == pytest.approx(bound(4, 4, 0.5, 1.0), rel=0.02)


# the modes -----------------------------------------------------------------------------------------


def test_modes_are_columns_of_the_strategy_summed_over_epochs():
    factorisation, shape = factorise("bisr", 12, bands=3), Padding(20, 4, 7)
    c = factorisation.strategy_coefficients()
    omega = np.sum([np.diag(np.full(12 - k, c[k]), -k) for k in range(12)], axis=0)
    grid = 2.0**-10
    modes = np.stack([omega[:, i::4].sum(axis=1) for i in range(4)], axis=1)
    modes += grid * (np.arange(12)[:, None] >= np.arange(4))
    allocation = allocation_once(shape, 3, factorisation, -10)
    np.testing.assert_allclose(allocation.gram * allocation.scale**2, modes.T @ modes, rtol=1e-8)
    np.testing.assert_allclose(allocation.cholesky @ allocation.cholesky.T, allocation.gram, atol=1e-9)
    assert allocation.scale >= factorisation.sensitivity(3, 4)


@pytest.mark.parametrize("epochs", [1, 4])
def test_one_batch_is_the_analytic_gaussian(epochs):
    """Nothing to allocate: plain samples, samples by importance, and convolution, which is never below."""
    shape = Padding(10, 1, 16)
    every, once = (
        allocation_every_epoch(shape, epochs),
        allocation_once(shape, epochs, factorise("identity", epochs), -60),
    )
    exact, many = gaussian_delta(1.5, 1.0), 1.5 * math.sqrt(epochs)
    assert deltas(every, many, 1.0, 1 << 16, 7) == pytest.approx((exact, exact), rel=0.05)
    assert deltas(once, 1.5, 1.0, 1 << 16, 7) == pytest.approx((exact, exact), rel=0.05)
    assert search_delta(once, 1.5, 1.0) == pytest.approx(exact, rel=0.03)
    for allocation, factor in ((every, math.sqrt(epochs)), (once, 1.0)):
        for sigma, epsilon in ((0.7, 6.0), (1.5, 1.0), (3.0, 1.0), (12.0, 0.2)):
            exact = gaussian_delta(sigma, epsilon)
            for found in convolved_deltas(allocation, sigma * factor, epsilon, exact):
                assert exact <= found <= (1.12 if epsilon == 6.0 else 1.01) * exact


@pytest.mark.parametrize("kind", ["identity", "bisr"])
def test_the_search_agrees_with_plain_samples(kind):
    shape, sigma = padding(600, 50), 0.8
    allocation = allocation_once(shape, 3, factorise(kind, 36, bands=None if kind == "identity" else 4), -16)
    plain = max(deltas(allocation, sigma, 1.5, 1 << 17, 11))
    assert plain > 1e-3  # some hundred samples count
    assert search_delta(allocation, sigma, 1.5) == pytest.approx(plain, rel=0.12)


@pytest.mark.parametrize(
    ("shape", "epochs", "sigma", "epsilon"),
    [
        (padding(600, 50), 3, 0.9, 1.5),  # twelve batches
        (Padding(40, 3, 20), 4, 2.5, 1.0),  # few, and many dummies: both directions count
        (padding(200, 20), 2, 0.55, 4.0),  # lognormals that reach far
        (Padding(9, 2, 5), 1, 1.0, 0.5),  # one dummy
    ],
)
def test_convolution_agrees_with_plain_samples_and_is_not_below(shape, epochs, sigma, epsilon):
    allocation, samples = allocation_every_epoch(shape, epochs), 1 << 17
    plain = deltas(allocation, sigma, epsilon, samples, 5)
    fine, coarse = (convolved_deltas(allocation, sigma, epsilon, max(plain), fineness=f) for f in (FINE, COARSE))
    assert max(plain) > 1e-3
    for sampled, computed, rough in zip(plain, fine, coarse, strict=True):
        off = 5 * math.sqrt(sampled / samples)  # of a mean of numbers in [0, 1], five deviations at most
        assert sampled - off <= computed <= 1.01 * sampled + off + 1e-5
        assert computed <= rough * (1 + 1e-6)


def test_sums_that_leave_the_grid_count_as_lost(monkeypatch):
    """A grid on which sums come back at its start, against one that is eight times as long with the same terms."""
    allocation, sigma, step, cells = allocation_every_epoch(Padding(9, 4, 5), 1), 1.0, 0.02, 64
    short = convolution._law(allocation, sigma, step, cells, with_record=True)
    spread = convolution._spread

    def cut(scale, sigma, step, count, *, keep_top):
        return np.concatenate([spread(scale, sigma, step, cells, keep_top=keep_top), np.zeros(count - cells)])

    monkeypatch.setattr(convolution, "_spread", cut)
    long = convolution._law(allocation, sigma, step, 8 * cells, with_record=True)
    wrapped, dropped = float(long.masses[cells:].sum()), 1 - float(long.masses.sum())
    assert wrapped > 0.1 and dropped > 0.1
    assert wrapped + dropped <= short.lost <= 1.1 * (wrapped + dropped)


def test_convolution_is_for_independent_noise_only():
    correlated = allocation_once(padding(600, 50), 3, factorise("bisr", 36, bands=4), -16)
    with pytest.raises(ValueError, match="one with independent noise"):
        convolved_deltas(correlated, 1.0, 1.0, 1e-3)


# the certificate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [1e-2, 1e-3, 1e-5])
def test_a_certificate_is_rarely_wrong(delta):
    """Were the true δ just above τ·base, the exact probability of passing would stay below what is added to δ."""
    samples = samples_for(delta)
    base = monte_carlo.largest_base(delta, samples)
    total, misled = monte_carlo.confidence(base, samples)
    assert total <= delta and base >= 0.45 * delta
    tau = (total - misled) / base
    passes = binom.cdf(math.floor(samples * base), samples, tau * base)
    assert 16 * passes <= misled < 0.1 * delta  # four values of σ at each of four margins
    further, _ = monte_carlo.confidence(base + delta / 1000, samples)
    assert further > delta


def correlated_allocation():
    return allocation_once(padding(200, 20), 2, factorise("bisr", 20, bands=2), -16)


def independent_allocation():
    return allocation_every_epoch(padding(200, 20), 2)


@pytest.mark.parametrize("make", [correlated_allocation, independent_allocation])
def test_noise_is_certified_once_kept_and_on_a_grid(make, tmp_path, monkeypatch):
    allocation = make()
    found = certified_noise(allocation, 1.0, 0.01)
    assert max(found.present, found.absent) <= found.base <= found.delta and found.misled < 1e-3
    assert (found.sigma * 2**12).is_integer()
    if found.samples:
        enough = search_sigma(allocation, 1.0, found.delta)
        assert enough <= found.sigma <= 1.15 * enough
    else:  # a step of the grid less is not enough
        assert max(convolved_deltas(allocation, found.sigma * (1 - 2**-9), 1.0, 0.01)) > found.delta
        assert max(deltas(allocation, found.sigma, 1.0, 1 << 17, 1)) == pytest.approx(found.delta, rel=0.1)
    (file,) = (tmp_path / "cache").glob("allocation-*.json")
    assert file.stat().st_mode & 0o777 == 0o600

    def nobody(*_):
        raise AssertionError("it was found before")

    monkeypatch.setattr(certificate_cache, "_memory", {})
    monkeypatch.setattr(certificate, "_sampled", nobody)
    monkeypatch.setattr(certificate, "_computed", nobody)
    assert certified_noise(allocation, 1.0, 0.01) == found
    monkeypatch.setattr(certificate_cache, "_memory", {})
    for spoilt in ("{", json.dumps({**json.loads(file.read_text()), "about": "something else"})):
        file.write_text(spoilt)
        with pytest.raises(AssertionError, match="found before"):
            certified_noise(allocation, 1.0, 0.01)


def test_a_certificate_is_announced_and_computed_by_one_process(tmp_path, monkeypatch):
    """Begin and end are said; a second process that needs it says that it waits, and reads what the first has kept."""
    allocation = correlated_allocation()
    said: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()

    def say(event, **facts):
        said.put((event, facts))

    with certificate_cache.announced(say):
        found = certified_noise(allocation, 1.0, 0.01)
        events = [said.get_nowait()[0] for _ in range(2)]
        assert events == ["the certificate of the noise is being computed", "the certificate of the noise was computed"]
        monkeypatch.setattr(certificate_cache, "_memory", {})
        assert certified_noise(allocation, 1.0, 0.01) == found and said.empty()  # from disk

    (file,) = (tmp_path / "cache").glob("allocation-*.json")
    kept = file.read_bytes()
    file.unlink()
    monkeypatch.setattr(certificate_cache, "_memory", {})
    monkeypatch.setattr(certificate, "_sampled", lambda *_: pytest.fail("computed twice"))

    def second():
        with certificate_cache.announced(say):
            return certified_noise(allocation, 1.0, 0.01)

    with ThreadPoolExecutor(1) as pool:
        with file.with_suffix(".lock").open("w") as lock:  # as the first process holds it
            fcntl.flock(lock, fcntl.LOCK_EX)
            waits = pool.submit(second)
            event, facts = said.get(timeout=60)
            assert event == "waiting" and "another process computes the certificate" in facts["reason"]
            file.write_bytes(kept)
        assert waits.result(timeout=60) == found
    assert said.get_nowait()[0] == "the certificate of the noise was read"


@pytest.mark.timeout(20)
def test_what_is_kept_may_need_something_else_that_is_kept():
    """The search for coefficients with a secret order needs optimised ones for each of its guesses: it waited for
    itself."""

    def inner() -> Padding:
        return certificate_cache.cached("inner", (1,), lambda: Padding(3, 4, 5), Padding)

    assert certificate_cache.cached("outer", (1,), inner, Padding) == inner()


def test_a_directory_that_lets_nobody_in_is_no_cache(monkeypatch):
    """Neither read nor made, locked or written: every participant finds the result by itself."""

    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    for method in ("stat", "read_text", "mkdir", "open"):
        monkeypatch.setattr(Path, method, refused)
    monkeypatch.setattr(certificate_cache, "write_bytes", refused)
    assert certificate_cache.cached("closed", (1,), lambda: Padding(3, 4, 5), Padding) == Padding(3, 4, 5)


@pytest.mark.parametrize(
    "measured", [lambda base: (0.0, math.nan), lambda base: (math.nan, 0.0), lambda base: (0.0, base)]
)
def test_means_must_stay_below_by_what_words_may_hide(monkeypatch, measured):
    """A mean that is no number passes nowhere, in either direction; one at the base itself is not below it by the
    samples' error."""
    allocation = correlated_allocation()
    base = monte_carlo.largest_base(0.01, samples_for(0.01))
    monkeypatch.setattr(certificate, "deltas", lambda *_, **__: measured(base))
    with pytest.raises(ValueError, match="no noise was certified"):
        certified_noise(allocation, 1.0, 0.01)


def test_words_of_32_bits_hide_more_with_more_slots():
    """Relative errors of the samples: 10^-4 for CIFAR-10, and a hundred times that for batches of a hundred
    thousand."""
    errors = [
        monte_carlo.sampling_error(allocation_once(padding(rows, rows // 50), 1, factorise("bisr", 50, bands=4), -16))
        for rows in (50_000, 5_000_000)
    ]
    assert 2e-5 < errors[0][0] < 3e-4 and 50 * errors[0][0] < errors[1][0] < 0.1
    assert max(absolute for _, absolute in errors) < 1e-9


def test_too_little_noise_is_not_certified(monkeypatch):
    allocation = correlated_allocation()
    enough = search_sigma(allocation, 1.0, 0.01)
    monkeypatch.setattr(certificate, "search_sigma", lambda *_: 0.8 * enough)
    with pytest.raises(ValueError, match="no noise was certified"):
        certified_noise(allocation, 1.0, 0.01)


# calibration and claims ------------------------------------------------------------------------------

SHAPE = padding(400, 40)


def slack(**changes) -> FixedPointSlack:
    return FixedPointSlack(row_bound=1.0, classes=3, width=9, steps=30, batch_size=45, **changes)


@pytest.mark.parametrize("every_epoch", [False, True])
def test_less_noise_for_the_same_claim(every_epoch):
    factorisation = factorise("identity" if every_epoch else "bisr", 30, bands=None if every_epoch else 4)
    noise = calibrate_secret_order(1.0, 1e-3, 1.0, factorisation, SHAPE, 3, slack(), every_epoch=every_epoch)
    known = calibrate_matrix_factorisation(1.0, 1e-3, 1.0, factorisation, 3, 10, slack())
    assert noise.target_std < (0.6 if every_epoch else 0.85) * known.target_std
    claim = noise.claim
    assert claim.proven and claim.epsilon == 1.0 and claim.delta == 1e-3 and claim.gaussian_multiplier is None
    (figure,) = claim.figures
    assert figure.name == "If everybody knew the order" and figure.epsilon > 1.2
    assert claim.epsilon_replace_one > figure.epsilon
    assert ("convolution" if every_epoch else "certificate") in dict(claim.sources)["epsilon"]
    assert "dummies" in claim.paragraph()
    real = calibrate_secret_order(1.0, 1e-3, 1.0, factorisation, SHAPE, 3, every_epoch=every_epoch)
    assert real.noise_multiplier == noise.noise_multiplier  # the twin needs no certificate of its own
    assert real.sensitivity == pytest.approx(noise.sensitivity, rel=1e-4)


@pytest.mark.parametrize("every_epoch", [False, True])
def test_figures_for_a_known_order_pay_for_arithmetic_at_their_own_epsilon(every_epoch):
    """Replace-one has a larger ε than the headline, so e^ε times the distance of the arithmetic takes more of δ."""
    factorisation = factorise("identity" if every_epoch else "bisr", 30, bands=None if every_epoch else 4)
    distance, delta = 1e-7, 1e-3
    noise = calibrate_secret_order(
        1.0, delta, 1.0, factorisation, SHAPE, 3, slack(overflow_probability=distance), every_epoch=every_epoch
    )
    found = noise.claim.epsilon_replace_one
    width = noise.noise_multiplier / 2 / (math.sqrt(3) if every_epoch else 1.0)
    assert gaussian_delta(width, found) + (1 + math.exp(found)) * distance <= delta * (1 + 1e-9)
    assert found < 20
    hopeless = calibrate_secret_order(
        1.0, delta, 1.0, factorisation, SHAPE, 3, slack(overflow_probability=1e-5), every_epoch=every_epoch
    )
    assert math.isinf(hopeless.claim.epsilon_replace_one) or hopeless.claim.epsilon_replace_one > found


def test_coarse_arithmetic_is_paid_for():
    """Few noise bits: what rounding adds in a step is in every mode, and so in the noise."""
    factorisation = factorise("bisr", 30, bands=4)
    fine = calibrate_secret_order(1.0, 1e-3, 1.0, factorisation, SHAPE, 3, slack())
    coarse = calibrate_secret_order(1.0, 1e-3, 1.0, factorisation, SHAPE, 3, slack(noise_bits=8))
    assert coarse.target_std > 1.3 * fine.target_std
    joint = calibrate_secret_order(1.0, 1e-3, 1.0, factorisation, SHAPE, 3, slack(slope_error=1e-4), "joint")
    assert 0 < joint.claim.epsilon_addition <= 2.0**-6 and joint.noise_multiplier >= fine.noise_multiplier


def test_what_a_secret_order_does_not_cover_is_refused():
    with pytest.raises(ValueError, match="factorisation = 'bsr': must be bisr"):
        calibrate_secret_order(1.0, 1e-3, 1.0, factorise("bsr", 30, bands=4), SHAPE, 3)
    with pytest.raises(ValueError, match="delta = 1e-08: must be at least"):
        calibrate_secret_order(1.0, 1e-8, 1.0, factorise("bisr", 30, bands=4), SHAPE, 3)
    negative = factorise("bisr", 30, bands=2)
    signs = np.array([1 << 16, 1 << 15])  # y_t = z_t + z_{t−1}/2, so ĉ alternates
    negative = dataclasses.replace(negative, integer_taps=signs)
    with pytest.raises(ValueError, match="coefficients are not negative"):
        calibrate_secret_order(1.0, 1e-3, 1.0, negative, SHAPE, 3)
    secret = TrainingConfig(order="secret")
    with pytest.raises(ValueError, match="order = 'secret': must be 'fixed' in gl_bmf"):
        has_secret_order("gl_bmf", secret)
    for change in ({"hidden": (8,)}, {"gradients": "explicit"}):
        with pytest.raises(ValueError, match="'fixed' with hidden layers or explicit gradients"):
            has_secret_order("g_bmf", secret.with_(**change))
        assert not has_secret_order("g_shuff", TrainingConfig(**change))


def test_the_schedule_leaves_no_row_out():
    for rows, size in ((1438, 128), (50_000, 512), (97, 32), (20, 20)):
        schedule = choose_schedule("g_bmf", TrainingConfig(order="secret", batch_size=size, epochs=2), rows)
        order = np.random.default_rng(0).permutation(schedule.num_rows)
        seen = np.concatenate([schedule.records(step, order) for step in range(schedule.num_batches)])
        assert sorted(seen) == list(range(rows)) and schedule.dummies >= 4 * schedule.num_batches
        assert schedule.divisor * schedule.num_batches == pytest.approx(rows)
