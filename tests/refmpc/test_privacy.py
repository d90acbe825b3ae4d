"""What one party sees does not depend on the secrets: a two-sample test on recorded transcripts.

``CASES`` has one line per primitive; ``transcripts`` explains the test. The same test must catch every planted leak:
each mask of each primitive is taken away in turn, and the coins of the comparison are fixed.
"""

import numpy as np
import pytest
from transcripts import Case, leaks, watch_streams

import refmpc
from refmpc import PROTOCOLS

FAR = ((5,), (-(2**61) + 987654321,))
PAIR = ((3, 5), (-(2**30), 2**31 - 77))
BITS = ((0,), (1,))


def sign(high_bit, prime, secrets):
    return Case(lambda party, x: refmpc.is_negative(x, 0, high_bit), ("arithmetic",), secrets, packed=prime)


CASES = {
    "multiply": Case(lambda party, x, y: refmpc.multiply(x, y), ("arithmetic",) * 2, PAIR),
    "dot": Case(lambda party, x, y: refmpc.dot(x, y), ("arithmetic",) * 2, PAIR, shape=(2,)),
    "matmul": Case(lambda party, x, y: refmpc.matmul(x, y[:2, :1]), ("arithmetic",) * 2, PAIR, shape=(2,)),
    "multiply_truncate": Case(
        lambda party, x, y: refmpc.multiply_truncate(x, y, 16), ("arithmetic",) * 2, PAIR, packed=2**16
    ),
    "multiply_truncate by 30": Case(
        lambda party, x, y: refmpc.multiply_truncate(x, y, 30), ("arithmetic",) * 2, PAIR, packed=2**30
    ),
    "dot_truncate": Case(
        lambda party, x, y: refmpc.dot_truncate(x, y, 8), ("arithmetic",) * 2, PAIR, packed=2**8, shape=(1,)
    ),
    "matmul_truncate": Case(
        lambda party, x, y: refmpc.matmul_truncate(x, y[:1], 8), ("arithmetic",) * 2, PAIR, packed=2**8, shape=(1,)
    ),
    "truncate": Case(lambda party, x: refmpc.truncate(x, 16), ("arithmetic",), FAR, packed=2**16),
    "truncate by 40": Case(lambda party, x: refmpc.truncate(x, 40), ("arithmetic",), FAR, packed=2**40),
    "is_negative": sign(63, 37, FAR),
    "is_negative of neighbours": sign(63, 37, ((0,), (-1,))),
    "is_negative of 16 bits": sign(16, 11, ((1,), (-(2**16),))),
    "is_negative of 4 bits": sign(4, 5, ((15,), (-16,))),
    "is_negative of one bit": sign(1, 5, ((0,), (-1,))),
    "relu": Case(lambda party, x: refmpc.relu(x, 0, 4), ("arithmetic",), ((7,), (-9,)), packed=5),
    "maximum": Case(
        lambda party, x: refmpc.maximum(x * WEIGHTS, 1, 0, 4), ("arithmetic",), ((1,), (-2,)), packed=5, shape=(3,)
    ),
    "select": Case(
        lambda party, b, d: refmpc.select(refmpc.two_holder(b), d), (1, "arithmetic"), ((0, 5), (1, -(2**61)))
    ),
    "where": Case(
        lambda party, b, d: refmpc.where(refmpc.two_holder(b), d, 3), (1, "arithmetic"), ((0, 5), (1, -(2**61)))
    ),
    "bit_to_arithmetic": Case(lambda party, b: refmpc.bit_to_arithmetic(refmpc.two_holder(b)), (1,), BITS),
    "bit_to_arithmetic in two rounds": Case(
        lambda party, b: refmpc.bit_to_arithmetic(refmpc.two_holder(b), 2), (1,), BITS
    ),
    "bits_to_boolean": Case(lambda party, b: refmpc.bits_to_boolean(refmpc.two_holder(b)), (1,), BITS),
    "lookup": Case(lambda party, x: refmpc.lookup(x, np.arange(4) ** 9), ("arithmetic",), ((0,), (2**62 + 3,))),
    "lookup in two tables": Case(
        lambda party, x: refmpc.lookup(x, np.arange(4).reshape(2, 2)), ("arithmetic",), ((0,), (2**62 + 3,))
    ),
    "and_words": Case(lambda party, x, y: refmpc.and_words(x, y), (8, 8), ((0, 255), (255, 255)), packed=256),
    "is_negative_by_carry_tree": Case(lambda party, x: refmpc.is_negative_by_carry_tree(x), ("arithmetic",), FAR),
    "arithmetic_to_boolean": Case(lambda party, x: refmpc.arithmetic_to_boolean(x), ("arithmetic",), FAR),
    "boolean_to_arithmetic": Case(lambda party, x: refmpc.boolean_to_arithmetic(x), (64,), FAR),
    "equal": Case(lambda party, x, y: refmpc.equal(x, y), ("arithmetic",) * 2, ((5, 5), (5, -(2**61)))),
    "input_from_party": Case(
        lambda party, v: refmpc.input_from_party(party, 1, v, (4096,), 0), (("private", 1),), ((5,), (-(2**61),))
    ),
    "reveal": Case(lambda party, x: refmpc.reveal(x, "example", to=1), ("arithmetic",), FAR, learns=(1,)),
}
WEIGHTS = np.array([1, 2, -1])


@pytest.fixture(autouse=True)
def _watched(monkeypatch):
    watch_streams(monkeypatch)


def test_every_primitive_has_a_case():
    assert {name.split()[0] for name in CASES} == set(PROTOCOLS), "add one line to CASES for each new primitive"


@pytest.mark.parametrize("name", CASES)
def test_what_a_party_sees_is_independent_of_the_secrets(name):
    assert leaks(CASES[name]) == []
