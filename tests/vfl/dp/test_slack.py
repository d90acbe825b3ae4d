"""The fixed-point theorem: the leak it is there for, its repair, and its coupling run step by step."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from accel.prg import Stream
from tests.not_none import not_none
from vfl.dp.factorisation import factorise
from vfl.dp.filter import NoiseFilter, sample_grid_gaussian
from vfl.dp.slack import FixedPointSlack

CIFAR: dict[str, Any] = {"row_bound": 64.0, "classes": 10, "width": 2000, "steps": 7800}


def noised(gradient: int, trials: int, label: int) -> np.ndarray:
    """G + filtered noise of the first two steps, at scale f_z + 16, untruncated; column = trial."""
    f = factorise("bisr", 2, bands=2)
    z = sample_grid_gaussian(Stream(label.to_bytes(32, "big")), 2 * trials, 2.0**32).reshape(2, trials)
    return NoiseFilter(f, trials).next_block(z) + gradient


def test_untruncated_noise_leaks_the_low_bits():
    """The hole: however large the noise, the low 16 bits of the first release are those of the data."""
    for gradient in (0, 1, 12_345, 65_535):
        assert np.all(noised(gradient, 1000, 1)[0] & 0xFFFF == gradient)


def test_truncation_repairs_the_leak():
    """After cutting g bits (with the truncation's random carry) the low bits no longer tell 1 from 40,000."""
    trials, bits = 200_000, 16
    tables = []
    for gradient, label in ((1, 2), (40_000, 3)):
        carry = Stream((100 + label).to_bytes(32, "big")).words(2 * trials) >> np.uint64(64 - bits)
        released = (noised(gradient, trials, label) + carry.astype(np.int64).reshape(2, trials)) >> bits
        tables.append(np.bincount(released[0] & 31, minlength=32))
    assert stats.chi2_contingency(np.array(tables)).pvalue > 1e-4
    leaking = [np.bincount(noised(g, trials, 4)[0] & 31, minlength=32) for g in (1, 40_000)]
    assert not np.any(np.all(np.array(leaking) > 0, axis=0))  # the same look sees the hole at once


def neighbours(rng, f, kappa, b, width, clip_norm, scale):
    """Two integer gradient streams that differ by one record: κ contributions ≤ clip_norm, b apart."""
    one = rng.integers(-(2**20), 2**20, (f.num_steps, width))
    other = one.copy()
    same = rng.normal(size=width)
    for j in range(kappa):
        direction = same if rng.random() < 0.5 else rng.normal(size=width)
        contribution = np.trunc(clip_norm * scale * direction / np.linalg.norm(direction)).astype(np.int64)
        other[j * b] -= contribution
    return one, other


@pytest.mark.parametrize("kind,bands,beta", [("bisr", 6, 0.0), ("bisr", 6, 0.9), ("identity", None, 0.0)])
def test_the_coupling_of_the_theorem(kind, bands, beta):
    """For any neighbours and noise, a shift within Δ gives exactly the same releases."""
    rng = np.random.default_rng(7)
    steps, width, kappa, b, g, noise_bits, clip_norm = 30, 4, 5, 6, 6, 8, 0.5
    f = factorise(kind, steps, momentum=beta, bands=bands, tap_bits=g)
    slack = FixedPointSlack(
        1.0, 1, 1, steps, noise_bits=noise_bits, coordinates=width, clip_rounding=0.0, fraction_bits_u=32
    )
    affected = kappa if kind == "identity" else None
    bound = slack.sensitivity(
        f.sensitivity(kappa, b), clip_norm, strategy_norm=f.strategy_norm, affected_steps=affected
    )
    taps, cut = not_none(f.integer_taps), g + 3
    needed = 0.0
    for _ in range(60):
        one, other = neighbours(rng, f, kappa, b, width, clip_norm, 2.0 ** (noise_bits + g))
        z = rng.integers(-(2**20), 2**20, (steps, width))
        shifted = np.zeros_like(z)
        carry = rng.integers(0, 2**cut, (steps, width))
        releases: list[np.ndarray] = []
        for t in range(steps):
            # a_t: any integer function of earlier releases, such as a corrupted server's own noise
            feedback = carry[t] + (np.array(releases[-1]) * 37 if releases else 0)
            past, past_shifted = (
                sum(taps[k] * y[t - k] for k in range(1, min(t, len(taps) - 1) + 1)) for y in (z, shifted)
            )
            target = ((one[t] + feedback + past) >> g) + z[t]
            shifted[t] = target - ((other[t] + feedback + past_shifted) >> g)
            release = (one[t] + feedback + past + 2**g * z[t]) >> cut
            again = (other[t] + feedback + past_shifted + 2**g * shifted[t]) >> cut
            assert np.array_equal(release, again)
            releases.append(release)
        length = float(np.linalg.norm(shifted - z)) * 2.0**-noise_bits
        assert length <= bound
        needed = max(needed, length)
    assert needed > 0.5 * bound  # the bound is not idle


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_the_coupling_of_the_recursion_with_two_servers(beta):
    """Each honest server shifts by half the difference and rounds for itself: √2·√(‖e¹‖²+‖e²‖²) ≤ Δ."""
    rng = np.random.default_rng(8)
    steps, width, kappa, b, g, noise_bits, clip_norm, bits = 30, 4, 5, 6, 6, 8, 0.5, 12
    f = factorise("bsr", steps, momentum=beta, bands=6, tap_bits=g, strategy_bits=bits)
    slack = FixedPointSlack(1.0, 1, 1, steps, noise_bits=noise_bits, coordinates=width, clip_rounding=0.0)
    bound = slack.sensitivity(f.sensitivity(kappa, b), clip_norm, strategy_norm=f.strategy_norm, recursive=True)
    c = not_none(f.integer_strategy)

    def inverse(y):
        """z that makes the recursion give y: z_t = y_t + round(Σ c_j y_{t−j})."""
        past = np.zeros_like(y)
        for t in range(steps):
            total = sum(c[j] * y[t - j] for j in range(1, min(t, len(c) - 1) + 1)) + np.zeros(width, dtype=np.int64)
            past[t] = (total + (1 << bits >> 1)) >> bits
        return y + past

    for _ in range(60):
        one, other = neighbours(rng, f, kappa, b, width, clip_norm, 2.0 ** (noise_bits + g))
        noise = [rng.integers(-(2**20), 2**20, (steps, width)) for _ in range(2)]
        filtered = [NoiseFilter(f, width).next_block(z) >> g for z in noise]
        carry = rng.integers(0, 2**g, (steps, width))
        difference = ((one + carry) >> g) - ((other + carry) >> g)
        halves = (difference >> 1, difference - (difference >> 1))
        shifts = []
        for z, y, half in zip(noise, filtered, halves, strict=True):
            assert np.array_equal(inverse(y), z)  # the filter is the recursion
            shifts.append(inverse(y + half) - z)
        total = sum(filtered)
        again = total + difference
        assert np.array_equal((one + carry + (total << g)) >> g, (other + carry + (again << g)) >> g)
        length = math.sqrt(2 * sum(float(np.sum(e.astype(float) ** 2)) for e in shifts)) * 2.0**-noise_bits
        assert length <= bound


def test_two_rounded_gaussians_are_one_rounded_at_random():
    """round(ζ)+round(ζ') against N(0, 2s²) convolved with the triangle, where e^(−π²s²) is 10^-39."""
    s, reach = 3.0, 60
    k = np.arange(-reach, reach + 1)
    single = stats.norm.cdf((k + 0.5) / s) - stats.norm.cdf((k - 0.5) / s)
    total = np.convolve(single, single)[reach : 3 * reach + 1]
    sigma = math.sqrt(2) * s
    antiderivative = lambda x: x * stats.norm.cdf(x / sigma) + sigma * stats.norm.pdf(x / sigma)  # noqa: E731
    expected = antiderivative(k + 1) - 2 * antiderivative(k) + antiderivative(k - 1)
    central = np.abs(k) <= 25
    assert np.allclose(total[central], expected[central], rtol=1e-6, atol=1e-13)


def test_the_figures_of_protocols():
    """Proofs §6.2: 24.5·12,493·2^-30 = 2.9·10^-4 at 30 bits; 4.7 at 16 bits would be half of the sensitivity."""
    f = factorise("bisr", 7800, bands=192)
    assert f.strategy_norm == pytest.approx(24.5, abs=0.05)
    slack = FixedPointSlack(**CIFAR)
    assert slack.released_coordinates == 20_010
    assert slack.grid_slack(f.strategy_norm) == pytest.approx(2.9e-4, rel=0.02)
    assert FixedPointSlack(**CIFAR, noise_bits=16).grid_slack(f.strategy_norm) == pytest.approx(4.7, rel=0.01)
    assert slack.clip_slack == pytest.approx(math.sqrt(10) * math.sqrt(64**2 + 1) * 2**-32)
    assert FixedPointSlack(**CIFAR, slope_error=2.0**-24).epsilon_addition(1.0) < 1e-3
    delta = slack.sensitivity(8.286, 1.2, strategy_norm=24.5)
    assert delta == pytest.approx(8.286 * (1.2 + slack.clip_slack) + slack.grid_slack(24.5), rel=1e-8)
    assert delta < slack.sensitivity(8.286, 1.2, strategy_norm=24.5, recursive=True) < delta + 3e-5


def test_distance_and_overflow_go_into_delta():
    slack = FixedPointSlack(**CIFAR, overflow_probability=1e-9)
    assert slack.delta_addition(1.0) == pytest.approx((1 + math.e) * 1e-9, rel=1e-6)
    assert slack.delta_addition(1.0, 1e-8) == pytest.approx((1 + math.e) * 1.1e-8, rel=1e-6)
    assert FixedPointSlack(**CIFAR).statistical_distance() < 2.0**-150
    room = 2.0**16 - 4096 * 1.2 - 2.0**-16
    probability = slack.noise_overflow(room / 8, 1.2, 16)
    assert probability == pytest.approx(20_010 * 7800 * 2 * stats.norm.sf(8), rel=1e-3)
    with pytest.raises(ValueError, match=r"clip_norm = 1.2: must be small enough that .* fit 2\^16"):
        slack.noise_overflow(room / 5, 1.2, 16)


@pytest.mark.parametrize("kind", ["bisr", "bsr", "identity"])
def test_the_overflow_of_momentum_is_that_of_what_is_truncated(kind):
    """v_t = β·v_{t−1} + y_t is summed before the cut: its gradients count 1/(1−β) times, its noise as the recursion
    says."""
    f, beta = factorise(kind, 12, momentum=0.0 if kind == "identity" else 0.9), 0.9
    response = np.zeros((12, 12))  # of v at each step to z of each step
    for t in range(12):
        response[t] = beta * response[t - 1] if t else 0.0
        response[t, : t + 1] += f.noising_taps[: t + 1][::-1] if kind != "identity" else 0.0
        response[t, t] += kind == "identity"
    assert f.velocity_norm(beta) == pytest.approx(np.linalg.norm(response, axis=1).max())
    assert f.velocity_norm(0.0) == pytest.approx(f.noise_norms()[-1])
    slack = FixedPointSlack(**CIFAR, batch_size=400, momentum=beta)
    room = 2.0**16 - (400 * (14 + slack.clip_slack) + 2.0**-16) / (1 - beta)
    assert slack.noise_overflow(room / 8, 14, 16) == pytest.approx(20_010 * 7800 * 2 * stats.norm.sf(8), rel=1e-6)
    with pytest.raises(ValueError, match=r"clip_norm = 14: .*momentum\) = 5.734e\+05"):
        FixedPointSlack(**CIFAR, batch_size=4096, momentum=beta).noise_overflow(1.0, 14, 16)


@pytest.mark.parametrize(
    "change,match",
    [
        ({"row_bound": 0}, "row_bound = 0: .*clients clip every row"),
        ({"classes": 0}, "classes = 0"),
        ({"noise_bits": 60}, "noise_bits = 60: must be an integer from 1 to 46; 30 keeps"),
        ({"overflow_probability": 2.0}, "overflow_probability = 2.0"),
    ],
)
def test_bad_input_is_named(change, match):
    with pytest.raises(ValueError, match=match):
        FixedPointSlack(**(CIFAR | change))


def test_finer_gradients_leave_the_noise_less_room():
    """A shift by 5 bits divides the room by 32; what is cut grows along, so a unit of the release stays what it was."""
    plain = FixedPointSlack(1.0, 2, 3, 10, batch_size=32, truncated_bits=34)
    finer = dataclasses.replace(plain, noise_shift=5, truncated_bits=39)
    narrow = dataclasses.replace(plain, value_bits=57)
    for std in (100.0, 250.0):
        assert finer.noise_overflow(std, 1.0, 16) == narrow.noise_overflow(std, 1.0, 16)
    assert finer.noise_overflow(250.0, 1.0, 16) > plain.noise_overflow(250.0, 1.0, 16)
    with pytest.raises(ValueError, match=r"clip_norm = 1.0: .* fit 2\^11"):
        finer.noise_overflow(400.0, 1.0, 16)
