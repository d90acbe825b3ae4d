"""What a client that does not follow the protocol can share: refused and named by the servers, before anything is
trained."""

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
from protocols.client.upload import ClientJob, receive_model
from protocols.methods import g_bmf
from protocols.plan.row_test import NORM_ROWS, RowTest, row_test
from protocols.plan.run_plan import Plan, PublicClient, PublicFederation, plan_run
from protocols.server import verification
from protocols.server.training import ServerJob
from protocols.server.verification import PIECE_ROWS, require_labels, require_one_hot, require_rows_within
from protocols.state.commitment import commit_to_columns
from refmpc import ArithmeticTensor, Client, Party
from refmpc.core.party import Operation
from refmpc.primitives.input_checks import PROJECTIONS, REACH, TAIL, Faults, public_coins, side_by_side
from tests.protocols.secure_runs import small_training
from tests.refmpc.transcripts import Case, leaks, watch_streams
from vfl.dp.claim import ROW_BOUND_CHECKED, ROW_BOUND_TRUSTED

ROWS, WIDTHS, CLASSES = 64, (3, 5), 3
SCALE = 2.0**14


def make_plan(row_bound: float = 1.0, rows: int = ROWS) -> Plan:
    clients = tuple(PublicClient(name, width) for name, width in zip(("bank", "card"), WIDTHS, strict=True))
    training = small_training(clip_norm=max(1.0, row_bound))
    return plan_run("g_bmf", PublicFederation(clients, rows, CLASSES, row_bound, ()), training)


def honest(plan: Plan, seed: int = 1) -> tuple[list[np.ndarray], np.ndarray]:
    """Rows of both clients exactly at their bound, and labels, as ring words."""
    random = np.random.default_rng(seed)
    parts = []
    for width in plan.client_widths:
        rows = random.normal(size=(plan.schedule.num_samples, width))
        rows /= math.sqrt(2) * np.linalg.norm(rows, axis=1, keepdims=True)
        parts.append(np.rint(rows * SCALE).astype(np.int64).view(np.uint64))
    labels = np.eye(plan.classes, dtype=np.uint64)[random.integers(0, plan.classes, plan.schedule.num_samples)]
    return parts, labels


def share_words(client: Client, words: np.ndarray, tamper: Callable[[dict[Any, Any]], None] | None = None) -> None:
    """As ``Client.share``, but of any 64-bit words, and (``tamper``) of anything else than the protocol's messages."""
    send = client._send

    def changed(messages: Any, operation: str) -> None:
        copies = {server: [part.copy() for part in parts] for server, parts in messages.items()}
        for correction in (copies[1][1], copies[2][0]):  # of zeros: any words can be added
            correction += words.reshape(-1)
        if tamper is not None:
            tamper(copies)
        send(copies, operation)

    client._send = changed  # type: ignore[method-assign]
    try:
        client.share(np.zeros(words.shape), 0)
    finally:
        client._send = send  # type: ignore[method-assign]


def play(client: Client, job: tuple[Plan, np.ndarray, np.ndarray | None, Any]) -> Any:
    """``tamper`` is done to the labels, where there are any."""
    plan, words, labels, tamper = job
    commit_to_columns(client, plan.client_names, iter([words]))
    share_words(client, words, tamper if labels is None else None)
    if labels is not None:
        share_words(client, labels, tamper)
    return receive_model(client, plan)


def train(
    plan: Plan, directory: Path, parts: list[np.ndarray], labels: np.ndarray, tamper: Any = None, who: str = "bank"
) -> Any:
    clients = {
        "bank": (play, (plan, parts[0], None, tamper if who == "bank" else None)),
        "card": (play, (plan, parts[1], labels, tamper if who == "card" else None)),
    }
    jobs = [ServerJob(plan, directory / f"server-{i}", 0) for i in range(3)]
    return refmpc.run(g_bmf.servers, jobs, clients=clients, releases=plan.releases, timeout=60)


