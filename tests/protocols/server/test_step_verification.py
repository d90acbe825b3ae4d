"""GL-BMF: what a client shares in a step beyond its public bounds is refused, the client named, and that step not
released."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refmpc
from accel.errors import InvalidArgument
from protocols.client import gl_client
from protocols.plan.gl_plan import LayerPlan, plan_layer_run
from protocols.plan.gl_shapes import AdapterShape
from protocols.plan.row_test import NormTest, norm_test, step_release, upload_release
from protocols.server.step_verification import verify_labels, verify_step
from refmpc import ArithmeticTensor, Party
from refmpc.primitives.input_checks import REACH
from tests.protocols.gl_runs import make, run_secure
from tests.protocols.step.gl_inputs import adapter_shapes
from vfl.dp.claim import ROW_BOUND_CHECKED_IN_STEPS, ROW_BOUND_TRUSTED
from vfl.federation import Federation

BATCH = 32


@pytest.fixture(scope="module")
def made() -> tuple[Federation, LayerPlan]:
    return make(weights="open", epochs=2, learning_rate=0.1, local={"local_learning_rate": 0.1})


def test_honest_clients_pass_in_every_step_and_the_claim_says_so(
    tmp_path: Path, made: tuple[Federation, LayerPlan]
) -> None:
    federation, plan = made
    result = run_secure(plan, federation, tmp_path)
    assert plan.tests_steps and ROW_BOUND_CHECKED_IN_STEPS in plan.claim.public
    assert ROW_BOUND_TRUSTED not in plan.claim.public
    assert sum("which the servers check in every step" in text for text in plan.claim.public) == 1
    names = [release.name for release in result.ledgers[0].releases]
    for client in plan.client_names:
        assert names.count(step_release(client)) == plan.schedule.num_steps


def places(shape: AdapterShape) -> dict[str, slice]:
    """Where a client's message of a step has what."""
    sizes = {
        "embeddings": BATCH * shape.width,
        "projected": BATCH * shape.stacked_rank,
        "up": shape.width * shape.stacked_rank,
        "row factors": BATCH,
    }
    ends = np.cumsum(list(sizes.values())).tolist()
    return {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}


@pytest.mark.parametrize("what", ["embeddings", "projected", "up", "row factors"])
@pytest.mark.parametrize("how", ["one word of 2^61", "a little too long"])
def test_a_client_that_shares_too_much_in_a_later_step_is_named(
    tmp_path: Path, made: tuple[Federation, LayerPlan], monkeypatch: pytest.MonkeyPatch, what: str, how: str
) -> None:
    federation, plan = made
    place = plan.client_names.index(plan.client_names[-1])
    name, shape, test = plan.client_names[place], adapter_shapes(plan)[place], plan.step_tests(place)[what]
    assert test is not None
    honest = gl_client.shared_factors

    def cheat(local: Any, rows: slice, own: LayerPlan) -> np.ndarray:
        words = honest(local, rows, own)
        if local.name == name and rows.start == BATCH:  # the second batch
            at = places(shape)[what]
            width = (at.stop - at.start) // test.rows
            long = np.zeros(width, dtype=np.int64)
            long[0] = 2**61 if how.startswith("one") else int(test.squared**0.5) + 2
            words[at.stop - width : at.stop] = long
        return words

    monkeypatch.setattr(gl_client, "shared_factors", cheat)
    with pytest.raises(refmpc.PartyFailed, match=f"client '{name}' shared rows or factors .* in step 2") as caught:
        run_secure(plan, federation, tmp_path)
    assert caught.value is not None


