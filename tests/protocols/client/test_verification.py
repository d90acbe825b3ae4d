"""What a client that does not follow the protocol can share: refused and named by the servers, before anything is trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refmpc
from protocols import g_bmf
from protocols.client.commitment import commit_to_columns
from protocols.client.upload import ClientJob, receive_model
from protocols.client.verification import require_labels, require_one_hot, require_rows_within
from protocols.plan.row_test import NORM_ROWS, row_test
from protocols.plan.run_plan import Plan, PublicClient, PublicFederation, plan_run
from protocols.server.training import ServerJob
from refmpc import ArithmeticTensor, Client, Party
from refmpc.primitives.input_checks import PROJECTIONS, TAIL, Faults, projection_limit, public_coins
from tests.protocols.secure_runs import small_training
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
    assert result.ledgers[0].releases[0].name == "fault in an upload"
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
    """In one word, of the rows or (card) of the labels; the bit about bounds is not opened then."""
    plan = make_plan()

    def tamper(messages: dict[Any, Any]) -> None:
        messages[1][1][7:8] += np.uint64(word)

    with pytest.raises(refmpc.PartyFailed, match=f"client '{who}' sent different shares"):
        train(plan, tmp_path, *honest(plan), tamper=tamper, who=who)


def shared(words: np.ndarray, seed: int) -> list[np.ndarray]:
    first, second = np.random.default_rng(seed).integers(0, 2**64, size=(2, *words.shape), dtype=np.uint64)
    parts = [first, second, words - first - second]
    return [np.stack([parts[i], parts[(i + 1) % 3]]) for i in range(3)]


def fault(words: np.ndarray, labels: np.ndarray, row_bound: float = 1.0) -> int:
    """The bit that would be opened of these rows and labels."""
    test = row_test(words.shape[1], row_bound + math.sqrt(words.shape[1]) / 2 / SCALE)
    assert test is not None

    async def program(party: Party, own: Any) -> int:
        faults = Faults(party, await public_coins(party))
        await require_rows_within(faults, ArithmeticTensor(party, own[0], 14), test)
        await require_one_hot(faults, ArithmeticTensor(party, own[1], 0))
        found = await refmpc.reveal(await faults.any(), "bit")
        assert found is not None
        return int(found[0])

    inputs = list(zip(shared(words, 1), shared(labels, 2), strict=True))
    return int(refmpc.run(program, inputs, releases={"bit": "a test"}).outputs[0])


def test_one_bad_row_of_many_is_found() -> None:
    random = np.random.default_rng(5)
    rows = random.normal(size=(3 * NORM_ROWS + 100, 4))
    words = np.rint(rows / np.linalg.norm(rows, axis=1, keepdims=True) * SCALE).astype(np.int64).view(np.uint64)
    labels = np.eye(2, dtype=np.uint64)[random.integers(0, 2, len(rows))]
    assert fault(words, labels) == 0
    words[-1] = 0
    words[-1, 2] = np.uint64(2**14 + 3)  # one unit and a bit beyond R·2^14 + √4/2
    assert fault(words, labels) == 1


def test_the_test_holds_at_its_bound_and_not_beyond() -> None:
    """Exact: a row of squared norm B² passes, B² + 1 does not."""
    for width, bound in ((1, 1.0), (6, 0.5), (6, 20.0)):
        test = row_test(width, bound + math.sqrt(width) / 2 / SCALE)
        assert test is not None
        root = math.isqrt(test.squared)
        labels = np.eye(2, dtype=np.uint64)[[0, 1, 1, 0]]
        words = np.zeros((4, width), dtype=np.uint64)
        words[1, -1] = np.uint64(root)
        assert fault(words, labels, bound) == 0
        words[1, -1] = np.uint64(root + 1)
        assert fault(words, labels, bound) == 1


def test_a_projection_of_honest_numbers_is_small_and_of_a_bad_one_is_not() -> None:
    """Against the definition, for one party in the clear: the limit is never reached, and half the projections see one."""
    random = np.random.default_rng(3)
    words = random.integers(-(2**14), 2**14, size=(1, 5000, 1)).astype(np.int64).view(np.uint64)

    async def program(party: Party, own: Any) -> list[np.ndarray]:
        faults = Faults(party, bytes([7]) * 32)
        return [refmpc.unseal(faults.project(refmpc.seal(own)))[0, :, 0].view(np.int64) for _ in range(20)]

    limit = projection_limit(5000, 2**14)
    assert limit <= TAIL * math.sqrt(5000) * 2**14 + 2
    honest_sums = np.stack(refmpc.run(program, [words] * 3).outputs[0])
    assert honest_sums.shape == (20, PROJECTIONS) and np.abs(honest_sums).max() < limit / 2
    words[0, 4000, 0] = np.uint64(2**63)
    seen = np.abs(np.stack(refmpc.run(program, [words] * 3).outputs[0]).astype(float)) > limit
    assert 0.4 < seen.mean() < 0.6 and seen.any(axis=1).all()


def test_a_row_bound_too_large_for_64_bits_is_left_to_the_clients() -> None:
    assert row_test(64, 1.0) is not None and row_test(64, 1000.0) is None
    plan = make_plan(row_bound=1000.0)
    assert plan.row_test is None and ROW_BOUND_TRUSTED in plan.claim.public
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
            found = await refmpc.reveal(await faults.any(), "bit")
            assert found is not None
            return int(found[0])

        return int(refmpc.run(program, shared(labels, 3), releases={"bit": "a test"}).outputs[0])

    assert [opened(label) for label in good] == [0] * len(good)
    assert [opened(label) for label in bad] == [1] * len(bad)


@pytest.mark.parametrize("value", [1, -1, 2**63, 2**62, -(2**62), 12345])
def test_a_number_that_is_not_zero_is_found_whatever_its_sign(value: int) -> None:
    """With coins that give only sums of one sign, as half of all coins may: both signs are looked at. 2^63 is its own negative."""
    numbers = np.zeros((1, 1), dtype=np.uint64)
    numbers[0, 0] = np.uint64(value % 2**64)

    async def program(party: Party, own: Any) -> int:
        faults = Faults(party, bytes(32))
        one_projection: Any = lambda words, onto=None: words  # noqa: E731 (with the sign +1)
        faults.project = one_projection  # type: ignore[method-assign]
        await faults.require_zero(refmpc.seal(own))
        found = await refmpc.reveal(await faults.any(), "bit")
        assert found is not None
        return int(found[0])

    def opened(words: np.ndarray) -> int:
        inputs = [shares[0] for shares in shared(words, 8)]
        return int(refmpc.run(program, inputs, releases={"bit": "a test"}).outputs[0])

    assert opened(numbers) == 1
    assert opened(np.zeros_like(numbers)) == 0


@pytest.mark.heavy
def test_one_bad_row_of_a_hundred_thousand_is_refused_and_its_client_named(tmp_path: Path) -> None:
    """Through the servers' whole program, 64 columns; the last row, one word, a hair too long."""
    clients = (PublicClient("bank", 32), PublicClient("card", 32))
    plan = plan_run(
        "g_bmf", PublicFederation(clients, 100_000, CLASSES, 1.0, ()), small_training(batch_size=1000, delta=1e-6)
    )
    parts, labels = honest(plan)
    assert plan.schedule.num_samples == 100_000
    parts[0][-1] = 0
    parts[0][-1, 5] = np.uint64(int((0.5**0.5) * SCALE + 32**0.5 / 2) + 400)
    parts[1][-1] = np.rint(0.5**0.5 * SCALE / 32**0.5).astype(np.int64).view(np.uint64)
    with pytest.raises(refmpc.PartyFailed, match="client 'bank' shared rows beyond the row bound"):
        train_in_chunks(plan, tmp_path, parts, labels)


def play_in_chunks(client: Client, job: tuple[Plan, np.ndarray, np.ndarray | None]) -> Any:
    """As ``play``, in the messages that large uploads are divided into."""
    from protocols.client.upload import CHUNK_ROWS

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
