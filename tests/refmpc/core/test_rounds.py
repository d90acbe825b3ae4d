"""Independent protocols share rounds: the largest number of rounds, the sum of bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import refmpc
from tests.refmpc.harness import Secret, evaluate, random_signed, seeds

X = random_signed(1, (50,), bits=28)
SECRET = Secret(X, 8)

CHOICES = {
    "multiply": lambda x: refmpc.multiply(x, x),
    "truncate": lambda x: refmpc.truncate(x, 5),
    "multiply_truncate": lambda x: refmpc.multiply_truncate(x, x, 8),
    "is_negative": lambda x: refmpc.is_negative(x),
    "relu": lambda x: refmpc.relu(x),
    "equal": lambda x: refmpc.equal(x, x),
    "a2b": lambda x: refmpc.arithmetic_to_boolean(x),
    "lookup": lambda x: refmpc.lookup(x, np.arange(8)),
    "maximum": lambda x: refmpc.maximum(x),
}


@pytest.fixture(scope="module")
def alone():
    """Result and cost of each choice by itself."""
    return {name: evaluate(lambda party, x, one=one: one(x), SECRET) for name, one in CHOICES.items()}


@given(names=st.lists(st.sampled_from(sorted(CHOICES)), max_size=5), seed=seeds)
def test_gathered_protocols_cost_the_most_rounds_and_the_sum_of_bytes(alone, names, seed):
    run = evaluate(lambda party, x: refmpc.gather(*(CHOICES[name](x) for name in names)), SECRET, seed=seed)
    assert run.run.rounds == max((alone[name].run.rounds for name in names), default=0)
    assert run.run.bytes == sum(alone[name].run.bytes for name in names)
    for name, result in zip(names, run.opened, strict=True):
        one = alone[name].opened
        tolerance = 1 if "truncate" in name else 0
        assert result.scale == one.scale
        assert (np.abs(result.words.astype(np.int64) - one.words.astype(np.int64)) <= tolerance).all()


def test_nested_gathers_share_rounds_too(alone):
    async def program(party, x):
        inner = refmpc.gather(CHOICES["multiply"](x), refmpc.gather(CHOICES["relu"](x), CHOICES["truncate"](x)))
        return await refmpc.gather(CHOICES["is_negative"](x), inner, CHOICES["equal"](x))

    run = evaluate(program, SECRET)
    sign, (square, (positive, _)), same = run.opened
    used = ["multiply", "relu", "truncate", "is_negative", "equal"]
    assert run.run.rounds == alone["equal"].run.rounds
    assert run.run.bytes == sum(alone[name].run.bytes for name in used)
    assert np.array_equal(sign.words, X < 0) and same.words.all()
    assert np.array_equal(square.signed, X * X) and np.array_equal(positive.signed, np.maximum(X, 0))


def test_a_gather_saves_frames_as_well():
    def frames(program):
        run = evaluate(program, SECRET).run
        return sum(ledger.total().frames_sent for ledger in run.ledgers)

    one = frames(lambda party, x: refmpc.multiply(x, x))
    three = frames(lambda party, x: refmpc.gather(*(refmpc.multiply(x, x) for _ in range(3))))
    assert one == three


def test_operators_work_inside_async_programs_but_take_their_own_round(alone):
    async def program(party, x):
        async def mixed():
            square = await refmpc.multiply(x, x)
            return square - x.rescale(16) * 3, (x < 0).arithmetic(), x * x

        return await refmpc.gather(mixed(), refmpc.multiply(x, x))

    run = evaluate(program, SECRET)
    (_, sign, _), square = run.opened
    assert np.array_equal(sign.signed, X < 0) and np.array_equal(square.signed, X * X)
    assert run.run.rounds == 1 + 2 + 1 + 2


def test_later_protocols_may_depend_on_gathered_ones():
    async def program(party, x):
        a, b = await refmpc.gather(refmpc.multiply(x, x), refmpc.is_negative(x))
        return await refmpc.select(b, a)

    run = evaluate(program, SECRET)
    assert run.run.rounds == 4
    assert np.array_equal(run.opened.signed, np.where(X < 0, X * X, 0))


def test_an_error_inside_a_gather_closes_its_siblings_and_reaches_the_caller():
    closed = []

    async def sibling(party, x):
        try:
            await refmpc.multiply(x, x)
            await refmpc.multiply(x, x)
        finally:
            closed.append(party.id)

    async def culprit(party, x):
        await refmpc.multiply(x, x)
        raise LookupError("the culprit")

    with pytest.raises(refmpc.PartyFailed, match="LookupError: the culprit") as failure:
        evaluate(
            lambda party, x: refmpc.gather(sibling(party, x), culprit(party, x), sibling(party, x)), SECRET, timeout=5
        )
    assert isinstance(failure.value.__cause__, LookupError)
    assert sorted(closed) == [0, 0, 1, 1, 2, 2]


def test_an_error_inside_a_gather_can_be_handled_and_the_run_goes_on():
    async def culprit(party, x):
        await refmpc.multiply(x, x)
        raise LookupError

    async def program(party, x):
        with pytest.raises(LookupError):
            await refmpc.gather(refmpc.relu(x), culprit(party, x))
        return await refmpc.multiply(x, x)

    assert np.array_equal(evaluate(program, SECRET).opened.signed, X * X)


def test_one_partys_error_ends_the_others_soon():
    def program(party, x):
        if party.id == 1:
            raise ValueError("only here")
        return refmpc.multiply(x, x)

    with pytest.raises(refmpc.PartyFailed, match="server-1 failed: ValueError: only here") as failure:
        evaluate(program, SECRET, timeout=20)
    assert "server-0 ended too" in str(failure.value) or "server-2 ended too" in str(failure.value)


def test_parties_that_gather_differently_notice():
    def program(party, x):
        order = [refmpc.multiply(x, x), refmpc.truncate(x, 5)]
        return refmpc.gather(*(reversed(order) if party.id == 2 else order))

    with pytest.raises(refmpc.PartyFailed, match=r"out of step|different shapes"):
        evaluate(program, SECRET, timeout=5)
