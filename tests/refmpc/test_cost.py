"""The declared cost of every primitive equals what the transport counts, and meets the aims.

``EXAMPLES`` has one line per primitive: a new primitive without a line fails the suite.
"""

import numpy as np
import pytest
from harness import SMALL, Secret, evaluate, random_signed

import refmpc
from refmpc import PROTOCOLS

COUNTS = [0, 1, 7, 64, 65, 100, SMALL - 1, SMALL, SMALL + 1, 3 * SMALL + 17]
BITS = [1, 5, 8, 16, 33, 62]


def fixed(*shape, bits=31):
    return Secret(random_signed(len(shape), shape, bits=20), bits)


def signs(party, x):
    return party.complete(refmpc.is_negative(x))


def boolean(*shape, width):
    return Secret(np.random.default_rng(1).integers(0, 2**width, shape, dtype=np.uint64), width=width)


def vectors(make, counts=COUNTS):
    """One example per count: secrets, and the arguments the primitive takes."""
    return [make(n) for n in counts]


# name → examples; an example is (secrets, arguments of the primitive from (party, *tensors))
EXAMPLES = {
    "multiply": [
        *vectors(lambda n: ([fixed(n), fixed(n)], lambda party, x, y: (x, y))),
        ([fixed(5, 1), fixed(4)], lambda party, x, y: (x, y)),
        ([fixed(), fixed(3)], lambda party, x, y: (x, y)),
    ],
    "dot": [
        ([fixed(4, 5), fixed(4, 5)], lambda party, x, y: (x, y)),
        ([fixed(7), fixed(7)], lambda party, x, y: (x, y)),
        ([fixed(SMALL + 3, 2), fixed(2)], lambda party, x, y: (x, y)),
        ([fixed(3, 0), fixed(3, 0)], lambda party, x, y: (x, y)),
    ],
    "matmul": [
        ([fixed(*a), fixed(*b)], lambda party, x, y: (x, y))
        for a, b in [((3, 4), (4, 5)), ((4,), (4,)), ((2, 3, 4), (4, 5)), ((80, 2), (2, 80)), ((0, 2), (2, 3))]
    ],
    "multiply_truncate": [
        *[
            ([fixed(n), fixed(n)], lambda party, x, y, bits=bits: (x, y, bits))
            for n in COUNTS
            for bits in (BITS if n < 1000 or n == SMALL + 1 else [16])
        ],
        ([fixed(3, 1), fixed(2)], lambda party, x, y: (x, y, 16, np.ones((3, 2), np.int64))),
    ],
    "dot_truncate": [
        ([fixed(n, 3), fixed(3)], lambda party, x, y, bits=bits: (x, y, bits))
        for n in (0, 1, 65, SMALL + 1)
        for bits in (7, 16)
    ],
    "matmul_truncate": [
        ([fixed(*a), fixed(*b)], lambda party, x, y, bits=bits: (x, y, bits))
        for a, b in [((3, 4), (4, 5)), ((4,), (4,)), ((2, 3, 4), (4, 5)), ((79, 2), (2, 81))]
        for bits in (16, 30)
    ],
    "truncate": [
        ([fixed(n)], lambda party, x, bits=bits: (x, bits))
        for n in COUNTS
        for bits in (BITS if n < 1000 or n == SMALL + 1 else [16])
    ],
    "is_negative": [
        *vectors(lambda n: ([fixed(n)], lambda party, x: (x,))),
        *[([fixed(101)], lambda party, x, w=w: (x, 0, w)) for w in range(1, 64)],
        *[([fixed(n)], lambda party, x: (x, 4, 20)) for n in (33, SMALL + 1)],
    ],
    "relu": vectors(lambda n: ([fixed(n)], lambda party, x: (x, 3, 40))),
    "maximum": [
        ([fixed(*shape)], lambda party, x, axis=axis: (x, axis, 2, 30))
        for shape, axis in [((10,), -1), ((1,), 0), ((7, 10), 1), ((7, 10), 0), ((3, 0, 2), 0), ((1500, 9), -1)]
    ],
    "select": vectors(lambda n: ([fixed(n)], lambda party, x: (signs(party, x), x))),
    "where": vectors(lambda n: ([fixed(n)], lambda party, x: (signs(party, x), x, 3))),
    "bit_to_arithmetic": [
        *vectors(lambda n: ([fixed(n)], lambda party, x: (signs(party, x),))),
        *vectors(lambda n: ([fixed(n)], lambda party, x: (signs(party, x), 2))),
    ],
    "bits_to_boolean": vectors(lambda n: ([fixed(n)], lambda party, x: (signs(party, x),))),
    "lookup": [
        *vectors(lambda n: ([fixed(n)], lambda party, x: (x, np.arange(4)))),
        ([fixed(9)], lambda party, x: (x, np.arange(64).reshape(2, 32))),
    ],
    "and_words": [
        ([boolean(n, width=width), boolean(n, width=width)], lambda party, x, y: (x, y))
        for n in COUNTS
        for width in (1, 13, 63)
    ],
    "is_negative_by_carry_tree": vectors(lambda n: ([fixed(n)], lambda party, x: (x,))),
    "arithmetic_to_boolean": vectors(lambda n: ([fixed(n)], lambda party, x: (x,))),
    "boolean_to_arithmetic": vectors(lambda n: ([boolean(n, width=63)], lambda party, x: (x,))),
    "equal": [
        *vectors(lambda n: ([fixed(n), fixed(n)], lambda party, x, y: (x, y))),
        ([fixed(), fixed(70)], lambda party, x, y: (x, y)),
        ([fixed(70)], lambda party, x: (x, 0.5)),
    ],
    "input_from_party": [
        ([], lambda party, source=source, n=n: (party, source, np.zeros(n) if party.id == source else None, (n,)))
        for source in range(3)
        for n in COUNTS
    ],
    "reveal": [([fixed(n)], lambda party, x, to=to: (x, "example", to)) for n in COUNTS for to in (None, 0, 1, 2)],
}


