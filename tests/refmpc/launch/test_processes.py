"""The same programs in three processes, over TCP and over TLS: several primitives in one run each."""

import os

import numpy as np
import pytest
from threadpoolctl import threadpool_info

import refmpc
from refmpc.core.party import SMALL
from tests.refmpc.harness import Secret, evaluate, random_signed

COUNT = SMALL + 70  # three dealers
X, Y = random_signed(1, (COUNT,), bits=30), random_signed(2, (COUNT,), bits=30)
TABLE = np.arange(8) * 3


async def program(party, x, y, b):
    """A bit of everything, with shared rounds; x, y at 16 bits."""
    product, quotient, sign, same = await refmpc.gather(
        refmpc.multiply_truncate(x, y, 16), refmpc.truncate(x, 10), refmpc.is_negative(x), refmpc.equal(x, x[:1])
    )
    chosen, counted, found = await refmpc.gather(
        refmpc.select(sign, y), refmpc.bit_to_arithmetic(sign), refmpc.lookup(x, TABLE)
    )
    words = await refmpc.arithmetic_to_boolean(x[:100])
    back = await refmpc.boolean_to_arithmetic(words & b)
    table = await refmpc.matmul(x[:6].reshape(2, 3), y[:6].reshape(3, 2))
    largest = await refmpc.maximum(x[:40].reshape(4, 10))
    mine = await refmpc.input_from_party(party, 2, X[:5] if party.id == 2 else None, (5,), 0)
    with party.phase("release"):
        opened = await refmpc.reveal(x[:4], release="head")
        alone = await refmpc.reveal(x[:4], release="head", to=1)
    return [product, quotient, sign, same, chosen, counted, found, back, table, largest, mine, opened, alone]


@pytest.fixture(scope="module")
def in_threads():
    return play(parties="threads")


def play(**options):
    secrets = Secret(X, 16, layout="strided"), Secret(Y, 16), Secret(np.full(100, 2**40 - 1), width=64)
    return evaluate(program, *secrets, releases={"head": "for the test"}, timeout=60, **options)


def check(played, in_threads):
    product, quotient, sign, same, chosen, counted, found, back, table, largest, mine, opened, alone = played.opened
    assert set(product.signed - ((X * Y) >> 16)) <= {0, 1}
    assert set(quotient.signed - (X >> 10)) <= {0, 1}
    assert np.array_equal(sign.words, X < 0) and np.array_equal(counted.signed, X < 0)
    assert np.array_equal(same.words, X[0] == X)
    assert np.array_equal(chosen.signed, np.where(X < 0, Y, 0))
    assert np.array_equal(found.signed, TABLE[X % 8])
    assert np.array_equal(back.signed, X[:100] & (2**40 - 1))
    assert np.array_equal(table.signed, X[:6].reshape(2, 3) @ Y[:6].reshape(3, 2))
    assert np.array_equal(largest.signed, X[:40].reshape(4, 10).max(axis=1))
    assert np.array_equal(mine.signed, X[:5])
    assert all(np.array_equal(values, X[:4] / 2**16) for values in opened)
    assert [values is not None for values in alone] == [False, True, False]
    assert (played.run.rounds, played.run.bytes) == (in_threads.run.rounds, in_threads.run.bytes)
    assert all(ledger.phases["release"].rounds == 2 for ledger in played.run.ledgers)


def test_threads_compute_what_numpy_does(in_threads):
    check(in_threads, in_threads)


def test_three_processes_compute_the_same_at_the_same_cost(in_threads):
    check(play(parties="processes"), in_threads)


def test_three_processes_over_tls_compute_the_same_at_the_same_cost(in_threads):
    check(play(parties="processes", tls=True), in_threads)


def bank(client, values):
    client.share(values)
    return client.receive((3,))


def tripled(party):
    x = refmpc.input_from_client(party, "bank", (3,))
    refmpc.reveal_to_client(x * 3, "bank", release="tripled")


@pytest.mark.parametrize("tls", [False, True], ids=["tcp", "tls"])
def test_a_client_of_three_processes_gets_its_result(tls):
    clients = {"bank": (bank, [1.5, -2.0, 0.0])}
    run = refmpc.run(
        tripled, parties="processes", clients=clients, tls=tls, releases={"tripled": "a client's own data"}
    )
    assert run.client_outputs["bank"].tolist() == [4.5, -6.0, 0.0]


def seeded(party):
    return party.operation("draw").stream("next").words(4)


def test_a_fixed_seed_gives_the_same_masks_in_threads_and_in_processes():
    with pytest.warns(UserWarning, match="insecure_seed"):
        runs = [refmpc.run(seeded, parties=parties, insecure_seed=9) for parties in ("threads", "processes")]
    assert np.array_equal(runs[0].outputs, runs[1].outputs)


def failing(party):
    if party.id == 1:
        raise LookupError("just here")
    return party.complete(refmpc.reveal(refmpc.ArithmeticTensor(party, np.zeros((2, 3), np.uint64)), release="zeros"))


def test_one_partys_error_in_a_process_reaches_the_caller():
    with pytest.raises(refmpc.PartyFailed, match="server-1 failed: LookupError: just here"):
        refmpc.run(failing, parties="processes", releases={"zeros": "nothing"}, timeout=20)


def blas_threads(*_):
    return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]


def test_processes_of_one_machine_share_its_cores():
    """As many BLAS threads as there are cores in every process would wait for each other."""
    clients = dict.fromkeys(("bank", "shop"), (blas_threads, None))
    result = refmpc.run(blas_threads, parties="processes", clients=clients, timeout=60)
    cores = os.cpu_count() or 1
    assert all(found and max(found) <= max(1, cores // 3) for found in result.outputs)
    assert all(found and max(found) <= max(1, cores // 2) for found in result.client_outputs.values())
