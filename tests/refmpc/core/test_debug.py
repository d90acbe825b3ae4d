"""``insecure_check_ranges`` looks at operands: a product that wraps modulo 2^64 back into the domain is found too."""

import numpy as np
import pytest

import refmpc
from tests.refmpc.harness import Secret, evaluate, opened

PRODUCTS = {
    "multiply_truncate": lambda x, y: refmpc.multiply_truncate(x, y, 20),
    "dot_truncate": lambda x, y: refmpc.dot_truncate(x, y, 20),
    "matmul_truncate": lambda x, y: refmpc.matmul_truncate(x.reshape(1, -1), y.reshape(-1, 1), 20),
    "multiply": lambda x, y: refmpc.multiply(x, y),
    "dot": lambda x, y: refmpc.dot(x, y),
    "matmul": lambda x, y: refmpc.matmul(x.reshape(1, -1), y),
    "matmul_opening": lambda x, y: refmpc.matmul_opening(x, y, 40),
}


def found(name, left, right):
    """Whether debug mode refuses the product."""
    try:
        evaluate(
            lambda party, x, y: PRODUCTS[name](x, y), Secret(left, 20), Secret(right, 20), insecure_check_ranges=True
        )
    except refmpc.PartyFailed as failure:
        assert f"RangeError: '{name}' left its domain: element" in str(failure)
        return True
    return False


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_72_to_80_bits_are_found_wherever_they_wrap_to(name):
    rng = np.random.default_rng(3)
    for bits in range(72, 81, 2):
        for sign in (1, -1):
            left = int(rng.integers(1 << 35, 1 << 36))
            right = sign * (((1 << bits) + int(rng.integers(0, 1 << 40))) // left)  # what wraps is small
            assert found(name, [1, left], [1, right])


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_that_fit_pass_to_the_last_unit(name):
    largest = (2**31 - 1, 2**31)  # their product is 2^62 − 2^31
    assert not found(name, [0, largest[0]], [0, largest[1]])
    assert not found(name, [0, -(2**31)], [0, 2**31])
    truncated = "truncate" in name or "opening" in name
    assert found(name, [0, 2**31], [0, 2**31]) == truncated
    assert found(name, [0, 2**32], [0, 2**31])  # 2^63 is −2^63 in the ring


def test_the_case_of_the_review():
    """100.0 at 30 bits times 0.5 is 50·2^60, which wraps to 2.0."""
    with pytest.raises(
        refmpc.PartyFailed, match=r"'multiply_truncate' left its domain: element \(0,\) is 5.76\d*e\+19"
    ):
        opened(lambda party, x, y: x * y, Secret([100 << 30], 30), Secret([1 << 29], 30), insecure_check_ranges=True)


@pytest.mark.parametrize("work", [lambda x, f: x * f, lambda x, f: x @ f, lambda x, f: f @ x])
def test_products_with_public_numbers_are_checked_too(work):
    def program(party, x):
        return work(x, np.array([0.25, 0.5]))

    assert opened(program, Secret([1 << 30, 1 << 29], 30), insecure_check_ranges=True) is not None
    with pytest.raises(refmpc.PartyFailed, match="'truncate' left its domain"):
        opened(program, Secret([0, 100 << 30], 30), insecure_check_ranges=True)


def test_noise_counts():
    def program(party, x, noise):
        return refmpc.multiply_truncate(x, x, 20, np.array([noise], np.int64))

    inside = 2**61
    evaluate(
        lambda party, x: program(party, x, inside if party.id == 1 else 0), Secret([5], 20), insecure_check_ranges=True
    )
    with pytest.raises(refmpc.PartyFailed, match="'multiply_truncate' left its domain"):
        evaluate(
            lambda party, x: program(party, x, 2**62 if party.id else 0), Secret([0], 20), insecure_check_ranges=True
        )
    with pytest.raises(refmpc.PartyFailed, match="'multiply_truncate' left its domain"):  # 3·2^62 is −2^62 in the ring
        evaluate(lambda party, x: program(party, x, 2**62), Secret([0], 20), insecure_check_ranges=True)


def test_addends_may_be_shares():
    """β times a share of the momentum: uniform words whose sum is small modulo 2^64."""

    def program(party, x, v):
        return refmpc.multiply_truncate(x, x, 20, v.first.view(np.int64))

    rows = Secret([1 << 20] * 64, 20), Secret(np.arange(64) << 20, 20)
    found = opened(program, *rows, insecure_check_ranges=True)
    assert np.abs(found.signed - ((1 << 20) + np.arange(64))).max() <= 1


def test_integers_may_be_computed_modulo_the_ring():
    run = opened(lambda party, x: refmpc.multiply(x, x), Secret([2**40]), insecure_check_ranges=True)
    assert run.signed.tolist() == [0]