def test_every_primitive_has_an_example():
    assert set(EXAMPLES) == set(PROTOCOLS), "add one line of examples to EXAMPLES for each new primitive"


@pytest.mark.parametrize("name", sorted(PROTOCOLS))
def test_declared_rounds_and_bytes_are_the_counted_ones(name):
    primitive = PROTOCOLS[name]
    for secrets, arguments in EXAMPLES[name]:

        def program(party, *tensors, arguments=arguments):
            call = arguments(party, *tensors)
            with party.phase("counted"):
                party.complete(primitive(*call))
            return primitive.cost(*call)

        run = evaluate(program, *secrets, releases={"example": "none"})
        (declared, *others) = run.opened
        assert others == [declared, declared]
        ledgers = [ledger.phases["counted"] if declared.rounds else None for ledger in run.run.ledgers]
        if declared.rounds:
            assert {c.rounds for c in ledgers} == {declared.rounds}
            assert sum(c.bytes_sent for c in ledgers) == declared.bytes
        else:
            assert declared.bytes == 0 and not any("counted" in ledger.phases for ledger in run.run.ledgers)


def measured(program, *secrets):
    """Rounds and bytes of the last phase of a run."""
    run = evaluate(program, *secrets).run
    phases = [ledger.phases["counted"] for ledger in run.ledgers]
    return phases[0].rounds, sum(phase.bytes_sent for phase in phases)


def counted_call(primitive, arguments):
    def program(party, *tensors):
        call = arguments(party, *tensors)
        with party.phase("counted"):
            party.complete(primitive(*call))

    return program


AIMS = {  # per element: rounds, bytes
    "multiply": (lambda party, x: (x, x), 1, 24),
    "multiply_truncate": (lambda party, x: (x, x, 16), 2, 30),
    "truncate": (lambda party, x: (x, 16), 1, 20),
    "bit_to_arithmetic": (lambda party, x: (signs(party, x),), 1, 48),
}


@pytest.mark.parametrize("name", AIMS)
@pytest.mark.parametrize("count", [64, 960, 3 * 64 * 50])
def test_the_aims_are_met_to_the_byte(name, count):
    arguments, rounds, each = AIMS[name]
    assert measured(counted_call(PROTOCOLS[name], arguments), fixed(count)) == (rounds, each * count)


@pytest.mark.parametrize("count", [64, 960, 3 * 64 * 50])
def test_selection_is_no_dearer_than_its_aim(count):
    rounds, size = measured(counted_call(refmpc.select, lambda party, x: (signs(party, x), x)), fixed(count))
    assert rounds <= 2 and size <= 40 * count


@pytest.mark.parametrize("width", range(1, 64))
def test_a_comparison_costs_at_most_three_bytes_a_compared_bit_and_two_rounds(width):
    rounds, size = measured(counted_call(refmpc.is_negative, lambda party, x: (x, 0, width)), fixed(64))
    assert rounds == 2 and size <= 3 * width * 64


def test_the_three_links_carry_like_loads_in_a_long_vector():
    """The dealer turns over thirds: no party sends more than its share (and rounding to whole words)."""
    for program in (
        lambda party, x: refmpc.multiply_truncate(x, x, 16),
        lambda party, x: refmpc.truncate(x, 16),
        lambda party, x: refmpc.is_negative(x),
        lambda party, x: refmpc.lookup(x, np.arange(16)),
    ):
        run = evaluate(program, fixed(100_000)).run
        sent = [ledger.phases["main"].bytes_sent for ledger in run.ledgers]
        assert max(sent) < 1.01 * min(sent)


def test_the_dealer_turns_from_operation_to_operation_in_short_vectors():
    def program(party, x):
        return refmpc.gather(*(refmpc.truncate(x, 16) for _ in range(3)))

    sent = [ledger.phases["main"].bytes_sent for ledger in evaluate(program, fixed(50)).run.ledgers]
    assert len(set(sent)) == 1


def test_costs_add_up_one_after_the_other_and_side_by_side():
    one, two = refmpc.Cost(2, 10), refmpc.Cost(3, 5)
    assert one + two == refmpc.Cost(5, 15) and one.beside(two) == refmpc.Cost(3, 15)


def test_every_primitive_names_its_source():
    assert all(primitive.source and primitive.__doc__ for primitive in PROTOCOLS.values())
