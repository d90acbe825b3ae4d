"""exp, log and softmax against numpy: error bounds as stated, saturation, logits of any size, every way to round."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import refmpc
from refmpc.core.party import SMALL
from tests.refmpc.harness import Secret, dealers, layouts, opened, seeds
from tests.refmpc.rounding import WAYS, against_the_value, by_lot, crowded, down, every_way, forced, up, values_of

ROUNDINGS = pytest.mark.parametrize("choose", [down, up, by_lot(1), against_the_value])

# exp ------------------------------------------------------------------------------------------------

UPPERS = [0.0, 0.3, 1.0, 5.25, 14.0, -3.0, -40.0]


def exp_bound(x, upper, result):
    return 2.0**-21 * np.exp(x) + max(1.0, np.exp(upper)) * 2.0**-28 + 2.0**-result


def exp_inputs(seed, upper, bits, lowest=-40.0):
    """Everything from upper down; the ends, the multiples of 8 where digits change, and their neighbours."""
    rng = np.random.default_rng(seed)
    top = int(np.floor(upper * 2.0**bits))
    spread = top - (rng.uniform(0, -lowest, 400) * 2.0**bits).astype(np.int64)
    digits = [top - (8 * k << bits) + d for k in range(5) for d in (-1, 0, 1)]
    return np.minimum(np.concatenate([spread, digits, [top, top - 1]]), top)


@given(
    seed=seeds,
    upper=st.sampled_from(UPPERS),
    bits=st.sampled_from([1, 4, 16, 22, 40]),
    result=st.sampled_from([16, 22, 36]),
    begun=dealers,
)
def test_exp_keeps_its_bound_and_saturates_at_zero(seed, upper, bits, result, begun):
    x = exp_inputs(seed, upper, bits)
    got = opened(lambda party, t: refmpc.exp(t, upper, None, result), Secret(x, bits), seed=seed, begun=begun)
    real = x * 2.0**-bits
    kept = real >= upper - 20
    assert got.scale == result
    assert (np.abs(got.value - np.exp(real))[kept] <= exp_bound(real, upper, result)[kept]).all()
    assert not got.words[real <= upper - 24].any()
    between = ~kept & (real > upper - 24)
    assert (got.value[between] >= 0).all()
    assert (got.value <= np.exp(real) + exp_bound(real, upper, result))[between].all()


@pytest.mark.parametrize("upper", UPPERS)
def test_exp_between_bounds_keeps_its_bound_over_the_whole_window(upper):
    x = np.maximum(exp_inputs(7, upper, 16, -24.0), int(np.ceil((upper - 24) * 2**16)))
    got = values_of(lambda party, t: refmpc.exp(t, upper, upper - 24, 30), x, 16)
    real = x * 2.0**-16
    assert (np.abs(got - np.exp(real)) <= exp_bound(real, upper, 30)).all()


@pytest.mark.parametrize("upper", [0.0, 14.0])
@pytest.mark.parametrize("choose", [down, up])
def test_exp_keeps_its_bound_with_its_truncation_forced(upper, choose, monkeypatch):
    forced(monkeypatch, choose)
    x = np.concatenate([exp_inputs(s, upper, 16, -20.0) for s in range(20)])
    x = x[x >= (upper - 20) * 2**16]
    got = values_of(lambda party, t: refmpc.exp(t, upper, None, 30), x, 16)
    assert (np.abs(got - np.exp(x * 2.0**-16)) <= exp_bound(x * 2.0**-16, upper, 30)).all()


@pytest.mark.parametrize("high_bit", [21, 28, 40, 61, 62])
def test_exp_is_zero_as_far_below_as_the_compared_bits_reach(high_bit):
    edges = [-(2**high_bit), -(2**high_bit) + 1, -(2 ** (high_bit - 1)), -(25 << 16), -(24 << 16), -(2**27) + 12345]
    far = [v for v in edges if -(2**high_bit) <= v <= -(24 << 16)]
    got = opened(lambda party, t: refmpc.exp(t, high_bit=high_bit), Secret(np.array([*far, 0]), 16))
    assert not got.words[:-1].any() and abs(got.value[-1] - 1.0) <= exp_bound(0.0, 0.0, got.scale)


def test_the_stated_bound_of_exp_is_not_idle():
    x = -np.arange(0, 8 << 16, 7)
    got = values_of(lambda party, t: refmpc.exp(t, 0.0, -8.0, 40), x, 16)
    error = np.abs(got - np.exp(x * 2.0**-16)) - 2.0**-28
    assert (error > 2.0**-22 * np.exp(x * 2.0**-16)).any()


# log ------------------------------------------------------------------------------------------------

LOGS = [(2.0**-12, 2.0**20, 16), (1.0, 3.0, 20), (2.0**-20, 2.0**-3, 30), (0.3, 2e9, 20)]


@given(seed=seeds, domain=st.sampled_from(LOGS), begun=dealers)
def test_log_keeps_its_bound(seed, domain, begun):
    low, high, bits = domain
    x = crowded(seed, low, high, bits)
    got = opened(lambda party, t: refmpc.log(t, low, high), Secret(x, bits), seed=seed, begun=begun)
    assert got.scale == 26
    assert np.abs(got.value - np.log(x * 2.0**-bits)).max() <= 2.0**-13.7


@pytest.mark.parametrize("low, high, bits", LOGS)
def test_log_keeps_its_bound_for_every_way_to_round(low, high, bits, monkeypatch):
    forced(monkeypatch, every_way)
    x = np.repeat(crowded(2, low, high, bits, count=80), WAYS)
    got = values_of(lambda party, t: refmpc.log(t, low, high), x, bits)
    assert np.abs(got - np.log(x * 2.0**-bits)).max() <= 2.0**-13.7


# softmax ----------------------------------------------------------------------------------------------


def softmax_of(logits):
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def check_softmax(got, words, bits, result=18):
    classes = words.shape[-1]
    assert got.scale == result
    assert np.abs(got.value - softmax_of(words * 2.0**-bits)).max(initial=0) <= 2.0**-14
    assert np.abs(got.value.sum(axis=-1) - 1).max(initial=0) <= (1.5 * classes + 6) * 2.0**-18
    assert classes > 38 or (1.5 * classes + 6) * 2.0**-18 <= 2.0**-12
    assert got.signed.min(initial=0) >= 0


def logits_of_all_sizes(seed, rows, classes, bits):
    """Rows of logits in ±2^10: spread out, close together, tied, tied at the top, one far above the rest."""
    rng = np.random.default_rng(seed)
    size = np.exp2(rng.uniform(-6, 10, (rows, 1)))
    words = np.rint(rng.uniform(-1, 1, (rows, classes)) * size * 2.0**bits).astype(np.int64)
    words[rows // 5 : rows // 4] = words[rows // 5 : rows // 4, :1]
    words[rows // 4 : rows // 3, classes // 2 :] = 2 ** (bits + 10)
    words[rows // 3 : rows // 2, 0] = 2 ** (bits + 10)
    return words


@given(seed=seeds, classes=st.sampled_from([2, 3, 10, 26, 64]), bits=st.sampled_from([8, 16, 24]), begun=dealers)
def test_softmax_keeps_its_bound(seed, classes, bits, begun):
    words = logits_of_all_sizes(seed, 60, classes, bits)
    got = opened(lambda party, x: refmpc.softmax(x), Secret(words, bits), seed=seed, begun=begun)
    check_softmax(got, words, bits)
    assert np.abs(got.value.sum(axis=-1) - 1).max() <= 2.0**-12


@pytest.mark.parametrize("classes", [2, 10, 26, 64])
@ROUNDINGS
def test_softmax_keeps_its_bound_with_every_truncation_forced(classes, choose, monkeypatch):
    forced(monkeypatch, choose)
    words = logits_of_all_sizes(8, 600, classes, 16)
    check_softmax(opened(lambda party, x: refmpc.softmax(x), Secret(words, 16)), words, 16)


@pytest.mark.parametrize("classes", [2, 10, 26, 64])
@pytest.mark.parametrize("high_bit, most", [(None, 2**35 - 2**21), (51, 2**50)])
def test_softmax_takes_logits_as_far_apart_as_it_says(classes, high_bit, most):
    rng = np.random.default_rng(classes)
    words = rng.integers(-most, most, (40, classes), endpoint=True)
    words[0] = most
    words[1] = -most
    words[2, 0], words[2, 1:] = most, -most
    words[3:20] = words[3:20, :1] - rng.integers(0, 8 << 16, (17, classes))  # far away, close together
    words = np.maximum(words, -most)
    got = opened(lambda party, x: refmpc.softmax(x, 18, high_bit), Secret(words, 16))
    want = softmax_of((words - words.max(axis=-1, keepdims=True)) * 2.0**-16)
    assert np.abs(got.value - want).max() <= 2.0**-14


def test_softmax_refuses_a_range_that_it_cannot_keep():
    with pytest.raises(refmpc.PartyFailed, match="spread of the logits = .*: must be .*bound the logits more tightly"):
        opened(lambda party, x: refmpc.softmax(x, 18, 53), Secret(np.zeros((2, 3), int), 16))


def test_equal_logits_have_equal_chances():
    for classes in (2, 10, 26, 64):
        got = values_of(lambda party, x: refmpc.softmax(x), np.full((50, classes), 12345), 16)
        assert np.abs(got - 1 / classes).max() <= 2.0**-16


@given(seed=seeds, high_bit=st.sampled_from([26, 28, 40]), layout=layouts)
def test_a_short_comparison_is_enough_for_logits_of_known_size(seed, high_bit, layout):
    words = logits_of_all_sizes(seed, 40, 10, 15)  # differences up to 2^26
    got = opened(lambda party, x: refmpc.softmax(x, 20, high_bit), Secret(words, 15, layout=layout), seed=seed)
    check_softmax(got, words, 15, 20)


# shapes, errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (2, 3, 4), (SMALL + 1,)])
def test_every_shape_comes_back(shape):
    def program(party, x):
        return [party.complete(call) for call in (refmpc.exp(x, 1.0), refmpc.exp(x, 1.0, 0.0), refmpc.log(x, 0.5, 9.0))]

    results = opened(program, Secret(np.full(shape, 1 << 15), 16))
    for got, want in zip(results, (np.exp(0.5), np.exp(0.5), np.log(0.5)), strict=True):
        assert got.words.shape == shape
        assert np.allclose(got.value, want, atol=2.0**-12)


@pytest.mark.parametrize("shape", [(2,), (0, 3), (1, 7), (3, 2, 5), (SMALL // 2 + 1, 2)])
def test_softmax_goes_along_the_last_axis(shape):
    words = np.random.default_rng(1).integers(-(5 << 16), 5 << 16, shape)
    got = opened(lambda party, x: refmpc.softmax(x), Secret(words, 16))
    assert got.words.shape == shape
    check_softmax(got, words, 16)


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda x: refmpc.exp(x, 15.0), r"upper = 15.0: must be a finite number in \[-1e\+06, 14\]"),
        (lambda x: refmpc.exp(x, 0.0, 1.0), r"lower = 1.0: must be a finite number in \(-inf, 0\]"),
        (lambda x: refmpc.exp(x, 14.0, None, 50), "upper = 14.0: must be at most 14, with fraction_bits at most"),
        (lambda x: refmpc.exp(x, high_bit=64), "high_bit = 64: must be an integer from 2 to 63"),
        (lambda x: refmpc.exp(x.reinterpret(0)), "fraction bits of x = 0: must be an integer from 1 to 40"),
        (lambda x: refmpc.log(x, 0.0, 1.0), "low = 0.0: must be a finite number"),
        (lambda x: refmpc.softmax(x[:, :1]), r"classes \(last axis\) = 1: must be an integer from 2 to 64"),
        (lambda x: refmpc.softmax(x.T), r"classes \(last axis\) = 65: must be an integer from 2 to 64"),
        (
            lambda x: refmpc.softmax(x.reinterpret(40)),
            "fraction bits of the logits = 40: must be an integer from 8 to 30",
        ),
    ],
)
def test_bad_arguments_are_refused_with_a_way_out(call, said):
    with pytest.raises(refmpc.PartyFailed, match=said):
        opened(lambda party, x: call(x), Secret(np.full((65, 3), -(1 << 16)), 16))


@pytest.mark.parametrize(
    "call, value, said",
    [
        (lambda x: refmpc.exp(x, 1.0), 1.001, "'exp' left its domain"),
        (lambda x: refmpc.exp(x, 1.0, -2.0), -2.001, "'exp' left its domain"),
        (lambda x: refmpc.exp(x, 1.0, None, 22, 20), -17.0, "'exp' left its domain"),  # compares 20 bits
        (
            lambda x: refmpc.log(x, 0.25, 4.0),
            0.2,
            "'log' left its domain: element .1,. is 0.199.*allowed is 0.25 ≤ value",
        ),
        (
            lambda x: refmpc.softmax(x.reshape(1, 2), 18, 28),
            2.0**13,
            "'probabilities' left its domain: the entries of row",
        ),
    ],
)
def test_debug_mode_names_the_first_value_outside_the_domain(call, value, said):
    good, bad = (Secret(np.rint(np.array([0.5, v]) * 2**16).astype(np.int64), 16) for v in (0.25, value))
    opened(lambda party, x: call(x), good, insecure_check_ranges=True)
    with pytest.raises(refmpc.PartyFailed, match=said):
        opened(lambda party, x: call(x), bad, insecure_check_ranges=True)
