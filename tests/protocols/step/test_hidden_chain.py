"""The short step of one hidden layer: contributions of both layers together are never above the clip, whatever rounds
how."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

import refmpc
from protocols.plan.run_plan import Plan, plan_run
from protocols.plan.scales import EMBEDDING_BITS
from protocols.step import hidden_chain
from protocols.step.clip import squared_norms
from protocols.step.hidden_chain import secret_hidden_updates
from refmpc.mathematics.scale_rows import begin_cut_and_square
from tests.not_none import not_none
from tests.protocols.conftest import small_federation
from tests.protocols.secure_runs import small_training
from tests.refmpc.harness import Secret, evaluate
from tests.refmpc.rounding import down, forced, forced_openings, up
from vfl.gradients import GlobalModel, with_ones

WIDTH, HIDDEN, CLASSES, ROWS = 7, 6, 3, 96


def make_plan(clip_norm: float, row_bound: float, epsilon: float = 20.0) -> Plan:
    """A short step needs small weights."""
    federation = small_federation(3 * ROWS, (4, 3), CLASSES, row_bound=row_bound)
    rate = 0.003 / clip_norm * min(1.0, epsilon)
    training = small_training(
        epochs=100,
        batch_size=ROWS,
        hidden=(HIDDEN,),
        clip_norm=clip_norm,
        learning_rate=rate,
        epsilon=epsilon,
        weights="secret",
    )
    return plan_run("g_bmf", federation, training)


def words(values: np.ndarray, bits: int) -> np.ndarray:
    found: np.ndarray = np.rint(values * 2.0**bits).astype(np.int64)
    return found


def run(
    plan: Plan, rows: np.ndarray, labels: np.ndarray, layers: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[a 1] at EMBEDDING_BITS, and u of both layers at gradient_bits − EMBEDDING_BITS: integers."""
    scales = plan.scales
    integers = [words(layer, scales.weight_bits) for layer in layers]

    def program(party, embeddings, one_hot, *shared):
        norms = party.complete(squared_norms(embeddings, scales))
        found = secret_hidden_updates(embeddings, one_hot, norms, shared, scales)
        (_, inputs), updates = party.complete(found)
        return refmpc.concatenate([part.reinterpret(0) for part in (inputs, *updates)], axis=1)

    secrets = [Secret(rows, EMBEDDING_BITS), Secret(np.eye(CLASSES, dtype=np.int64)[labels])]
    secrets += [Secret(own, scales.weight_bits) for own in integers]
    found = evaluate(program, *secrets).opened.signed
    return found[:, : HIDDEN + 1], found[:, HIDDEN + 1 : 2 * HIDDEN + 1], found[:, 2 * HIDDEN + 1 :]


class Spy:
    """What the chain hands on, as integers: q before the clip, and [n of a cut, rows as they are cut]."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._summands: dict[int, np.ndarray] = {}
        self._norms: dict[int, list[np.ndarray]] = {0: [], 1: [], 2: []}
        clip, square = refmpc.clip_root, begin_cut_and_square

        def clipping(q, *rest):
            self._summands[q.party.id] = refmpc.unseal(q.words).copy()
            return clip(q, *rest)

        def squaring(z, bits, weights):
            self._norms[z.party.id].append(refmpc.unseal(weights.shares)[0].copy())
            return square(z, bits, weights)

        monkeypatch.setattr(refmpc, "clip_root", clipping)
        monkeypatch.setattr(hidden_chain, "begin_cut_and_square", squaring)

    @property
    def q(self) -> np.ndarray:
        return sum(self._summands.values(), np.zeros(1, np.uint64)).view(np.int64).astype(object)

    @property
    def norms(self) -> list[np.ndarray]:
        """Norms of the second layer, then of the first."""
        return [sum(parts, np.zeros(1, np.uint64)).view(np.int64) for parts in zip(*self._norms.values(), strict=True)]


def squares(values: np.ndarray) -> np.ndarray:
    return np.array([sum(x * x for x in row) for row in values.tolist()], dtype=object)


def drawn(plan: Plan, growth: float) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Rows as long as they may be, labels of the least likely class, weights of some size."""
    rng = np.random.default_rng(5)
    rows = rng.normal(size=(ROWS, WIDTH))
    rows *= 0.999 * plan.scales.row_bound / np.linalg.norm(rows, axis=1, keepdims=True) * rng.uniform(0.2, 1, (ROWS, 1))
    layers = [rng.normal(size=shape) * growth / np.sqrt(shape[0]) for shape in plan.layer_shapes]
    whole = with_ones(words(rows, EMBEDDING_BITS) * 2.0**-EMBEDDING_BITS)
    return words(whole, EMBEDDING_BITS), GlobalModel(layers).forward(whole)[1].argmin(axis=1), layers


def contributions(plan: Plan, rows: np.ndarray, found: tuple[np.ndarray, np.ndarray, np.ndarray]) -> np.ndarray:
    """‖[h 1]‖²·‖u_1‖² + ‖[a 1]‖²·‖u_2‖² over γ², exactly."""
    outputs, first, last = found
    total = squares(rows) * squares(first) + squares(outputs) * squares(last)
    gamma = Fraction(plan.training.clip_norm) ** 2 * 4 ** not_none(plan.scales.hidden_chain).gradient_bits
    return np.array([Fraction(int(each)) / gamma for each in total], dtype=object)


