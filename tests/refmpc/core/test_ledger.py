"""Releases only as declared; phases; the insecure debug modes; randomness."""

import json
import warnings

import numpy as np
import pytest

import refmpc
from refmpc.core.ledger import Ledger
from refmpc.core.party import Operation
from refmpc.primitives.io import SHARE_DIGEST_BYTES
from tests.refmpc.harness import Secret, evaluate, opened, packed, random_signed, unpacked

DECLARED = {"model": "covered by claim A", "loss": "covered by claim B"}


# releases ---------------------------------------------------------------------------------------


def test_an_undeclared_release_is_refused_and_nothing_is_sent():
    seen = []

    def program(party, x):
        before = party.transport.bytes_sent, party.transport.frames_sent
        try:
            party.complete(refmpc.reveal(x, release="secret"))
        finally:
            seen.append((party.transport.bytes_sent, party.transport.frames_sent) == before)

    with pytest.raises(refmpc.PartyFailed, match=r"release 'secret' \(3 elements to all servers\) was not declared"):
        evaluate(program, Secret([1, 2, 3]), releases=DECLARED)
    assert seen == [True] * 3


def test_the_refusal_lists_what_was_declared():
    with pytest.raises(refmpc.PartyFailed, match=r"declared are: 'model', 'loss'\. Declare it together with the claim"):
        evaluate(lambda party, x: refmpc.reveal(x, release="gradient", to=1), Secret([1]), releases=DECLARED)
    with pytest.raises(refmpc.PartyFailed, match="declared are: none"):
        evaluate(lambda party, x: refmpc.reveal(x, release="gradient"), Secret([1]))


def test_an_undeclared_release_to_a_client_is_refused_too():
    def program(party):
        x = refmpc.ArithmeticTensor(party, np.zeros((2, 3), dtype=np.uint64))
        refmpc.reveal_to_client(x, "bank", release="secret")

    with pytest.raises(refmpc.PartyFailed, match=r"release 'secret' \(3 elements to client 'bank'\) was not declared"):
        refmpc.run(program, clients={"bank": (lambda client, _: client.receive((3,)), None)}, releases=DECLARED)


def test_every_release_is_recorded_with_size_receiver_and_claim():
    async def program(party, x):
        await refmpc.reveal(x, release="model")
        await refmpc.reveal(x[:2], release="loss", to=2)

    run = evaluate(program, Secret([1, 2, 3]), releases=DECLARED).run
    for ledger in run.ledgers:
        assert [(r.name, r.elements, r.receiver, r.claim) for r in ledger.releases] == [
            ("model", 3, "all servers", "covered by claim A"),
            ("loss", 2, "server-2", "covered by claim B"),
        ]
        told = json.loads(ledger.to_json())
        assert told["declared"] == DECLARED and told["releases"][1]["elements"] == 2


def test_a_release_needs_a_claim():
    with pytest.raises(refmpc.ReleaseRefused, match="'model' is declared with an empty claim"):
        Ledger().declare({"model": ""})


def test_a_release_reaches_all_or_just_its_receiver():
    values = random_signed(1, (4, 2))

    async def program(party, x, b):
        everyone = await refmpc.reveal(x, release="model")
        words = await refmpc.reveal(b, release="model")
        alone = [await refmpc.reveal(x.T, release="loss", to=i) for i in range(3)]
        return [everyone, words, *alone]

    got = opened(program, Secret(values), Secret(values, width=64), releases=DECLARED)
    assert all(np.array_equal(mine, values) for mine in got[0])
    assert all(np.array_equal(mine.view(np.int64), values) for mine in got[1])
    for receiver, seen in enumerate(got[2:]):
        assert np.array_equal(seen[receiver], values.T)
        assert [i for i in range(3) if seen[i] is not None] == [receiver]


@pytest.mark.parametrize("to", [3, -1, "bank"])
def test_a_receiver_that_does_not_exist_is_refused(to):
    with pytest.raises(refmpc.PartyFailed, match=r"to = .*: must be an integer from 0 to 2"):
        evaluate(lambda party, x: refmpc.reveal(x, "model", to), Secret([1]), releases=DECLARED)


def test_rounds_and_bytes_are_counted_by_phase():
    def program(party, x):
        x * x
        with party.phase("forward"):
            party.complete(refmpc.multiply(x, x))
            with party.phase("inner"):
                party.complete(refmpc.multiply(x, x))
                party.complete(refmpc.multiply(x, x))
            party.complete(refmpc.multiply(x, x))
        with pytest.raises(ZeroDivisionError), party.phase("broken"):
            1 / 0  # noqa: B018
        party.complete(refmpc.multiply(x, x))

    run = evaluate(program, Secret([1, 2, 3], 16)).run
    phases = run.ledgers[1].phases
    assert sorted(phases) == ["broken", "forward", "inner", "main", "set-up"]
    assert phases["broken"].rounds == phases["broken"].bytes_sent == 0
    assert (phases["forward"].rounds, phases["inner"].rounds, phases["main"].rounds) == (2, 2, 3)
    assert phases["forward"].bytes_sent == phases["inner"].bytes_sent == 48
    total = run.ledgers[1].total()
    assert total.rounds == run.rounds + phases["set-up"].rounds == 8
    assert run.bytes == sum(ledger.total().bytes_sent - ledger.phases["set-up"].bytes_sent for ledger in run.ledgers)