def test_honest_uploads_at_the_very_bound_pass(tmp_path: Path) -> None:
    plan = make_plan()
    result = train(plan, tmp_path, *honest(plan))
    names = [release.name for release in result.ledgers[0].releases]
    assert names[:2] == ["fault in the upload of bank", "fault in the upload of card"]
    assert ROW_BOUND_CHECKED in plan.claim.public and ROW_BOUND_TRUSTED not in plan.claim.public


def scaled(words: np.ndarray) -> np.ndarray:
    return words * np.uint64(1000)


def one_word(value: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(words: np.ndarray) -> np.ndarray:
        words = words.copy()
        words[17, 1] = np.uint64(value % 2**64)
        return words

    return change


CHEATS = {
    "rows × 1000": scaled,
    "one row a little too long": one_word(2**14),
    "a word whose square wraps to zero": one_word(2**32),
    "the sign bit": one_word(2**63),
    "the sign bit and an honest value": one_word(2**63 + 5),
    "a large negative word": one_word(-(2**40)),
    "what a NaN would look like": one_word(0x7FF8000000000000),
}


@pytest.mark.parametrize("cheat", CHEATS)
@pytest.mark.parametrize("who", [0, 1])
def test_a_client_whose_rows_are_too_long_is_named(tmp_path: Path, cheat: str, who: int) -> None:
    """The training went on, and the others' (ε, δ) was handed out although nothing held any more."""
    plan = make_plan()
    parts, labels = honest(plan)
    parts[who] = CHEATS[cheat](parts[who])
    with pytest.raises(refmpc.PartyFailed, match=f"client '{('bank', 'card')[who]}' shared rows beyond the row bound"):
        train(plan, tmp_path, parts, labels)


@pytest.mark.parametrize("row", [[0, 0, 0], [1, 1, 0], [2, 0, 2**64 - 1], [2**63 + 1, 2**63, 0], [0, 1, 2**63]])
def test_labels_that_are_not_one_hot_are_found(tmp_path: Path, row: list[int]) -> None:
    plan = make_plan()
    parts, labels = honest(plan)
    labels[3] = np.array(row, dtype=np.uint64)
    with pytest.raises(refmpc.PartyFailed, match="client 'card' shared rows"):
        train(plan, tmp_path, parts, labels)


@pytest.mark.parametrize("who", ["bank", "card"])
@pytest.mark.parametrize("word", [1, 2**63, 2**64 - 1])
def test_different_shares_at_two_servers_are_found(tmp_path: Path, who: str, word: int) -> None:
    """In one word, of the rows or (card) of the labels."""
    plan = make_plan()

    def tamper(messages: dict[Any, Any]) -> None:
        messages[1][1][7:8] += np.uint64(word)

    with pytest.raises(refmpc.PartyFailed, match=f"^.*client '{who}' shared rows .*, or different shares"):
        train(plan, tmp_path, *honest(plan), tamper=tamper, who=who)


def shared(words: np.ndarray, seed: int) -> list[np.ndarray]:
    first, second = np.random.default_rng(seed).integers(0, 2**64, size=(2, *words.shape), dtype=np.uint64)
    parts = [first, second, words - first - second]
    return [np.stack([parts[i], parts[(i + 1) % 3]]) for i in range(3)]


def fault(words: np.ndarray, labels: np.ndarray, row_bound: float = 1.0, seed: int = 1) -> int:
    """The bit that would be opened of these rows and labels."""
    test = row_test(words.shape[1], row_bound + math.sqrt(words.shape[1]) / 2 / SCALE)
    assert test is not None

    async def program(party: Party, own: Any) -> int:
        faults = Faults(party, await public_coins(party))
        await require_rows_within(faults, ArithmeticTensor(party, own[0], 14), test)
        await require_one_hot(faults, ArithmeticTensor(party, own[1], 0))
        return int(await faults.opened("bit"))

    inputs = list(zip(shared(words, seed), shared(labels, seed + 100), strict=True))
    return int(refmpc.run(program, inputs, releases={"bit": "a test"}).outputs[0])


def test_one_bad_row_of_many_is_found() -> None:
    random = np.random.default_rng(5)
    rows = random.normal(size=(3 * PIECE_ROWS + 100, 4))
    words = np.rint(rows / np.linalg.norm(rows, axis=1, keepdims=True) * SCALE).astype(np.int64).view(np.uint64)
    labels = np.eye(2, dtype=np.uint64)[random.integers(0, 2, len(rows))]
    assert fault(words, labels) == 0
    test = row_test(4, 1 + 1 / SCALE)
    assert test is not None
    words[-1] = 0
    words[-1, 2] = np.uint64(math.isqrt(test.enforced) + 1)
    assert fault(words, labels) == 1


@pytest.mark.parametrize(("width", "bound"), [(1, 1.0), (6, 0.5), (6, 20.0), (33, 7.0)])
def test_the_test_holds_at_its_bound_and_not_beyond_what_the_plan_counts(width: int, bound: float) -> None:
    """A row of squared norm B² passes, one of more than B²·(1 + 2^−8) never does; in between it may."""
    test = row_test(width, bound + math.sqrt(width) / 2 / SCALE)
    assert test is not None
    assert test.enforced <= (bound * SCALE + math.sqrt(width) / 2) ** 2 * (1 + 2**-8)
    labels = np.eye(2, dtype=np.uint64)[[0, 1, 1, 0]]
    words = np.zeros((4, width), dtype=np.uint64)
    for norm, bad in ((math.isqrt(test.squared), 0), (math.isqrt(test.enforced) + 1, 1)):
        words[1, -1] = np.uint64(norm)
        for seed in range(4):  # what is in between depends on the shares
            assert fault(words, labels, bound, seed) == bad


@pytest.mark.parametrize("width", [1, 3, 32, 500])
@pytest.mark.parametrize("bound", [2**-10, 0.7071, 1.0, 22.7, 30.0])
def test_the_public_numbers_of_a_test_are_what_its_proof_needs(width: int, bound: float) -> None:
    """§11.2, in exact integers: nothing that passes can have wrapped, and the bound is not a unit too large."""
    test, exact = row_test(width, bound), row_test(width, bound, exact=True)
    assert test is not None and exact is not None and exact.low_bit == 0
    squared = Fraction(bound) ** 2 * 2**28
    assert squared <= test.squared == exact.squared <= squared + squared / 10**9 + 1
    assert test.enforced <= max(squared * (1 + Fraction(1, 2**8)), squared + 1)
    reach = Fraction(REACH)
    for rows in (1, 64, 10**4, 10**6):
        assert test.entry_limit(rows) ** 2 >= 81 * min(rows, test.rows) * test.squared  # honest rows
        assert width * (reach * test.entry_limit(rows)) ** 2 < 2**64 - 2**60
        middle, half = test.middle, test.squared - test.middle
        assert 0 <= half - middle <= 1 and test.square_limit(rows) ** 2 >= 81 * min(rows, NORM_ROWS) * half**2
        beyond = test.squared + reach * test.square_limit(rows)
        assert beyond < 2 ** test.high_bit(rows) <= 2**60
    assert PROJECTIONS == 40 and TAIL == 9.0 and 2 * Fraction(9, 8) == reach


def test_an_exact_test_is_right_to_the_unit() -> None:
    test = row_test(1, 1.0, exact=True)
    assert test is not None and test.low_bit == 0 and test.enforced == test.squared
    root = math.isqrt(test.squared)
    for norm, bad in ((root, False), (-root, False), (root + 1, True), (-root - 1, True)):
        words = np.full((5, 1), np.uint64(norm % 2**64))
        assert refused(words, test) == bad


def refused(words: np.ndarray, test: RowTest, seed: int = 1) -> bool:
    """Whether rows are refused by their test."""

    async def program(party: Party, own: Any) -> bool:
        faults = Faults(party, await public_coins(party))
        await require_rows_within(faults, ArithmeticTensor(party, own, 14), test)
        return await faults.opened("bit")

    outputs = refmpc.run(program, shared(words, seed), releases={"bit": "a test"}).outputs
    assert len(set(outputs)) == 1
    return bool(outputs[0])


def test_rows_as_long_and_as_alike_as_honest_rows_can_be_pass() -> None:
    """All the length in one column, in every row: what projections of honest rows are bounded for."""
    test = row_test(3, 1.0)
    assert test is not None
    words = np.zeros((3000, 3), dtype=np.uint64)
    words[:, 1] = np.uint64(math.isqrt(test.squared))
    assert not refused(words, test)


def test_a_square_beyond_the_compared_bits_is_found() -> None:
    """Its entries are small enough for their own test, and modulo 2^(high bit + 1) the row looks like one of zeros:
    only projections of the squares see it."""
    test = row_test(4, 1.0)
    assert test is not None
    rows = 64
    high = test.high_bit(rows)
    words = np.zeros((rows, 4), dtype=np.uint64)
    entry = 2 ** ((high + 1) // 2) if high % 2 else 2 ** (high // 2)
    words[5, : 1 if high % 2 else 2] = np.uint64(entry)
    assert sum(int(word) ** 2 for word in words[5]) == 2 ** (high + 1)
    assert entry < test.entry_limit(rows)
    assert refused(words, test)


@pytest.mark.parametrize(
    "row",
    [
        [2**63, 0, 0, 0],
        [2**63 - 1, 2**63 + 1, 0, 0],
        [2**32, 2**32, 2**32, 2**32],
        [2**62, 2**62, 2**62, 2**62],
        [0xFFF8000000000000, 0, 0, 0],
        [0x7FF0000000000000, 0, 0, 1],
        [2**63 - 1, 1, 0, 0],
        # 2^64·k + 0, + 2^33 + 1, − 2^33 + 1 and 4
        [4294967296, 4294967297, 4294967295, 2],
    ],
)
def test_a_norm_that_wraps_to_something_small_is_found(row: list[int]) -> None:
    test = row_test(4, 1.0)
    assert test is not None
    words = np.zeros((70, 4), dtype=np.uint64)
    words[33] = np.array(row, dtype=np.uint64)
    assert sum(word**2 for word in row) % 2**64 <= test.squared
    assert refused(words, test)


def test_bad_rows_that_cancel_each_other_are_found() -> None:
    """The same number with both signs, wherever coins that were used twice would make it vanish: in the next piece, in
    the next block of a projection, in the next eight columns, beside it, in the next row."""
    test = row_test(17, 1.0)
    assert test is not None
    small = replace(test, rows=96)
    far = 4 * PIECE_ROWS  # a piece later, and enough rows for eight sums side by side
    assert side_by_side(far * 17) == 8
    words = np.zeros((2 * far, 17), dtype=np.uint64)
    large, negative = np.uint64(2**32), np.uint64(2**64 - 2**32)
    others = [(1 + PIECE_ROWS, 0), (1 + far, 0), (97, 0), (1, 8), (1, 1), (2, 0), (33, 0), (1, 16)]
    for row, column in others:
        cheating = words.copy()
        cheating[1, 0], cheating[row, column] = large, negative
        for each in (test, small):
            assert refused(cheating, each), (row, column)
    labels = np.zeros((2 * PIECE_ROWS, 2), dtype=np.uint64)
    labels[:, 0] = 1
    for row in (1 + PIECE_ROWS, 2, 33):  # Σ − 1 is 2^63 twice, and y² − y is the same in two rows
        cheating = labels.copy()
        cheating[1, 0] = cheating[row, 0] = np.uint64(2**63 + 1)
        assert fault(words[:, :1], cheating) == 1


def test_a_row_bound_too_large_for_64_bits_is_left_to_the_clients() -> None:
    assert row_test(64, 1.0) is not None and row_test(64, 1000.0) is None
    plan = make_plan(row_bound=1000.0)
    assert plan.row_tests == () and ROW_BOUND_TRUSTED in plan.claim.public
    assert list(plan.releases) == ["global model"]


def test_jobs_of_the_product_share_what_the_tests_expect(tmp_path: Path) -> None:
    """A client of the product at its bound, through ``client_program``: rounding never makes an honest row too long."""
    from protocols.client.upload import client_program

    plan = make_plan()
    random = np.random.default_rng(11)
    jobs = {}
    for name, width in zip(plan.client_names, plan.client_widths, strict=True):
        rows = random.choice([-1.0, 1.0], size=(plan.schedule.num_samples, width)).astype(np.float32)
        rows /= np.float32(math.sqrt(2) * math.sqrt(width))
        one_hot = np.eye(CLASSES)[random.integers(0, CLASSES, len(rows))] if name == "card" else None
        jobs[name] = (client_program, ClientJob(plan, rows, one_hot))
    servers = [ServerJob(plan, tmp_path / f"server-{i}", 0) for i in range(3)]
    refmpc.run(g_bmf.servers, servers, clients=jobs, releases=plan.releases, timeout=60)


@pytest.mark.parametrize(
    ("task", "good", "bad"),
    [
        ("binary", [0, 1], [2, 2**63, 2**64 - 1]),
        ("regression", [2**14, -(2**14) % 2**64, 0], [2**14 + 1, 2**63, 2**40]),
    ],
)
def test_labels_of_other_tasks_are_tested_too(task: str, good: list[int], bad: list[int]) -> None:
    """A 0 or 1, or a number from −1 to 1."""
    classes = 2 if task == "binary" else 1
    clients = (PublicClient("bank", 3), PublicClient("card", 5))
    plan = plan_run("g_bmf", PublicFederation(clients, 64, classes, 1.0, ()), small_training(task=task))

    def opened(label: int) -> int:
        labels = np.full((64, 1), good[0], dtype=np.uint64)
        labels[9, 0] = np.uint64(label)

        async def program(party: Party, own: Any) -> int:
            faults = Faults(party, await public_coins(party))
            await require_labels(faults, plan, ArithmeticTensor(party, own, plan.label_bits))
            return int(await faults.opened("bit"))

        return int(refmpc.run(program, shared(labels, 3), releases={"bit": "a test"}).outputs[0])

    assert [opened(label) for label in good] == [0] * len(good)
    assert [opened(label) for label in bad] == [1] * len(bad)


def test_the_bounds_that_are_enforced_together_are_the_one_that_the_plan_counts() -> None:
    """Every range of the plan, and so the claim, holds for the longest rows that all tests let pass."""
    for bound, parts in ((1.0, None), (20.0, None), (5.0, (3.0, 4.0)), (4 * 8**0.5, None)):
        clients = tuple(
            PublicClient(name, width, parts and parts[place])
            for place, (name, width) in enumerate(zip(("bank", "card"), WIDTHS, strict=True))
        )
        plan = plan_run("g_bmf", PublicFederation(clients, ROWS, CLASSES, bound, ()), small_training(clip_norm=bound))
        assert len(plan.row_tests) == 2
        longest = math.sqrt(sum(test.enforced for test in plan.row_tests)) / SCALE
        assert bound < longest <= plan.scales.row_bound
    too_long = (PublicClient("bank", 3, 4.0), PublicClient("card", 5, 4.0))
    with pytest.raises(InvalidArgument, match="bounds of the clients"):
        plan_run("g_bmf", PublicFederation(too_long, ROWS, CLASSES, 5.0, ()), small_training(clip_norm=5.0))


@pytest.mark.parametrize(
    "others", [0.0, 1.0], ids=["the other's row is zero", "the other's row is as long as it may be"]
)
def test_a_client_beyond_its_own_bound_is_named_whatever_the_others_rows_are(tmp_path: Path, others: float) -> None:
    """Together the rows are within the row bound or not, and the outcome is the same: it told a cheating client
    which."""
    plan = make_plan()
    parts, labels = honest(plan)
    parts[1][17] = (parts[1][17].view(np.int64) * int(others)).view(np.uint64)
    parts[0][17] = 0
    parts[0][17, 1] = np.uint64(int(0.9 * SCALE))  # its own bound is 0.707
    with pytest.raises(refmpc.PartyFailed, match="client 'bank' shared rows") as caught:
        train(plan, tmp_path, parts, labels)
    assert "client 'card' shared" not in str(caught.value)


@pytest.mark.parametrize("row", [0, 63, 64, 200, 255])
def test_a_bad_row_is_found_in_every_stretch_that_is_compared(monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    for name in ("COMPARED_ROWS", "PIECE_ROWS", "NORM_ROWS"):
        monkeypatch.setattr(verification, name, 64)
    test = row_test(3, 1.0)
    assert test is not None
    words = np.zeros((256, 3), dtype=np.uint64)
    assert not refused(words, test)
    words[row, 2] = np.uint64(math.isqrt(test.enforced) + 1)
    assert refused(words, test)
    words[row, 2] = np.uint64(2**32)  # its square is zero: only the projections of its own block see it
    assert refused(words, replace(test, rows=64))


def test_two_clients_that_cheat_are_both_named(tmp_path: Path) -> None:
    plan = make_plan()
    parts, labels = honest(plan)
    with pytest.raises(refmpc.PartyFailed, match="client 'bank' and client 'card' shared rows"):
        train(plan, tmp_path, [scaled(part) for part in parts], labels)


async def _tested_rows(party: Party, x: ArithmeticTensor) -> ArithmeticTensor:
    """The test of one client's rows (n, 1), up to its opening."""
    test, faults = row_test(1, 1.0), Faults(party, bytes(32))
    assert test is not None
    await require_rows_within(faults, x.reinterpret(14), test)
    assert not await faults.opened("example")
    return x


ROWS_SEEN = Case(_tested_rows, ("arithmetic",), ((5,), (-(2**13),)), composed=True, shape=(1,))


def test_no_server_sees_anything_of_honest_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every message of a test, for two very different uploads (§11.4, views); primitives have tests of their own."""
    watch_streams(monkeypatch)
    assert leaks(ROWS_SEEN) == []


def test_without_the_mask_of_the_squares_a_server_would_see_them(monkeypatch: pytest.MonkeyPatch) -> None:
    watch_streams(monkeypatch)
    monkeypatch.setattr(
        Operation, "zero_share", lambda self, shape, kernel="subtract": refmpc.seal(np.zeros(shape, dtype=np.uint64))
    )
    assert any("share_sums" in leak for leak in leaks(ROWS_SEEN))


@pytest.mark.heavy
def test_one_bad_row_of_a_hundred_thousand_is_refused_and_its_client_named(tmp_path: Path) -> None:
    """Through the servers' whole program, 64 columns; the last row, one word, one unit too long."""
    clients = (PublicClient("bank", 32), PublicClient("card", 32))
    plan = plan_run(
        "g_bmf", PublicFederation(clients, 100_000, CLASSES, 1.0, ()), small_training(batch_size=1000, delta=1e-6)
    )
    parts, labels = honest(plan)
    assert plan.schedule.num_samples == 100_000
    parts[0][-1] = 0
    parts[0][-1, 5] = np.uint64(math.isqrt(plan.row_tests[0].enforced) + 1)
    parts[1][-1] = np.rint(0.5**0.5 * SCALE / 32**0.5).astype(np.int64).view(np.uint64)
    with pytest.raises(refmpc.PartyFailed, match="client 'bank' shared rows beyond the row bound"):
        train_in_chunks(plan, tmp_path, parts, labels)


def play_in_chunks(client: Client, job: tuple[Plan, np.ndarray, np.ndarray | None]) -> Any:
    """As ``play``, in the messages that large uploads are divided into."""
    from protocols.plan.run_plan import CHUNK_ROWS

    plan, words, labels = job
    commit_to_columns(client, plan.client_names, iter([words]))
    for start in range(0, len(words), CHUNK_ROWS):
        share_words(client, words[start : start + CHUNK_ROWS])
        if labels is not None:
            share_words(client, labels[start : start + CHUNK_ROWS])
    return receive_model(client, plan)


def train_in_chunks(plan: Plan, directory: Path, parts: list[np.ndarray], labels: np.ndarray) -> Any:
    clients = {"bank": (play_in_chunks, (plan, parts[0], None)), "card": (play_in_chunks, (plan, parts[1], labels))}
    jobs = [ServerJob(plan, directory / f"server-{i}", 0) for i in range(3)]
    return refmpc.run(g_bmf.servers, jobs, clients=clients, releases=plan.releases, timeout=300)
