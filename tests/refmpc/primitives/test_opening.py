"""Opening a truncated product to one client or to all servers: right within its bound, masked, on the ledger, at the
declared price."""

from __future__ import annotations

import numpy as np
import pytest

import refmpc
from refmpc.core.errors import PartyFailed, ReleaseRefused
from refmpc.primitives.dealing import held
from refmpc.primitives.opening import unbiased_addend

CLAIM = {"product": "a test, no claim"}
BITS, SCALE = 34, 12


def receive(client, count):
    return refmpc.receive_opening(client, count, BITS, SCALE)


async def product(party, job):
    left, right, addends = job
    x = await refmpc.input_from_party(party, 0, left if party.id == 0 else None, left.shape, 14)
    y = await refmpc.input_from_party(party, 1, right if party.id == 1 else None, right.shape, 32)
    words = refmpc.matmul_opening(x, y, BITS, addend=addends[party.id])
    refmpc.open_to_client(party, words.reshape(-1), "a", "product")
    return refmpc.unseal(words)


def run(left, right, addends, **options):
    clients = {"a": (receive, left.shape[0] * right.shape[1])}
    return refmpc.run(product, [(left, right, addends)] * 3, clients=clients, releases=CLAIM, timeout=20, **options)


@pytest.mark.parametrize("size", [1e-3, 1.0, 2000.0], ids=["small", "one", "near the domain"])
def test_the_client_gets_the_product_and_all_addends_within_one_and_a_half_units(size):
    rng = np.random.default_rng(0)
    left, right = np.rint(rng.uniform(-2, 2, (20, 5)) * 2**14) * 2.0**-14, rng.uniform(-size, size, (5, 300))
    right = np.rint(right * 2.0**32) * 2.0**-32
    addends = [rng.integers(-(2**55), 2**55, (20, 300)) for _ in range(3)]
    result = run(left, right, addends)
    expected = (left @ right).reshape(-1) + np.sum(addends, axis=0).reshape(-1) * 2.0**-46
    error = (result.client_outputs["a"] - expected) * 2.0**SCALE
    assert np.abs(error).max() <= 1.5 + 1e-3
    assert abs(error.mean()) < 5 * 0.5 / np.sqrt(error.size)  # unbiased: three uniform roundings, deviation 1/2


def test_it_costs_twelve_bytes_a_value_and_no_round_between_servers():
    result = run(np.ones((4, 3)), np.ones((3, 5)), [np.zeros((4, 5), dtype=np.int64)] * 3)
    inputs = 8 * (12 + 15)
    assert result.bytes == inputs + refmpc.opening_bytes(BITS) * 20 == inputs + 12 * 20
    assert [(r.name, r.receiver, r.elements) for r in result.ledgers[0].releases] == [("product", "client 'a'", 20)]


def test_the_words_of_one_server_are_uniform_whatever_the_product_is():
    """Any two servers' words are independent of the value: high and low values give the same distribution."""
    means = []
    for value in (0.0, 1500.0):
        result = run(np.full((40, 1), 1.0), np.full((1, 250), value), [np.zeros((40, 250), dtype=np.int64)] * 3)
        for words in result.outputs:
            means.append(words.astype(np.float64).mean() * 2.0 ** -(64 - BITS))
    assert np.abs(np.array(means) - 0.5).max() < 5 / np.sqrt(12 * 10_000)


def test_an_undeclared_opening_is_refused():
    with pytest.raises(PartyFailed, match="was not declared") as failure:
        refmpc.run(
            product,
            [(np.ones((1, 1)), np.ones((1, 1)), [np.zeros((1, 1), dtype=np.int64)] * 3)] * 3,
            clients={"a": (receive, 1)},
            releases={"something else": "no claim"},
            timeout=10,
        )
    assert isinstance(failure.value.__cause__, ReleaseRefused)


def test_few_cut_bits_travel_as_full_words():
    assert refmpc.opening_bytes(31) == 24
    assert refmpc.opening_bytes(32) == 12


# to all servers ----------------------------------------------------------------------------------


async def opened_product(party, job):
    left, right, addends = job
    x = await refmpc.input_from_party(party, 0, left if party.id == 0 else None, left.shape, 14)
    y = await refmpc.input_from_party(party, 1, right if party.id == 1 else None, right.shape, 32)
    words = refmpc.matmul_opening(x, y, BITS, addend=addends[party.id].view(np.uint64) + unbiased_addend(party, BITS))
    with party.phase("opened"):
        return await refmpc.open_words(party, words.reshape(-1), BITS, "product")