@pytest.mark.parametrize("choose", [None, up, down])
@pytest.mark.parametrize(
    "clip_norm, row_bound, growth",
    [
        (0.05, 4.0, 0.4),
        (1.0, 1.0, 0.4),
    ],
)
def test_both_layers_together_are_never_above_the_clip(clip_norm, row_bound, growth, choose, monkeypatch):
    if choose is not None:
        forced(monkeypatch, choose)
        forced_openings(monkeypatch, choose is up)
    plan = make_plan(clip_norm, row_bound)
    rows, labels, layers = drawn(plan, growth)
    part = contributions(plan, rows, run(plan, rows, labels, layers))
    assert part.max() <= 1
    assert part.max() > 0.98 or growth < 0.1  # it was the clip that held it


@pytest.mark.parametrize("choose", [up, down])
def test_the_clip_holds_where_a_unit_of_the_factor_counts(choose, monkeypatch):
    """Much noise leaves few bits for C: one unit more would be above the clip."""
    forced(monkeypatch, choose)
    forced_openings(monkeypatch, choose is up)
    plan = make_plan(0.05, 4.0, epsilon=0.002)
    assert not_none(plan.scales.hidden_chain).clip_bits == 21
    rows, labels, layers = drawn(plan, 0.4)
    part = contributions(plan, rows, run(plan, rows, labels, layers))
    assert 0.98 < part.max() <= 1


@pytest.mark.parametrize("choose", [None, up, down])
def test_q_is_made_of_the_very_integers_that_are_scaled(choose, monkeypatch):
    """q = n_1·‖δ_1‖² + n_2·‖δ_2‖² of δ as u uses it, and n of both layers is never below ‖[· 1]‖²/γ²."""
    if choose is not None:
        forced(monkeypatch, choose)
        forced_openings(monkeypatch, choose is up)
    spy, scaled = Spy(monkeypatch), {}
    scale_rows = refmpc.scale_rows

    def scaling(v, x, bits):
        scaled[x.party.id] = refmpc.unseal(x.shares)[0].copy()
        return scale_rows(v, x, bits)

    monkeypatch.setattr(refmpc, "scale_rows", scaling)
    plan = make_plan(0.05, 4.0)
    rows, labels, layers = drawn(plan, 0.4)
    outputs, *_ = run(plan, rows, labels, layers)
    errors = sum(scaled.values(), np.zeros(1, np.uint64)).view(np.int64)
    second, first = spy.norms
    exact = first * squares(errors[:, :HIDDEN]) + second * squares(errors[:, HIDDEN:])
    assert (spy.q == exact).all()
    unit = Fraction(plan.training.clip_norm) ** 2 * 4**EMBEDDING_BITS
    for found, true in ((first, squares(rows)), (second, squares(outputs))):
        scale = 2 ** not_none(plan.scales.hidden_chain).norms.bits
        assert all(Fraction(int(t)) * scale <= int(n) * unit for n, t in zip(found, true, strict=True))
        assert (found * float(unit) <= true.astype(float) * scale * 1.04 + 4 * float(unit)).all()


@pytest.mark.parametrize("clip_norm", [0.05, 4.0])
def test_updates_are_those_of_the_clipped_gradient(clip_norm):
    """Both layers', entry by entry, where the sign of a sum is beyond doubt."""
    plan = make_plan(clip_norm, 4.0)
    rows, labels, layers = drawn(plan, 0.4)
    found = run(plan, rows, labels, layers)
    bits = plan.scales.update_bits
    sums = rows * 2.0**-EMBEDDING_BITS @ layers[0]
    inputs = with_ones(np.maximum(sums, 0))
    logits = inputs @ layers[1]
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    last = shifted / shifted.sum(axis=1, keepdims=True) - np.eye(CLASSES)[labels]
    first = last @ layers[1][:-1].T * (sums > 0)
    lengths = squares(rows).astype(float) * 4.0**-EMBEDDING_BITS, (inputs**2).sum(axis=1)
    norm = np.sqrt(lengths[0] * (first**2).sum(axis=1) + lengths[1] * (last**2).sum(axis=1))
    factor = np.minimum(1.0, clip_norm / norm)[:, np.newaxis]
    size = np.linalg.norm(layers[1], 2)
    clear = np.abs(sums) > 1e-3
    assert clear.mean() > 0.9 and 0.05 < (sums[clear] < 0).mean() < 0.95
    assert np.abs(found[0] * 2.0**-EMBEDDING_BITS - inputs)[:, :-1][clear].max() <= 2.0**-12
    for ours, true, scale in ((found[1], factor * first, 1 + size), (found[2], factor * last, 1.0)):
        allowed = 2.0**-9 * np.abs(true) + factor * scale * (1 + size) * 2.0**-11
        wrong = np.abs(ours * 2.0**-bits - true) > allowed
        assert not (wrong & (clear if ours.shape[1] == HIDDEN else True)).any()
