"""What one server sees of the tests of an upload: nothing that depends on the rows, and of an honest client only
zeros."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import numpy as np
import pytest
from scipy import stats

import refmpc
from refmpc import Party
from refmpc.core.party import Operation
from refmpc.primitives import dealing
from refmpc.primitives.input_checks import (
    PROJECTIONS,
    TAIL,
    Faults,
    Projected,
    Subsets,
    projection_limit,
    public_coins,
    shared_sums,
)
from tests.refmpc.transcripts import Case, draws, finds_a_leak, leaks, watch_streams

SUMS = Case(lambda party, x: shared_sums(party, x.first), ("arithmetic",), ((5,), (-(2**61) + 987654321,)))
TIMES = 600


def test_shared_sums_show_nothing_and_each_of_their_masks_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Projections of the summands of a label's y² − y, which a server must not see."""
    watch_streams(monkeypatch)
    assert leaks(SUMS) == []
    drawn = draws(SUMS)
    assert len(drawn) >= 3
    assert all(finds_a_leak(SUMS, lost_mask=draw) for draw in drawn)


def opened_many(seed: int, bad: bool) -> tuple[list[list[np.ndarray]], list[bool]]:
    """For each server the words it received from the two others while TIMES faults of constant bits were opened, and
    what they say."""

    async def program(party: Party) -> list[bool]:
        zeros = refmpc.ArithmeticTensor(party, np.zeros((2, 8), dtype=np.uint64), 0)
        numbers = zeros - 1 if bad else zeros + 1
        bits = await refmpc.is_negative(numbers, 0, 8)
        party.transcript = []
        found = []
        for place in range(TIMES):
            faults = Faults(party, bytes(32), place)
            faults.add(bits)
            found.append(await faults.opened("bit"))
        return found

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="insecure_")
        run = refmpc.run(program, insecure_seed=seed, insecure_record=True, releases={"bit": "a test"})
    received = []
    for transcript in run.transcripts:
        peers = sorted({peer for _, peer, _ in transcript}, key=str)
        received.append([np.concatenate([words for _, peer, words in transcript if peer == one]) for one in peers])
    return received, run.outputs[0]


def unevenness(words: np.ndarray) -> float:
    """The smallest p-value over all hexadecimal digits of the words being uniform, corrected for their number."""
    digits = (words[:, None] >> (np.uint64(4) * np.arange(16, dtype=np.uint64))) & np.uint64(15)
    counts = [np.bincount(column.astype(np.int64), minlength=16) for column in digits.T]
    return float(16 * min(stats.chisquare(count).pvalue for count in counts))


@pytest.mark.parametrize("bad", [False, True])
def test_opened_parities_are_uniform_but_for_their_sum(bad: bool) -> None:
    received, found = opened_many(3, bad)
    assert set(found) == {bad}
    for words in received:
        assert [len(one) for one in words] == [TIMES, TIMES]
        assert min(unevenness(one) for one in words) > 1e-6


def test_the_mask_of_opened_parities_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the words are parities of the bits that a server holds: shares of comparisons, constant here."""
    monkeypatch.setattr(
        Operation, "zero_share", lambda self, shape, kernel="subtract": refmpc.seal(np.zeros(shape, dtype=np.uint64))
    )
    monkeypatch.setattr(dealing, "FEWEST_ROWS", 10**9)
    received, _ = opened_many(3, False)
    assert min(unevenness(one) for words in received for one in words) < 1e-9


def test_the_hash_that_a_server_gets_is_one_it_can_compute_itself() -> None:
    """For a client that sends the same share to both: so it tells nothing."""
    shares = np.random.default_rng(1).integers(0, 2**64, size=(3, 50, 4), dtype=np.uint64)

    async def program(party: Party, own: np.ndarray) -> tuple[bytes, bytes]:
        faults = Faults(party, bytes(32))
        projections = faults.project_all(refmpc.seal(own))
        party.transcript = []
        await faults.require_same_shares([projections])
        assert party.transcript is not None
        ((_, peer, message),) = party.transcript
        assert peer == party.previous
        return message.tobytes(), hashlib.sha256(refmpc.unseal(projections)[0].tobytes()).digest()

    inputs = [np.stack([shares[i], shares[(i + 1) % 3]]) for i in range(3)]
    with pytest.warns(UserWarning, match="insecure_record"):
        run = refmpc.run(program, inputs, insecure_record=True)
    assert all(message == own for message, own in run.outputs)


def test_coins_are_common_fresh_and_of_all_three() -> None:
    """No server alone decides them: each pair's stream takes part."""

    async def program(party: Party, silent: int | None) -> list[bytes]:
        drawn = party.mask_stream

        def stream(side: Any, number: int) -> Any:
            pair = party.id if side == "next" else party.previous
            return _Zeros() if pair == silent else drawn(side, number)

        party.mask_stream = stream  # type: ignore[method-assign]
        return [await public_coins(party) for _ in range(2)]

    def coins(silent: int | None) -> list[bytes]:
        with pytest.warns(UserWarning, match="insecure_seed"):
            run = refmpc.run(program, [silent] * 3, insecure_seed=4)
        assert run.outputs[0] == run.outputs[1] == run.outputs[2]
        return list(run.outputs[0])

    usual = coins(None)
    assert len(set(usual)) == 2 and len(usual[0]) == 32
    for silent in range(3):
        assert not set(coins(silent)) & set(usual)


