"""1/sqrt, sqrt and the clip factor: error bounds as stated, over whole domains and for every way to round."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import refmpc
from refmpc.core.party import SMALL
from tests.refmpc.harness import Secret, dealers, opened, seeds
from tests.refmpc.rounding import (
    WAYS,
    against_the_value,
    by_lot,
    crowded,
    down,
    every_way,
    forced,
    forced_openings,
    up,
    values_of,
)

roots, clipping = sys.modules["refmpc.mathematics.roots"], sys.modules["refmpc.mathematics.clipping"]
RANGES = [(2.0**-12, 2.0**20, 16), (2.0**-8, 2.0**8, 16), (1.0, 3.0, 24), (2.0**-20, 2.0**-3, 30), (0.3, 2e8, 20)]
ROUNDINGS = [down, up, by_lot(1), by_lot(2), against_the_value]
ranges = st.sampled_from(RANGES)
wide = pytest.mark.parametrize("low, high, bits", RANGES)


def too_far(got, want, relative, absolute):
    """The largest error as a multiple of what is allowed."""
    return float(np.max(np.abs(got - want) / (relative * np.abs(want) + absolute), initial=0.0))


# 1/sqrt and sqrt ----------------------------------------------------------------------------------

INVERSE_SQRT_ERROR = 2.0**-16.9


@given(seed=seeds, domain=ranges, result=st.sampled_from([20, 26, 30]), begun=dealers)
def test_inverse_sqrt_keeps_its_bound(seed, domain, result, begun):
    low, high, bits = domain
    x = crowded(seed, low, high, bits)
    got = opened(lambda party, t: refmpc.inverse_sqrt(t, low, high, result), Secret(x, bits), seed=seed, begun=begun)
    assert got.scale == result
    assert too_far(got.value, (x * 2.0**-bits) ** -0.5, INVERSE_SQRT_ERROR, 2.0**-result) <= 1


@wide
@pytest.mark.parametrize("first, last", [(up, up), (up, down), (down, up), (down, down)])
def test_inverse_sqrt_keeps_its_bound_for_every_way_to_round(low, high, bits, first, last, monkeypatch):
    """It has two truncations: of the spline, and of the product."""
    forced_openings(monkeypatch, first is up)
    forced(monkeypatch, last)
    x = crowded(1, low, high, bits, count=1000)
    got = values_of(lambda party, t: refmpc.inverse_sqrt(t, low, high), x, bits)
    assert too_far(got, (x * 2.0**-bits) ** -0.5, INVERSE_SQRT_ERROR, 2.0**-26) <= 1


def test_the_stated_bound_of_inverse_sqrt_is_not_idle():
    x = np.arange(15 * 2**10, 64 * 2**10)
    got = values_of(lambda party, t: refmpc.inverse_sqrt(t, 0.9, 4.0, 30), x, 14)
    assert too_far(got, (x * 2.0**-14) ** -0.5, 2.0**-20, 2.0**-30) > 1


@given(seed=seeds, domain=ranges, result=st.sampled_from([8, 16, 20]), begun=dealers)
def test_sqrt_keeps_its_bound_and_is_zero_at_zero(seed, domain, result, begun):
    low, high, bits = domain
    x = np.append(crowded(seed, low, high, bits), 0)
    got = opened(lambda party, t: refmpc.sqrt(t, low, high, result), Secret(x, bits), seed=seed, begun=begun)
    want = (x * 2.0**-bits) ** 0.5
    assert got.signed[-1] == 0 and got.scale == result
    assert too_far(got.value[:-1], want[:-1], 2.0**-16.9 + want[:-1] * 2.0**-26, 2.0**-result) <= 1


def test_sqrt_of_zero_is_zero_however_the_truncations_round(monkeypatch):
    forced(monkeypatch, every_way)
    assert not values_of(lambda party, t: refmpc.sqrt(t, 2.0**-12, 2.0**20), np.zeros(WAYS, np.int64), 16).any()


# the clip factor ------------------------------------------------------------------------------------

CLIPS = [(2.0**20, 16), (2.0**20, 12), (2.0**20, 30), (3.0, 24), (4.0, 16), (2.0**32, 16), (1000.0, 1)]
clips = pytest.mark.parametrize("high, bits", CLIPS)


def clip_inputs(seed, high, bits, count=300):
    """0, everything around 1 and around the powers of 4, the bound, and what lies below 1 (where the factor is 1)."""
    below = [0, 1, -1, -(2**bits), 2**bits - 1, 2**bits, 2**bits + 1, -int(high * 2**bits)]
    return np.unique(np.concatenate([below, crowded(seed, 2.0**-bits, high, bits, count)]))


def clip_too_large(q, factor, bits):
    """Where factor > 1/sqrt(max(1, q)), in exact integers: factor²·max(1, q) > 1."""
    bounded = [max(int(v), 1 << bits) for v in q]
    return [
        i for i, (v, c) in enumerate(zip(bounded, factor, strict=True)) if c > 0 and int(c) ** 2 * v > 1 << 52 + bits
    ]


def check_clip(q, got, bits):
    assert got.scale == 26
    assert clip_too_large(q, got.signed, bits) == []
    size = np.maximum(q * 2.0**-bits, 1.0) ** 0.5
    short = 1 - got.value * size
    assert (short <= 2.0**-16.3 + 2.0**-23.4 * size).all()
    assert (short[size <= 2.0**10] <= 2.0**-13).all()
    assert got.signed.min(initial=1) >= 1


@given(seed=seeds, clip=st.sampled_from(CLIPS), begun=dealers)
def test_the_clip_factor_is_never_too_large_and_hardly_too_small(seed, clip, begun):
    high, bits = clip
    q = clip_inputs(seed, high, bits)
    got = opened(lambda party, t: refmpc.clip_factor(t, high), Secret(q, bits), seed=seed, begun=begun)
    check_clip(q, got, bits)


@clips
@pytest.mark.parametrize("choose", ROUNDINGS, ids=["down", "up", "by lot", "by another lot", "against the value"])
def test_the_clip_factor_holds_with_every_truncation_forced(high, bits, choose, monkeypatch):
    forced(monkeypatch, choose)
    q = clip_inputs(5, high, bits, count=5000)
    check_clip(q, opened(lambda party, t: refmpc.clip_factor(t, high), Secret(q, bits)), bits)


@pytest.mark.heavy
@pytest.mark.parametrize("choose", [down, up, by_lot(3), every_way, against_the_value])
def test_the_clip_factor_holds_on_two_million_values(choose, monkeypatch):
    forced(monkeypatch, choose)
    q = clip_inputs(11, 2.0**20, 16, count=2_000_000)
    check_clip(q, opened(lambda party, t: refmpc.clip_factor(t, 2.0**20), Secret(q, 16)), 16)


def exceeds(high, bits):
    q = np.repeat(crowded(9, 1 - 2.0**-7, high, bits, count=1500), 8)
    got = opened(lambda party, t: refmpc.clip_factor(t, high), Secret(q, bits))
    return bool(clip_too_large(q, got.signed, bits))


@pytest.mark.parametrize("module, name, value", [(clipping, "MARGIN_BITS", 26), (roots, "LAST_UNIT", 0.0)])
def test_a_clip_without_its_margin_is_caught(module, name, value, monkeypatch):
    """Planted: a margin of 2^-26 instead of 2^-17; the last unit not subtracted."""
    forced(monkeypatch, up)
    high = 4.0 if name == "MARGIN_BITS" else 2.0**30
    assert not exceeds(high, 16)
    monkeypatch.setattr(module, name, value)
    assert exceeds(high, 16)


def test_a_clip_whose_first_comparison_is_coarse_is_caught(monkeypatch):
    """Planted: values just below 1 may count as 1 or more. Their factor would exceed 1."""
    monkeypatch.setattr(clipping, "KINK_BITS", 6)
    assert exceeds(2.0**20, 16)


# shapes, errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (2, 3, 4), (SMALL + 1,)])
def test_every_shape_comes_back(shape):
    def program(party, x):
        return [
            party.complete(call)
            for call in (refmpc.inverse_sqrt(x, 0.5, 4.0), refmpc.sqrt(x, 0.5, 4.0), refmpc.clip_factor(x, 4.0))
        ]

    results = opened(program, Secret(np.full(shape, 2 << 16), 16))
    for got, want in zip(results, (0.5**0.5, 2**0.5, 0.5**0.5), strict=True):
        assert got.words.shape == shape
        assert np.allclose(got.value, want, rtol=2e-4)


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda x: refmpc.inverse_sqrt(x, 0.0, 1.0), r"low = 0.0: must be a finite number in \(0, inf\)"),
        (lambda x: refmpc.inverse_sqrt(x, 2.0, 1.0), r"high = 1.0: must be a finite number in \(2, inf\)"),
        (lambda x: refmpc.inverse_sqrt(x, 1.0, 2.0**50), r"high = .*: must be below 2\^45 .*fewer fraction bits"),
        (
            lambda x: refmpc.inverse_sqrt(x.reinterpret(40), 2.0**-40, 1.0, 48),
            "fraction_bits = 48: .*fewer fraction bits",
        ),
        (lambda x: refmpc.inverse_sqrt(x, 1.0, 2.0, 0), "fraction_bits = 0: must be an integer from 1 to"),
        (lambda x: refmpc.sqrt(x, 1.0, 2.0**44), r"high = .*: must be 3 bits smaller.*fewer fraction bits"),
        (lambda x: refmpc.clip_factor(x, 1.0), r"high = 1.0: must be a finite number in \(1, 4.29497e\+09\]"),
        (lambda x: refmpc.clip_factor(x, 2.0**36), r"high = .*: must be a finite number in \(1, 4.29497e\+09\]"),
        (lambda x: refmpc.clip_factor(x.reinterpret(50), 2.0**20), "high = .*: must be at most .*scale q down"),
    ],
)
def test_bad_arguments_are_refused_with_a_way_out(call, said):
    with pytest.raises(refmpc.PartyFailed, match=said):
        opened(lambda party, x: call(x), Secret([1 << 16], 16))


@pytest.mark.parametrize(
    "call, value, said",
    [
        (lambda x: refmpc.inverse_sqrt(x, 0.5, 4.0), 4.1, "'inverse_sqrt' left its domain: element .1,. is 4.10000"),
        (lambda x: refmpc.inverse_sqrt(x, 0.5, 4.0), 0.0, "'inverse_sqrt' left its domain"),
        (lambda x: refmpc.sqrt(x, 0.5, 4.0), 0.25, "'sqrt' left its domain: element .1,. is 0.25, allowed is 0.5 ≤"),
        (lambda x: refmpc.clip_factor(x, 4.0), 4.5, "'clip_factor' left its domain"),
    ],
)
def test_debug_mode_names_the_first_value_outside_the_domain(call, value, said):
    good, bad = (Secret(np.rint(np.array([1.0, v]) * 2**16).astype(np.int64), 16) for v in (1.0, value))
    opened(lambda party, x: call(x), good, insecure_check_ranges=True)
    with pytest.raises(refmpc.PartyFailed, match=said):
        opened(lambda party, x: call(x), bad, insecure_check_ranges=True)


def test_debug_mode_lets_the_edges_of_the_domain_pass():
    def program(party, x):
        return [party.complete(c) for c in (refmpc.sqrt(x, 0.5, 4.0), refmpc.clip_factor(x, 4.0))]

    opened(program, Secret(np.array([0, 1 << 15, 1 << 18]), 16), insecure_check_ranges=True)