# input and output -------------------------------------------------------------------------------


@pytest.mark.parametrize("source", range(3))
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (7000,)])
def test_a_party_shares_its_values(source, shape):
    values = random_signed(source, shape, bits=40) / 2**8

    def program(party):
        mine = values.T.copy().T if party.id == source else None
        return refmpc.input_from_party(party, source, mine, shape, 8)

    got = opened(program)
    assert got.scale == 8 and np.array_equal(got.value, values) and got.words.shape == shape


def test_a_value_that_cannot_be_encoded_is_named():
    with pytest.raises(refmpc.PartyFailed, match=r"values\[1\] = nan: must be finite"):
        opened(lambda party: refmpc.input_from_party(party, 0, [0.0, np.nan] if party.id == 0 else None, (2,)))
    with pytest.raises(refmpc.PartyFailed, match=r"values.shape = \(3,\): must be the declared shape \(2,\)"):
        opened(lambda party: refmpc.input_from_party(party, 1, [0.0] * 3 if party.id == 1 else None, (2,)))
    with pytest.raises(refmpc.PartyFailed, match="source = 3"):
        opened(lambda party: refmpc.input_from_party(party, 3, None, (2,)))


@pytest.mark.parametrize("shape", [(0,), (5,), (2, 3), (7000,)])
def test_clients_share_values_and_receive_results(shape):
    values = random_signed(5, shape, bits=30) / 2**10

    def program(party):
        x = refmpc.input_from_client(party, "bank", shape, 10)
        y = refmpc.input_from_client(party, "shop", shape, 10)
        refmpc.reveal_to_client(x + y, "shop", release="model")
        return [x, y]

    def bank(client, mine):
        client.share(mine, 10)

    def shop(client, mine):
        client.share(mine, 10)
        return client.receive(shape, 10)

    run = refmpc.run(
        lambda party: packed(program(party)),
        clients={"bank": (bank, values), "shop": (shop, 2 * values)},
        releases=DECLARED,
    )
    x, y = unpacked(run.outputs)
    assert np.array_equal(x.value, values) and np.array_equal(y.value, 2 * values)
    assert np.array_equal(run.client_outputs["shop"], 3 * values)
    assert run.client_outputs["bank"] is None
    assert [r.receiver for r in run.ledgers[0].releases] == ["client 'shop'"]
    assert run.bytes == 24 * values.size + 3 * SHARE_DIGEST_BYTES  # only the way out: input is sent by the clients


# insecure modes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"insecure_seed": 0}, {"insecure_check_ranges": True}, {"insecure_record": True}],
    ids=lambda o: next(iter(o)),
)
def test_every_insecure_option_warns(options):
    with pytest.warns(UserWarning, match=f"{next(iter(options))} is set: this run protects nothing"):
        refmpc.run(lambda party: None, **options)


def test_a_secure_run_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refmpc.run(lambda party: None)


