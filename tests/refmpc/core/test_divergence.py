"""Parties that do not do the same notice in the round where it matters, and never compute garbage."""

import re
from typing import Any

import numpy as np
import pytest

import refmpc
from refmpc.core.digest import digest
from tests.refmpc.harness import Secret, evaluate

X, Y = Secret(np.array([3, -5, 7, 100, -2, 9]), 4), Secret(np.array([1, 2, -3, 4, 5, 6]), 4)

# name: (what the parties do, given the public choice; the two choices; the operation in which it must be noticed)
DIVERGENCES = {
    "comparison range, equal width": (lambda x, y, c: refmpc.is_negative(x, *c), ((0, 20), (1, 21)), "is_negative"),
    "upper of exp": (lambda x, y, c: refmpc.exp(x, c, -20.0 + c), (2.0, 2.5), "exp"),
    "thresholds": (lambda x, y, c: refmpc.thermometer(x, [0, c], [0, 0], 30), (64, 65), "thermometer"),
    "table": (lambda x, y, c: refmpc.lookup(x, np.arange(8) + c), (0, 1), "lookup"),
    "scale of a table": (lambda x, y, c: refmpc.lookup(x, np.arange(8), c), (3, 4), "lookup"),
    "scale": (lambda x, y, c: refmpc.multiply(x.reinterpret(c), y), (4, 5), "multiply"),
    "exact rescaling": (lambda x, y, c: refmpc.multiply(x.rescale(c).reinterpret(8), y), (8, 7), "multiply"),
    "public number": (lambda x, y, c: refmpc.multiply(x + c, y), (1.0, 2.0), "multiply"),
    "public number in front": (lambda x, y, c: refmpc.multiply(c - x, y), (-1, -2), "multiply"),
    "public array": (lambda x, y, c: refmpc.multiply(x - np.arange(6) * c, y), (1.0, 2.0), "multiply"),
    "sign": (lambda x, y, c: refmpc.multiply(x - y if c else y - x, y), (True, False), "multiply"),
    "negation": (lambda x, y, c: refmpc.multiply(-x if c else x, y), (True, False), "multiply"),
    "public factor": (lambda x, y, c: refmpc.multiply(x.scale_by_integers(c), y), (2, 3), "multiply"),
    "public real factor": (lambda x, y, c: refmpc.multiply(x * c, y), (0.5, 0.25), "truncate"),
    "index": (lambda x, y, c: refmpc.multiply(x[c : c + 3], y[:3]), (0, 1), "multiply"),
    "batch": (lambda x, y, c: refmpc.multiply(x[np.array(c)], y[:3]), ([0, 1, 2], [0, 2, 1]), "multiply"),
    "axes": (lambda x, y, c: refmpc.matmul(x[:4].reshape(2, 2).transpose(*c), y[:2]), ((0, 1), (1, 0)), "matmul"),
    "axis of a sum": (lambda x, y, c: refmpc.multiply(x[:4].reshape(2, 2).sum(axis=c), y[:2]), (0, 1), "multiply"),
    "order of a join": (
        lambda x, y, c: refmpc.is_negative(refmpc.concatenate([x, y][::c])),
        (1, -1),
        "is_negative",
    ),
    "order of a gather": (
        lambda x, y, c: refmpc.gather(*[refmpc.multiply(x, x), refmpc.multiply(y, y)][::c]),
        (1, -1),
        "multiply",
    ),
    "order after a gather": (
        lambda x, y, c: _in_two_gathers(x, y, c),
        (1, -1),
        "multiply",
    ),
    "bits truncated": (lambda x, y, c: refmpc.multiply_truncate(x[:4], y[:4], c), (3, 4), "multiply_truncate"),
    "weights of bits": (lambda x, y, c: _weighed(x, c), (3, 4), "weigh_bits"),
    "bits inverted": (lambda x, y, c: _selected(x, y, c), (True, False), "select"),
}


async def _in_two_gathers(x, y, order):
    squares = await refmpc.gather(refmpc.multiply(x, x), refmpc.multiply(y, y))
    return await refmpc.gather(*(refmpc.multiply(square, x) for square in squares[::order]))


async def _weighed(x, weight):
    return await refmpc.weigh_bits([await refmpc.is_negative(x)], np.array([[weight]]))


async def _selected(x, y, inverted):
    bits = await refmpc.is_negative(x)
    return await refmpc.select(~bits if inverted else bits, y)