@pytest.mark.parametrize("size", [1e-3, 1.0, 2000.0], ids=["small", "one", "near the domain"])
def test_all_servers_get_the_same_integers_within_one_and_a_half_units_and_unbiased(size):
    rng = np.random.default_rng(0)
    left = np.rint(rng.uniform(-2, 2, (20, 5)) * 2**14) * 2.0**-14
    right = np.rint(rng.uniform(-size, size, (5, 300)) * 2.0**32) * 2.0**-32
    addends = [rng.integers(-(2**55), 2**55, (20, 300)) for _ in range(3)]
    result = refmpc.run(opened_product, [(left, right, addends)] * 3, releases=CLAIM, timeout=20)
    assert all((output == result.outputs[0]).all() for output in result.outputs)
    expected = (left @ right).reshape(-1) + np.sum(addends, axis=0).reshape(-1) * 2.0**-46
    error = result.outputs[0] - expected * 2.0**SCALE
    assert np.abs(error).max() <= 1.5 + 1e-3
    assert abs(error.mean()) < 5 * 0.5 / np.sqrt(error.size)
    for ledger in result.ledgers:  # 6000 numbers of 30 bits to each of the two others
        assert (ledger.phases["opened"].rounds, ledger.phases["opened"].bytes_sent) == (1, 2 * 6000 * 30 // 8)
        assert [(r.name, r.receiver, r.elements) for r in ledger.releases] == [("product", "all servers", 6000)]


def test_an_undeclared_opening_to_the_servers_is_refused_before_anything_is_sent():
    job = np.ones((1, 1)), np.ones((1, 1)), [np.zeros((1, 1), dtype=np.int64)] * 3
    with pytest.raises(PartyFailed, match="was not declared"):
        refmpc.run(opened_product, [job] * 3, releases={"something else": "no claim"}, timeout=10)


def test_a_product_with_public_integers_is_local_and_exact():
    rng = np.random.default_rng(1)
    left, right = rng.integers(-(2**20), 2**20, (9, 7)), rng.integers(-(2**30), 2**30, (7, 4))

    async def program(party, _):
        x = await refmpc.input_from_party(party, 0, left if party.id == 0 else None, left.shape, 0)
        with party.phase("product"):
            z = refmpc.matmul_public(x, right)
        return await refmpc.reveal(z, "product")

    result = refmpc.run(program, [None] * 3, releases=CLAIM, timeout=20)
    assert (result.outputs[2] == left @ right).all()
    assert result.ledgers[0].phases["product"].rounds == 0
    with pytest.raises(PartyFailed, match="matching inner sizes"):
        refmpc.run(_wrong_shapes, [None] * 3, timeout=20)


@pytest.mark.parametrize("rows", [5, 30])
@pytest.mark.parametrize("begun", range(3))
def test_a_product_held_by_two_has_the_words_of_the_replicated_one(rows, begun):
    """c − ρ is the product, and every party has the very words that ``held`` would give it, whoever deals."""
    rng = np.random.default_rng(1)
    left, right = rng.integers(-(2**20), 2**20, (rows, 7)), rng.integers(-(2**30), 2**30, (7, 4))

    async def program(party, _):
        for _ in range(begun):
            party.operation("another dealer's turn")
        x = await refmpc.input_from_party(party, 0, left if party.id == 0 else None, left.shape, 0)
        z = refmpc.matmul_public_held(x, right, 3)
        same = held(refmpc.matmul_public(x, right).reinterpret(3), z.segments)
        roles = [(segment.role(party.id), segment.slice) for segment in z.segments]
        return refmpc.unseal(z.words), refmpc.unseal(same.words), z.fraction_bits, roles

    outputs = refmpc.run(program, [None] * 3, timeout=20).outputs
    found = np.zeros((rows, 4), dtype=np.uint64)
    for words, same, bits, roles in outputs:
        assert np.array_equal(words, same) and bits == 3
        for role, at in roles:
            if role != 1:
                found[at] += words[at] if role == 0 else np.negative(words[at])
    assert np.array_equal(found.view(np.int64), left @ right)


async def _wrong_shapes(party, _):
    x = await refmpc.input_from_party(party, 0, np.zeros((2, 3)) if party.id == 0 else None, (2, 3), 0)
    return refmpc.matmul_public(x, np.ones((2, 3), dtype=np.int64))


async def of_tensor(party, job):
    values, addends = job
    x = await refmpc.input_from_party(party, 0, values if party.id == 0 else None, values.shape, 46)
    words = refmpc.tensor_opening(x, BITS, addend=addends[party.id])
    return await refmpc.open_words(party, words.reshape(-1), BITS, "product")


@pytest.mark.parametrize("size", [1e-3, 2000.0])
def test_a_shared_tensor_is_opened_with_all_addends_within_one_and_a_half_units(size):
    rng = np.random.default_rng(1)
    values = np.rint(rng.uniform(-size, size, (20, 50)) * 2.0**46) * 2.0**-46
    addends = [rng.integers(-(2**55), 2**55, values.shape) for _ in range(3)]
    outputs = refmpc.run(of_tensor, [(values, addends)] * 3, releases=CLAIM, timeout=20).outputs
    expected = (values + sum(addends) * 2.0**-46).reshape(-1) * 2.0**SCALE
    error = outputs[0] + 1.5 - expected
    assert np.abs(error).max() <= 1.5 + 1e-3 and abs(error.mean()) < 5 * 0.5 / np.sqrt(error.size)
    assert all((output == outputs[0]).all() for output in outputs)