OUTSIDE = {
    "truncate": lambda x: refmpc.truncate(x, 8),
    "multiply_truncate": lambda x: refmpc.multiply_truncate(x, x, 8),
    "dot_truncate": lambda x: refmpc.dot_truncate(x, x, 8),
    "matmul_truncate": lambda x: refmpc.matmul_truncate(x, x.reshape(2, 1), 8),
    "is_negative": lambda x: refmpc.is_negative(x, 0, 60),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_debug_mode_names_the_first_operation_that_leaves_its_domain(name):
    inside, outside = Secret([1, -(2**20)], 16), Secret([1, -(2**62) - 1], 16)

    async def program(party, x, y):
        results = [await OUTSIDE[each](x) for each in OUTSIDE]
        await OUTSIDE[name](y)
        await OUTSIDE["truncate" if name != "truncate" else "is_negative"](y)
        return results

    if name.startswith(("multiply", "dot", "matmul")):
        outside = Secret([2**31, 2**31], 16)
    with pytest.raises(refmpc.PartyFailed, match=f"'{name}' left its domain: element .* in the ring, allowed is -"):
        evaluate(program, inside, outside, insecure_check_ranges=True)
    evaluate(program, inside, inside, insecure_check_ranges=True)


def test_debug_mode_gives_the_element_and_its_value():
    with pytest.raises(refmpc.PartyFailed, match=rf"element \(1, 0\) is {2**62} in the ring"):
        evaluate(lambda party, x: refmpc.truncate(x, 3), Secret([[1], [2**62]], 8), insecure_check_ranges=True)


@pytest.mark.parametrize(
    "value, allowed", [(2**16 - 16, True), (2**16 - 15, False), (-(2**16), True), (-(2**16) - 1, False)]
)
def test_debug_mode_knows_the_domain_of_a_short_comparison(value, allowed):
    def run():
        return opened(lambda party, x: refmpc.is_negative(x, 4, 16), Secret([value]), insecure_check_ranges=True)

    if allowed:
        assert run().words.tolist() == [value < 0]
    else:
        with pytest.raises(refmpc.PartyFailed, match="'is_negative' left its domain"):
            run()


def test_debug_mode_catches_a_mask_that_is_used_twice():
    def program(party, x):
        for _ in range(2):
            Operation(party, "again", 5).zero_share((3,))

    with pytest.raises(refmpc.PartyFailed, match="of step 0, operation 5 was used before"):
        evaluate(program, Secret([1]), insecure_check_ranges=True)


def test_debug_mode_finds_no_mask_used_twice_in_any_primitive():
    async def program(party, x):
        bits = await refmpc.is_negative(x)
        await refmpc.gather(
            refmpc.multiply(x, x), refmpc.relu(x), refmpc.equal(x, x), refmpc.lookup(x, np.arange(8).reshape(2, 4))
        )
        party.step += 1
        await refmpc.gather(refmpc.select(bits, x), refmpc.bit_to_arithmetic(bits), refmpc.truncate(x, 3))
        words = await refmpc.arithmetic_to_boolean(x)
        return await refmpc.boolean_to_arithmetic(words)

    assert opened(program, Secret([1, -2], 4), insecure_check_ranges=True).signed.tolist() == [1, -2]


# randomness -------------------------------------------------------------------------------------


def masks(**options):
    """The shares of zeros after a product: the masks of the run, and each party's private stream."""

    def program(party, x):
        return [party.complete(refmpc.multiply(x, x)), party.private_stream("noise").words(50)]

    product, private = opened(program, Secret(np.zeros(50, np.int64)), **options)
    return np.concatenate([*product.shares[0], product.shares[1][1]]), private


def test_runs_draw_fresh_masks():
    (first, first_private), (second, second_private) = masks(), masks()
    assert not np.isin(first, second).any()
    assert not np.isin(first_private, second_private).any()


def test_a_fixed_seed_repeats_a_run_and_another_seed_does_not():
    (first, mine), (again, mine_again), (other, mine_other) = (masks(insecure_seed=s) for s in (1, 1, 2))
    assert np.array_equal(first, again) and np.array_equal(mine, mine_again)
    assert not np.isin(first, other).any() and not np.isin(mine, mine_other).any()


def test_pair_streams_are_known_to_two_parties_and_private_ones_to_one():
    def program(party):
        operation = party.operation("draw")
        return [
            operation.stream("next").words(8),
            operation.stream("previous").words(8),
            party.private_stream("a").words(8),
            party.private_stream("b").words(8),
            party.private_stream("a", 1).words(8),
        ]

    following, preceding, *private = opened(program)
    for i in range(3):
        assert np.array_equal(following[i], preceding[(i + 1) % 3])
    everything = np.concatenate([*following, *(w for stream in private for w in stream)])
    assert np.unique(everything).size == everything.size


def test_steps_and_operations_have_streams_of_their_own():
    def program(party):
        drawn = []
        for step in (0, 1, 2**32 - 1):
            party.step = step
            drawn += [party.operation("draw").stream("next").words(8) for _ in range(2)]
        return np.concatenate(drawn)

    everything = np.concatenate(opened(program))
    assert np.unique(everything).size == everything.size
    with pytest.raises(refmpc.PartyFailed, match="step = 4294967296"):
        opened(lambda party: setattr(party, "step", 2**32))


@pytest.mark.parametrize("bound", [2, 3, 5, 36, 37, 67])
def test_small_random_values_are_uniform(bound):
    def program(party):
        operation = party.operation("draw")
        return [
            operation.uniform_below(operation.stream("next"), bound, (50, 400)),
            operation.uniform_below(operation.stream("previous"), bound, (50, 400)),
        ]

    mine, theirs = opened(program, insecure_seed=bound)
    for i in range(3):
        assert np.array_equal(mine[i], theirs[(i + 1) % 3])
        counts = np.bincount(mine[i].reshape(-1), minlength=bound)
        assert counts.size == bound
        expected = 20_000 / bound
        assert ((counts - expected) ** 2 / expected).sum() < bound + 6 * (2 * bound) ** 0.5 + 10