@pytest.mark.parametrize("odd", range(3))
@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_party_with_other_public_arguments_is_noticed_at_once(name, odd):
    work, choices, operation = DIVERGENCES[name]
    ended = []

    def program(party, x, y):
        party.step = 4
        party.complete(work(x, y, choices[party.id == odd]))
        for _ in range(2):  # rounds in which every party hears of the end of the others
            party.complete(refmpc.multiply(x, y))
        ended.append(party.id)

    evaluate(lambda party, x, y: work(x, y, choices[1]), X, Y)  # if all choose alike it is allowed
    with pytest.raises(
        refmpc.PartyFailed, match=rf"out of step in '{operation}.*public arg.*step 4, operation \d"
    ) as failure:
        evaluate(program, X, Y, timeout=5)
    assert ended == []
    assert set(failure.value.tracebacks) == {0, 1, 2}
    named = [re.search(r"server-(\d) is out of step", text) for text in failure.value.tracebacks.values()]
    assert any(named)


@pytest.mark.parametrize("odd", range(3))
def test_a_party_that_began_one_operation_more_is_noticed_before_a_mask_is_used_again(odd):
    def program(party, x, y):
        if party.id == odd:
            party.operation("one more")
        product = party.complete(refmpc.multiply(x, y))
        return party.complete(refmpc.dot(product, y))

    with pytest.raises(refmpc.PartyFailed, match="out of step in 'multiply'.*number of operations"):
        evaluate(program, X, Y, timeout=5)


@pytest.mark.parametrize("odd", range(3))
def test_a_party_in_another_step_is_noticed(odd):
    def program(party, x, y):
        party.step = 1 + (party.id == odd)
        return refmpc.multiply(x, y)

    with pytest.raises(refmpc.PartyFailed, match="out of step in 'multiply'"):
        evaluate(program, X, Y, timeout=5)


@pytest.mark.parametrize("bad", [[np.nan, 1.0], [1.0, 2.0, 3.0]])
@pytest.mark.parametrize("source", range(3))
def test_a_party_whose_input_is_refused_may_try_again(source, bad):
    """Checks come before the operation's number is taken."""

    async def program(party):
        if party.id == source:
            with pytest.raises(ValueError, match="values"):
                await refmpc.input_from_party(party, source, bad, (2,))
        x = await refmpc.input_from_party(party, source, [1.5, -2.0] if party.id == source else None, (2,))
        return await refmpc.multiply(x, x)

    assert evaluate(program).opened.value.tolist() == [2.25, 4.0]


@pytest.mark.parametrize(
    "attempt",
    [
        lambda x, addend: refmpc.multiply_truncate(x, x, 4, addend),
        lambda x, addend: refmpc.matmul_truncate(x, x, 4, addend),
        lambda x, addend: refmpc.matmul_opening(x, x, 40, addend),
        lambda x, addend: refmpc.tensor_opening(x, 40, addend),
    ],
)
def test_a_party_whose_own_noise_is_refused_may_try_again(attempt):
    def program(party, x, y):
        if party.id == 1:
            with pytest.raises(ValueError, match="addend"):
                refused = attempt(x, np.zeros(99, np.int64))
                party.complete(refused)
        return refmpc.multiply(x, y)

    assert np.array_equal(evaluate(program, X, Y).opened.signed, X.values * Y.values)


def test_what_one_party_does_for_itself_is_its_own_affair():
    """Local work whose result goes into no operation, and asking for a cost, put nobody out of step."""

    def program(party, x, y):
        if party.id == 1:
            refmpc.softmax.cost(x.reshape(2, 3).reinterpret(16))
            assert (x + 1.0 - y)[::2].shape == (3,)
        return refmpc.multiply(x, y)

    assert np.array_equal(evaluate(program, X, Y).opened.signed, X.values * Y.values)


def test_digests_tell_apart_what_is_different():
    values: list[Any] = [
        0,
        1,
        -1,
        -2,
        2**64,
        2**61 - 1,
        2**63 + 7,
        -(2**63) + 6,
        1.0,
        -1.0,
        2.0,
        None,
        ...,
        "a",
        "b",
        (),
        (1,),
        (1, 0),
        (0, 1),
        [1],
        slice(1),
        slice(2),
    ]
    values += [
        slice(None, 1, 2),
        np.arange(3),
        np.arange(3.0),
        np.arange(4)[:3] + 1,
        np.zeros((2, 2)),
        np.zeros(4),
        True,
    ]
    different = [v for v in values if v is not True and not isinstance(v, list)]
    assert len({digest(v) for v in different}) == len(different)
    assert digest(np.int64(3)) == digest(3) and digest(np.float64(0.5)) == digest(0.5)
