"""GL-BMF with open weights: what is opened is the exact noised sum but for its cut, and public products are safe for
the clip."""

from __future__ import annotations

import threading
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import protocols.client.gl_client
import refmpc
from protocols.plan.scales import RELEASE_BITS
from protocols.server.gl_training import OpenLayerRun
from protocols.step.open_gl_step import public_block
from refmpc.core.words import unseal
from refmpc.primitives.opening import added_words
from tests.protocols.gl_runs import make, run_secure
from tests.protocols.secure_runs import noise_of_the_servers


class Spy:
    """By server and step, in the order of the calls: summands, addends and words of everything that is about to be
    opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls: dict[tuple[int, int], list[tuple[np.ndarray, ...]]] = defaultdict(list)
        self.sums: dict[int, np.ndarray] = {}
        self.told: dict[str, list[np.ndarray]] = defaultdict(list)
        lock = threading.Lock()
        product, tensor, move = refmpc.matmul_opening, refmpc.tensor_opening, OpenLayerRun._move
        receive = refmpc.receive_opening
        monkeypatch.setenv("REFMPC_RECORD", "0")  # a repeated step does not come by here

        def note(party, *parts):
            with lock:
                self.calls[party.id, party.step].append(tuple(unseal(part).copy() for part in parts))

        def of_product(x, y, bits, addend):
            words = product(x, y, bits, addend)
            note(x.party, words, addend, x.first, y.first)
            return words

        def of_tensor(x, bits, addend):
            words = tensor(x, bits, addend)
            note(x.party, words, addend, x.first)
            return words

        def moving(run, step, sums):
            self.sums[step] = sums.copy()
            move(run, step, sums)

        def told(client, *arguments, **options):
            found = receive(client, *arguments, **options)
            self.told[client.name].append(found)
            return found

        monkeypatch.setattr(refmpc, "matmul_opening", of_product)
        monkeypatch.setattr(refmpc, "tensor_opening", of_tensor)
        monkeypatch.setattr(OpenLayerRun, "_move", moving)
        monkeypatch.setattr(protocols.client.gl_client, "receive_opening", told)


@pytest.mark.parametrize("changes", [{}, {"gradients": "explicit"}], ids=["factored", "explicit"])
def test_the_opened_sequence_is_the_exact_noised_sum_word_for_word(tmp_path, monkeypatch, changes):
    """Given the servers' noise and what their cuts rounded, 0, 1 or 2 units: nothing else is opened, to servers or
    clients."""
    federation, plan = make(weights="open", epochs=1, **changes)
    spy, cut = Spy(monkeypatch), plan.scales.truncated_bits
    run_secure(plan, federation, tmp_path)
    noise, half = noise_of_the_servers(plan, tmp_path), 3 << (cut - 1)
    for step in range(plan.schedule.num_steps):
        opened, added, roundings = [], [], []
        for index, servers in enumerate(zip(*(spy.calls[server, step] for server in range(3)), strict=True)):
            words, addend, *factors = ([part[k] for part in servers] for k in range(len(servers[0])))
            exact = [sum(parts[1:], parts[0]) for parts in factors]
            addends = sum(part.view(np.uint64) for part in addend)
            total = (exact[0] if len(exact) == 1 else exact[0] @ exact[1]) + addends
            found = added_words(words, cut)
            roundings.append(((total.view(np.int64) >> cut) - found).reshape(-1))
            opened.append(found.reshape(-1))
            added.append(addends.view(np.int64).reshape(-1) - (half if index == 0 else 0))
        assert set(np.concatenate(roundings).tolist()) <= {0, 1, 2}
        assert (opened[0] == spy.sums[step]).all()
        told = np.concatenate([spy.told[name][step] for name in plan.client_names])
        assert (np.sort(told * 2.0**RELEASE_BITS - 1.5) == np.sort(np.concatenate(opened[1:]))).all()
        size = plan.global_parameters
        unit = 2.0**-plan.scales.gradient_bits
        assert np.abs(added[0] * unit - noise[step][:size]).max() <= 2.0**-40
        layers = np.sort(np.concatenate(added[1:]) * unit) - np.sort(noise[step][size:])  # layers lie apart in the row
        assert np.abs(layers).max() <= 2.0**-40


@given(seed=st.integers(0, 10_000), rows=st.integers(1, 6), size=st.sampled_from([1e-3, 1.0, 30.0]))
def test_the_public_gram_matrix_is_never_below_that_of_the_weights(seed, rows, size):
    """δᵀM̂δ ≥ ‖W̃δ‖² for every δ, in integers: the clip may be too tight, never too loose. The block is W but for its
    mean and half a unit."""
    _, plan = make()
    scales, bits, rng = plan.adapters, plan.scales.weight_bits, np.random.default_rng(seed)
    weights = rng.normal(size=(rows, plan.classes))
    weights *= min(size, 0.9 * scales.weight_bound) / np.linalg.norm(weights)
    words = np.rint(weights * 2.0**bits).astype(np.int64)
    public = public_block(words, bits, scales)
    block, gram = public.block.words.astype(object), public.gram.words.astype(object)
    small = weights - weights.mean(axis=1, keepdims=True)
    assert np.abs(public.block.words * 2.0**-scales.block_bits - small).max() <= 2.0**-scales.block_bits
    shift = 2 * scales.block_bits - scales.gram_bits
    for delta in rng.integers(-(2**18), 2**18, (20, plan.classes)).astype(object):
        exact = sum(int(v) ** 2 for v in block @ delta)
        assert int(delta @ gram @ delta) << shift >= exact


def test_weights_beyond_the_room_of_the_run_end_it_with_a_sentence():
    _, plan = make()
    words = np.zeros((3, plan.classes), dtype=np.int64)
    words[0, 0] = int(2 * plan.adapters.weight_bound * 2.0**plan.scales.weight_bits)
    with pytest.raises(ValueError, match="for which this run has room; the training diverges"):
        public_block(words, plan.scales.weight_bits, plan.adapters)


@pytest.mark.parametrize("angle", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("size, fits", [(0.999, True), (1.001, False)])
def test_weights_are_measured_by_their_spectral_norm(angle, size, fits):
    """Two columns of which neither is too long: what counts is the norm of both together, however they lie."""
    _, plan = make()
    rows, turn = 12, np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    across = np.array([[1.0, -1.0, 0.0], [0.5, 0.5, -1.0]]) / np.sqrt([[2.0], [1.5]])  # centred already
    along = np.zeros((rows, 2))
    along[0, 0], along[1, 1] = 1.0, 0.6
    weights = along @ turn @ across * size * plan.adapters.weight_bound
    assert np.linalg.norm(weights, axis=0).max() < 0.95 * plan.adapters.weight_bound
    words = np.rint(weights * 2.0**plan.scales.weight_bits).astype(np.int64)
    if fits:
        public_block(words, plan.scales.weight_bits, plan.adapters)
    else:
        with pytest.raises(ValueError, match="of norm at most .*, for which this run has room"):
            public_block(words, plan.scales.weight_bits, plan.adapters)
