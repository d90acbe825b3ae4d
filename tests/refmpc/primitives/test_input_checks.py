"""What one server sees of the tests of an upload: nothing that depends on the rows, and of an honest client only zeros."""

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
from refmpc.primitives.input_checks import PROJECTIONS, Faults, _shared, public_coins
from tests.refmpc.transcripts import Case, draws, finds_a_leak, leaks, watch_streams

SUMS = Case(lambda party, x: _shared(party, x.first), ("arithmetic",), ((5,), (-(2**61) + 987654321,)))
TIMES = 600


def test_shared_sums_show_nothing_and_each_of_their_masks_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Projections of the summands of a label's y² − y, which a server must not see."""
    watch_streams(monkeypatch)
    assert leaks(SUMS) == []
    drawn = draws(SUMS)
    assert len(drawn) >= 3
    assert all(finds_a_leak(SUMS, lost_mask=draw) for draw in drawn)


def opened_many(seed: int, bad: bool) -> tuple[list[list[np.ndarray]], list[bool]]:
    """For each server the words it received from the two others while TIMES faults of constant bits were opened, and what they say."""

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
    """Of a client that sends the same share to both: so it tells nothing."""
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


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_chosen_after_the_coins_so_that_all_sums_have_one_sign_are_found(sign: int) -> None:
    """Half of a zero test would miss them; a client does not know the coins, but the test must not count on luck."""
    random, key = np.random.default_rng(2), bytes([9]) * 32

    async def signs(party: Party) -> np.ndarray:
        unit = np.eye(200, dtype=np.uint64).reshape(1, 200, 200)
        return refmpc.unseal(Faults(party, key).project(refmpc.seal(unit)))[0].view(np.int64)

    matrix = refmpc.run(signs).outputs[0].astype(float)
    assert matrix.shape == (PROJECTIONS, 200)
    numbers = np.rint(np.linalg.lstsq(matrix, np.full(PROJECTIONS, sign * 1e6), rcond=None)[0]).astype(np.int64)
    assert (np.sign(matrix @ numbers) == sign).all()
    parts = random.integers(0, 2**64, size=(2, 200, 1), dtype=np.uint64)
    summands = [parts[0], parts[1], numbers.view(np.uint64).reshape(200, 1) - parts[0] - parts[1]]

    async def program(party: Party, own: np.ndarray) -> bool:
        faults = Faults(party, key)
        await faults.require_zero(refmpc.seal(own))
        return await faults.opened("bit")

    assert refmpc.run(program, summands, releases={"bit": "a test"}).outputs == [True] * 3