class _Zeros:
    """A stream of which nothing comes."""

    position = 0

    def words(self, count: int) -> np.ndarray:
        return np.zeros(count, dtype=np.uint64)


def coins_of(side: int, lane: int, numbers: int) -> np.ndarray:
    """The coins (40, numbers) of the numbers in one of the lanes, found by projecting one after the other."""
    found = []
    for place in range(numbers):
        unit = np.zeros((numbers, side), dtype=np.uint64)
        unit[place, lane] = 1
        projected = Projected(Subsets(bytes([7]) * 32), 1, side)
        projected.add(unit)
        found.append(refmpc.unseal(projected.words)[0, :, lane].view(np.int64))
    return np.array(found).T


@pytest.mark.parametrize("side", [1, 8])
def test_coins_are_differences_of_two_fair_bits_and_forty_of_them_are_independent(side: int) -> None:
    """Fewer repetitions, or one repeated, would miss more than 2^−40."""
    numbers = 400
    coins = coins_of(side, 0, numbers)
    assert PROJECTIONS == 40 and coins.shape == (40, numbers) and set(np.unique(coins)) == {-1, 0, 1}
    assert np.linalg.matrix_rank(coins.astype(float)) == 40
    # given the bit that all differences have in common, a coin is −1 or 0, or 0 or 1, by fair bits that are independent
    common = coins.min(axis=0) == -1
    assert 120 < common.sum() < 280
    assert (coins.max(axis=0) - coins.min(axis=0) == 1).all()
    bits = coins + common
    assert abs(bits.mean() - 0.5) < 6 * 0.5 / np.sqrt(bits.size)
    alike = np.corrcoef(bits) - np.eye(40)
    assert np.abs(alike).max() < 6 / np.sqrt(numbers)
    if side == 8:
        assert (coins_of(side, 7, 40) == coins_of(side, 0, 40)).all()


def test_a_projection_of_honest_numbers_is_small_and_of_a_bad_one_is_not() -> None:
    """Against the definition, in the clear: the limit is never reached, and half the projections see one."""
    random = np.random.default_rng(3)
    words = random.integers(-(2**14), 2**14, size=(5000, 1)).astype(np.int64).view(np.uint64)

    def sums() -> np.ndarray:
        found = []
        for key in range(20):
            projected = Projected(Subsets(bytes([key]) * 32), 1, 1)
            projected.add(words)
            found.append(refmpc.unseal(projected.words)[0, :, 0].view(np.int64))
        return np.stack(found)

    limit = projection_limit(5000, 2**14)
    assert limit <= TAIL * np.sqrt(5000) * 2**14 + 2
    honest = sums()
    assert honest.shape == (20, PROJECTIONS) and np.abs(honest).max() < limit / 2
    words[4000, 0] = np.uint64(2**63)
    seen = np.abs(sums().astype(float)) > limit
    assert 0.4 < seen.mean() < 0.6 and seen.any(axis=1).all()


@pytest.mark.parametrize("side", [1, 8])
def test_pieces_of_one_sum_have_coins_of_their_own(side: int) -> None:
    """Numbers that would cancel if a second piece had the coins of the first."""
    piece = np.random.default_rng(1).integers(0, 2**64, size=(50, 8), dtype=np.uint64)
    projected = Projected(Subsets(bytes(32)), 1, side)
    projected.add(piece)
    projected.add(-piece)
    assert (refmpc.unseal(projected.words) != 0).mean() > 0.9


