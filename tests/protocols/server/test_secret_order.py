"""A secret order on shares: the run is its twin in the order that was drawn, which survives a crash and is uniform to
each server."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chisquare

import refmpc
from protocols.methods import g_bmf, g_shuff
from protocols.plan.run_plan import plan_run
from protocols.plan.scales import EMBEDDING_BITS
from protocols.state.checkpoint import CannotResume
from protocols.state.shuffled_rows import ShuffledRows
from refmpc.primitives import shuffle as shuffle_module
from tests.not_none import not_none
from tests.protocols.conftest import lora_federation, small_federation
from tests.protocols.secure_runs import noise_of_the_servers, released, run_secure, small_training, weight_bound
from tests.protocols.server.crashes import run_until_crash
from vfl.twins.g_bmf import train_g_bmf
from vfl.twins.g_shuff import train_g_shuff

SECRET = {"order": "secret", "accounting": "proven", "delta": 1e-3, "learning_rate": 1.0}


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """The shuffled shares stay on disk after the run, so that the order can be read from all three together."""
    monkeypatch.setattr(ShuffledRows, "discard", lambda self: None)


def drawn_order(plan, federation, directory) -> np.ndarray:
    """From the kept shares of all three servers: which row is where. Dummies count from num_samples on."""
    parts = []
    for server in range(3):
        (file,) = (directory / f"server-{server}").glob("shuffled-*.npz")
        assert file.stat().st_mode & 0o777 == 0o600
        with np.load(file) as arrays:
            parts.append(arrays["shares of embeddings"][0])
    rows = (parts[0] + parts[1] + parts[2]).view(np.int64) * 2.0**-EMBEDDING_BITS
    wanted = np.concatenate([client.embedding_rows(slice(None)) for client in federation.clients], axis=1)
    order, dummies = np.empty(len(rows), dtype=np.int64), 0
    for slot, row in enumerate(rows):
        if row[-1] == 1.0:
            order[slot] = int(np.abs(wanted - row[:-1]).max(axis=1).argmin())
        else:
            assert not row.any()  # zero in every column, that of the ones included
            order[slot] = plan.schedule.num_samples + dummies
            dummies += 1
    assert dummies == plan.schedule.dummies and sorted(order) == list(range(len(rows)))
    return order


def require_twin(plan, federation, directory, result) -> None:
    """The released weights are the twin's in the drawn order, and further away from the twin's in another one."""
    noise, order = noise_of_the_servers(plan, directory), drawn_order(plan, federation, directory)
    gaps = []
    for one in (order, order[::-1]):
        twin = train_g_bmf(federation, plan.training, noise=noise, order=one)
        gaps.append(np.abs(released(result)[0] - twin.model.layers[0]).max())
    assert gaps[0] <= weight_bound(plan) and gaps[0] < 0.1 * gaps[1]


@pytest.mark.parametrize("weights", ["open", "secret"])
def test_g_bmf_is_its_twin_in_the_order_that_was_drawn(federation, tmp_path, weights):
    plan = plan_run("g_bmf", federation, small_training(epochs=2, weights=weights, **SECRET))
    assert plan.secret_order and plan.claim.proven and plan.schedule.num_samples == 96
    result = run_secure(plan, federation, tmp_path, every=2)
    require_twin(plan, federation, tmp_path, result)


def test_g_shuff_is_its_twin_in_the_order_that_was_drawn(federation, tmp_path):
    plan = plan_run(
        "g_shuff", federation, small_training(weights="open", **{**SECRET, "order": "fixed"})
    )  # ever secret
    assert plan.secret_order and plan.claim.proven
    result = run_secure(plan, federation, tmp_path, g_shuff.servers, every=2)
    order = drawn_order(plan, federation, tmp_path)
    twin = train_g_shuff(federation, plan.training, noise=noise_of_the_servers(plan, tmp_path), orders=order[None])
    assert np.abs(released(result)[0] - twin.model.layers[0]).max() <= weight_bound(plan)


@pytest.mark.parametrize("weights", ["open", "secret"])
def test_a_resumed_run_goes_on_in_the_same_order(federation, tmp_path, monkeypatch, weights):
    plan = plan_run("g_bmf", federation, small_training(epochs=3, weights=weights, **SECRET))
    shuffles, shuffle = [], refmpc.shuffle

    async def counting(tensors):
        shuffles.append(tensors[0].party.id)
        return await shuffle(tensors)

    monkeypatch.setattr(refmpc, "shuffle", counting)
    run_until_crash(plan, federation, tmp_path, monkeypatch, 5)
    result = run_secure(plan, federation, tmp_path, every=2)
    assert sorted(shuffles) == [0, 1, 2]  # once, at each server
    require_twin(plan, federation, tmp_path, result)


def test_without_its_shuffled_rows_a_run_does_not_go_on(federation, tmp_path, monkeypatch):
    plan = plan_run("g_bmf", federation, small_training(epochs=3, **SECRET))
    run_until_crash(plan, federation, tmp_path, monkeypatch, 5)
    for file in (tmp_path / "server-1").glob("shuffled-*.npz"):
        file.unlink()
    with pytest.raises(refmpc.PartyFailed) as caught:
        run_secure(plan, federation, tmp_path, every=2)
    assert isinstance(caught.value.__cause__, CannotResume) and "must not be drawn again" in str(caught.value)


def test_gl_bmf_refuses_a_secret_order():
    from protocols.plan.gl_plan import plan_layer_run

    federation = lora_federation(96, (3, 2), ((2, 3), (3, 3)), 3)
    with pytest.raises(ValueError, match="order = 'secret': must be 'fixed' in gl_bmf; its clients know the batches"):
        plan_layer_run(federation, small_training(order="secret"))


ROWS, BINS, SHUFFLES = 6, 3, 900


def test_a_records_batch_is_uniform_to_each_server(monkeypatch):
    """Each server knows two of three permutations. Whatever place these two alone would give row 0, its batch is
    uniform."""
    known: dict[int, list[dict[str, np.ndarray]]] = {0: [], 1: [], 2: []}
    permutations = shuffle_module._permutations

    def noted(operation, role, rows):
        found = permutations(operation, role, rows)
        known[operation.party.id].append({name: refmpc.unseal(order) for name, order in found.items()})
        return found

    monkeypatch.setattr(shuffle_module, "_permutations", noted)

    async def program(party, _):
        ids = refmpc.ArithmeticTensor.zeros(party, (ROWS, 1), 0) + np.arange(ROWS)[:, None]
        places = []
        for _ in range(SHUFFLES):
            (shuffled,) = await refmpc.shuffle([ids])
            places.append(not_none(await refmpc.reveal(shuffled, release="order")))
        return np.stack(places)[:, :, 0]

    orders = refmpc.run(program, [None] * 3, releases={"order": "a test"}).outputs[0]
    batch = (orders == 0).argmax(axis=1) * BINS // ROWS
    for server in range(3):
        guesses = []
        for found in known[server]:
            order = np.arange(ROWS)
            for name in ("01", "12", "02"):
                order = order[found[name]] if name in found else order
            guesses.append(int((order == 0).argmax()) * BINS // ROWS)
        for guess in range(BINS):
            counts = np.bincount(batch[np.array(guesses) == guess], minlength=BINS)
            assert counts.sum() > SHUFFLES / 5 and chisquare(counts).pvalue > 1e-4
    # and all three together do know it
    for number in range(0, SHUFFLES, 97):
        everything = {**known[0][number], **known[1][number], **known[2][number]}
        order = np.arange(ROWS)
        for name in ("01", "12", "02"):
            order = order[everything[name]]
        assert (order == orders[number]).all()


def test_the_rows_that_do_not_fill_a_batch_take_part_too(tmp_path):
    federation = small_federation(75, (3, 2), 3)
    plan = plan_run("g_bmf", federation, small_training(weights="open", **SECRET))
    assert plan.schedule.num_samples == 75 and plan.schedule.divisor == 37.5
    run_secure(plan, federation, tmp_path, g_bmf.servers, every=2)
    assert set(drawn_order(plan, federation, tmp_path)) >= set(range(75))