def test_labels_and_layer_inputs_are_tested_too(
    tmp_path: Path, made: tuple[Federation, LayerPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, plan = made
    honest = gl_client.shared_blocks

    def cheat(local: Any, rows: slice, own: LayerPlan) -> np.ndarray:
        words = honest(local, rows, own)
        words[3] += (local.name == plan.client_names[0]) << 40
        return words

    with monkeypatch.context() as patch:
        patch.setattr(gl_client, "shared_blocks", cheat)
        with pytest.raises(
            refmpc.PartyFailed, match=f"client '{plan.client_names[0]}' shared rows or factors .* step 1"
        ):
            run_secure(plan, federation, tmp_path / "blocks")
    label = federation.clients[-1]
    kind, rows = type(label), type(label).one_hot_rows
    monkeypatch.setattr(kind, "one_hot_rows", lambda self, at, classes: rows(self, at, classes) * 2.0)
    with pytest.raises(refmpc.PartyFailed, match=f"client '{label.name}' shared labels that are none"):
        run_secure(plan, federation, tmp_path / "labels")


def shared(words: np.ndarray, seed: int) -> list[np.ndarray]:
    first, second = np.random.default_rng(seed).integers(0, 2**64, size=(2, *words.shape), dtype=np.uint64)
    parts = [first, second, words - first - second]
    return [np.stack([parts[i], parts[(i + 1) % 3]]) for i in range(3)]


def refused(
    words: np.ndarray,
    tamper: Callable[[list[np.ndarray]], None] = lambda shares: None,
    bits: int = 14,
    test: NormTest | None = None,
) -> bool:
    """Whether one client's (rows, width) numbers at ``bits``, each row within 1, are refused."""
    test = test or norm_test(len(words), words.shape[1], 1.0, bits)
    assert test is not None
    inputs = shared(words, 4)
    tamper(inputs)

    async def program(party: Party, own: np.ndarray) -> None:
        honest = ArithmeticTensor(party, np.zeros((2, 3, 1), dtype=np.uint64), 14)
        small = norm_test(3, 1, 1.0, 14)
        assert test is not None and small is not None
        await verify_step(party, {"bank": [(honest, small)], "card": [(ArithmeticTensor(party, own, bits), test)]})

    releases = {step_release(name): "a test" for name in ("bank", "card")}
    try:
        refmpc.run(program, inputs, releases=releases)
    except refmpc.PartyFailed as error:
        assert "client 'card' shared" in str(error) and "'bank'" not in str(error)
        return True
    return False


def rows(count: int, width: int) -> np.ndarray:
    values = np.random.default_rng(3).normal(size=(count, width))
    values *= (2**14 - width) / np.linalg.norm(values, axis=1, keepdims=True)
    return np.trunc(values).astype(np.int64).view(np.uint64)


@pytest.mark.parametrize("width", [1, 3, 200])
def test_the_bound_is_exact(width: int) -> None:
    """One row of many, in the last place: a squared norm of ``squared`` passes, one more does not."""
    words = rows(40, width)
    assert not refused(words)
    test = norm_test(40, width, 1.0, 14)
    assert test is not None
    root = int(test.squared**0.5)
    words[-1] = 0
    words[-1, -1] = np.uint64(root)
    assert not refused(words)
    words[-1, -1] = np.uint64(root + 1)
    assert refused(words)


def test_rows_too_long_for_one_sum_are_tested_in_pieces() -> None:
    """LoRA's U at the paper's size, 24 bits, one row: the claim had to say that clients are trusted with it."""
    test = norm_test(2, 410, 1.0, 24)
    assert test is not None and test.pieces == 11 and test.size == 39
    root = int(test.squared**0.5)
    words = np.zeros((2, 410), dtype=np.uint64)
    words[0, 7] = words[1, -1] = np.uint64(root)
    assert not refused(words, bits=24)
    for place in (7, 409):  # in a piece of its own, and in the last one
        longer = words.copy()
        longer[0, place] += np.uint64(1 if place == 7 else 6000)
        assert refused(longer, bits=24)
    even = np.full((2, 410), np.uint64(root // 21))
    assert not refused(even, bits=24)
    even[1] = np.uint64(root // 20)  # every piece is within the bound, the row is not
    assert refused(even, bits=24)
    for word in (2**32, 2**63, 2**63 + 5, 2**64 - 2**40):
        wrapped = words.copy()
        wrapped[1, 200] = np.uint64(word)
        assert refused(wrapped, bits=24)
    assert norm_test(1, 512 * 64, 1.01, 24) is not None and norm_test(1, 10, 1.0, 30) is None


def test_pieces_that_add_up_to_a_sum_that_wraps_are_found_one_by_one() -> None:
    """With a limit that lets all entries pass: four squares of 2^62 in pieces of their own are zero modulo 2^64."""
    test = norm_test(2, 410, 1.0, 24)
    assert test is not None
    words = np.zeros((2, 410), dtype=np.uint64)
    lax = replace(test, limit=2**40)
    assert not refused(words, bits=24, test=lax)
    words[1, [0, 100, 200, 300]] = np.uint64(2**31)
    assert refused(words, bits=24, test=lax)


@pytest.mark.parametrize("server", [0, 1, 2])
def test_different_shares_of_labels_are_found(made: tuple[Federation, LayerPlan], server: int) -> None:
    """Also where what two servers hold together looks like labels."""
    _, plan = made
    labels = np.zeros((40, plan.classes), dtype=np.uint64)
    labels[:, 1] = 1
    name = plan.client_names[-1]

    async def program(party: Party, own: np.ndarray) -> None:
        await verify_labels(party, plan, ArithmeticTensor(party, own, 0))

    releases = {upload_release(name): "a test"}
    refmpc.run(program, shared(labels, 5), releases=releases)
    for word in (1, 2**63):
        tampered = shared(labels, 5)
        tampered[server][1, 7, 1:2] += np.uint64(word)
        with pytest.raises(refmpc.PartyFailed, match=f"client '{name}' shared labels that are none"):
            refmpc.run(program, tampered, releases=releases)


@pytest.mark.parametrize(("rows", "width", "bits"), [(1, 512 * 64, 24), (128, 512, 14), (2, 410, 24), (3, 1, 14)])
def test_the_public_numbers_of_a_step_are_what_its_proof_needs(rows: int, width: int, bits: int) -> None:
    """§11.6, in exact integers."""
    test = norm_test(rows, width, 1.0, bits)
    assert test is not None
    longest = (2**bits + math.isqrt(width * 2**40) / 2**21) ** 2
    assert longest <= test.squared <= longest * (1 + 1e-9) + 1
    assert test.limit**2 >= 81 * rows * test.squared
    assert test.size * (Fraction(REACH) * test.limit) ** 2 < 2**63
    assert 2**test.low_bit <= test.squared and test.pieces * 2 * test.squared < 2**63
    assert test.pieces * test.size >= width


def test_clients_whose_bounds_do_not_add_up_to_the_row_bound_are_refused(
    made: tuple[Federation, LayerPlan],
) -> None:
    """Each is tested against its own bound, the claim counts on the bound of the whole row."""
    federation, plan = made
    with pytest.raises(InvalidArgument, match="bounds of the clients"):
        plan_layer_run(replace(federation, row_bound=0.99 * federation.row_bound), plan.training)


@pytest.mark.parametrize("word", [2**32, 2**63, 2**63 + 5, 2**64 - 2**40, 0x7FF8000000000000])
def test_words_whose_squares_wrap_are_found(word: int) -> None:
    words = rows(40, 200)
    words[7, 100] = np.uint64(word)
    assert refused(words)


@pytest.mark.parametrize("server", [0, 1, 2])
def test_different_shares_at_two_servers_are_found(server: int) -> None:
    """The sum of what two of them hold may be honest; the product of shares that differ is anything."""

    def tamper(shares: list[np.ndarray]) -> None:
        shares[server][1, 5, 2:3] += np.uint64(2**63)

    words = rows(40, 9)
    assert refused(words, tamper)


def test_the_test_costs_five_rounds() -> None:
    words = shared(rows(128, 64), 1)

    async def program(party: Party, own: np.ndarray) -> None:
        test = norm_test(128, 64, 1.0, 14)
        assert test is not None
        tested = [(ArithmeticTensor(party, own, 14), test)]
        await verify_step(party, {"bank": tested, "card": tested})

    releases = {step_release(name): "a test" for name in ("bank", "card")}
    result = refmpc.run(program, words, releases=releases)
    assert result.rounds == 5
    assert result.bytes < 2 * (128 * 145 + 8 * 9700 + 300)