def refused(test: Any, words: np.ndarray) -> bool:
    """What is opened after a test of ``test(faults, shares)`` of projections that sum up to ``words``."""
    random = np.random.default_rng(8)
    parts = random.integers(0, 2**64, size=(2, *words.shape), dtype=np.uint64)
    shares = [parts[0], parts[1], words - parts[0] - parts[1]]

    async def program(party: Party) -> bool:
        faults = Faults(party, bytes([3]) * 32)
        await test(faults, refmpc.seal(np.stack([shares[party.id], shares[(party.id + 1) % 3]])))
        return await faults.opened("bit")

    outputs = refmpc.run(program, releases={"bit": "a test"}).outputs
    assert len(set(outputs)) == 1
    return bool(outputs[0])


LIMIT = 10**9


@pytest.mark.parametrize("place", [0, 17, 39])
@pytest.mark.parametrize(
    ("value", "bad"),
    [
        (LIMIT, False),
        (-LIMIT, False),
        (LIMIT * 9 // 8 + 1, True),
        (-LIMIT * 9 // 8 - 1, True),
        (2**63, True),
        (2**63 - LIMIT // 16, True),
        (2**62, True),
        (-(2**62), True),
    ],
)
def test_one_projection_beyond_the_limit_is_found_whatever_its_sign(place: int, value: int, bad: bool) -> None:
    words = np.zeros((PROJECTIONS, 1), dtype=np.uint64)
    words[place, 0] = np.uint64(value % 2**64)
    assert refused(lambda faults, shares: faults.require_small(shares, LIMIT), words) == bad


@pytest.mark.parametrize("value", [0, 1, -1, 2**63, 2**62, -(2**62), 12345])
def test_one_projection_that_is_not_zero_is_found_whatever_its_sign(value: int) -> None:
    """2^63 is its own negative."""
    words = np.zeros((PROJECTIONS, 1), dtype=np.uint64)
    words[11, 0] = np.uint64(value % 2**64)
    assert refused(lambda faults, shares: faults.require_zero(shares[:1]), words) == (value != 0)


@pytest.mark.parametrize("count", [1, 7, 30_000])
def test_one_bad_bit_of_many_is_found_wherever_it_is(count: int) -> None:
    """With one dealer, and with three: whoever holds the bit."""
    for place in {0, count // 2, count - 1}:
        words = np.zeros(count, dtype=np.uint64)
        words[place] = np.uint64(2**64 - 1)

        async def test(faults: Faults, shares: Any) -> None:
            await faults.require_not_negative(refmpc.ArithmeticTensor(faults.party, shares, 0), 20)

        assert refused(test, words)
        assert not refused(test, np.zeros_like(words))


def test_every_one_of_forty_parities_counts() -> None:
    async def program(party: Party) -> list[bool]:
        found = []
        for place in range(PROJECTIONS):
            faults = Faults(party, bytes(32), place)
            faults._parities[0] = np.uint64(party.id == place % 3) << np.uint64(place)
            found.append(await faults.opened("bit"))
        return found

    assert refmpc.run(program, releases={"bit": "a test"}).outputs[0] == [True] * PROJECTIONS


@pytest.mark.parametrize("server", [0, 1, 2])
@pytest.mark.parametrize("side", [0, 1])
def test_a_share_that_differs_at_one_server_is_found(server: int, side: int) -> None:
    shares = np.random.default_rng(1).integers(0, 2**64, size=(3, 50, 4), dtype=np.uint64)
    inputs = [np.stack([shares[i], shares[(i + 1) % 3]]) for i in range(3)]

    async def program(party: Party, own: np.ndarray) -> bool:
        faults = Faults(party, bytes(32))
        await faults.require_same_shares([faults.project_all(refmpc.seal(own))])
        return await faults.opened("bit")

    assert refmpc.run(program, inputs, releases={"bit": "a test"}).outputs == [False] * 3
    inputs[server][side, 49, 3] ^= np.uint64(2**63)
    assert refmpc.run(program, inputs, releases={"bit": "a test"}).outputs == [True] * 3
