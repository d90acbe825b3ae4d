"""Constants that servers compute for themselves: right, and made only of operations that agree everywhere."""

import ast
import inspect
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.reference.exponential import agreed_exp
from bench.generators.coefficients import minimax, stored_form
from refmpc.core import integer_logs as agreed
from refmpc.mathematics import coefficients


@given(bits=st.integers(1, 40), seed=st.integers(0, 2**31))
def test_agreed_exp_is_right_to_the_last_digits(bits, seed):
    words = np.random.default_rng(seed).integers(0, 8 << bits, 20, dtype=np.uint64)
    words[:2] = 0, (8 << bits) - 1
    got = agreed_exp(words, bits, agreed.exp_table(8))
    for word, value in zip(words.tolist(), got.tolist(), strict=True):
        want = (Decimal(word) / Decimal(2**bits)).exp()
        assert abs(Decimal(value) / want - 1) < Decimal(2) ** -50


@given(low=st.floats(0.01, 1.0), ratio=st.floats(1.5, 60.0), degree=st.integers(1, 5), place=st.floats(0.2, 0.8))
def test_the_start_of_the_reciprocal_has_the_error_it_states_and_no_polynomial_is_better(low, ratio, degree, place):
    high = low * ratio
    centre = low + place * (high - low)
    coefficients, error = agreed.reciprocal_start(low, high, degree, centre)
    x = np.cos(np.linspace(0, np.pi, 2001)) * (high - low) / 2 + (high + low) / 2
    residual = 1 - x * np.polynomial.polynomial.polyval(x - centre, coefficients)
    assert np.abs(residual).max() == pytest.approx(error, rel=1e-6, abs=1e-9)
    # equioscillation: degree + 2 alternating extremes, which characterises the best approximation
    extremes = np.sign(residual[np.abs(residual) > 0.999 * error])
    assert 1 + int((np.diff(extremes) != 0).sum()) == degree + 2


def test_only_operations_that_agree_on_every_machine_are_used():
    """No transcendental function and no linear algebra of numpy, math or scipy."""
    tree = ast.parse(inspect.getsource(agreed))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "np"}
    assert used <= {"array", "uint64", "int64", "float64", "ndarray"}
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"functools", "math", "numpy"}
    exact = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "math"
    }
    assert exact == {"frexp"}


@given(value=st.floats(1e-9, 1e9), exponent=st.integers(-40, 40))
def test_logarithms_of_two_are_exact(value, exponent):
    for number in (value, 2.0**exponent, np.nextafter(2.0**exponent, 0), np.nextafter(2.0**exponent, np.inf)):
        assert 2.0 ** agreed.floor_log2(number) <= number < 2.0 ** (agreed.floor_log2(number) + 1)
        assert 2.0 ** (agreed.ceil_log2(number) - 1) < number <= 2.0 ** agreed.ceil_log2(number)


def test_stored_coefficients_are_the_minimax_ones():
    """The stored integers may differ from a fresh computation in the last place, not in what they achieve."""
    fresh, _ = minimax(coefficients.LOG_DEGREE)
    assert np.abs(np.array(coefficients.LOG) - np.array(stored_form(fresh))).max() <= 2
