"""Hidden layers with waves: contributions of all layers together never above the clip, in exact integers, for any
weights and rows; the twin's sums; what one server sees."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from accel.errors import InvalidArgument
from bench.generators.series import clip_below
from protocols.plan.run_plan import plan_run
from protocols.plan.scales import EMBEDDING_BITS
from protocols.plan.smooth_scales import FACTOR, OUTPUT_BITS, SmoothScales, clip_series, plan_smooth, waves
from protocols.step.cost import step_cost
from protocols.step.hidden_step import HiddenWeights, hidden_updates, hidden_weights
from protocols.step.public_weights import PublicLayer, public_start
from refmpc.primitives import dealing
from tests.protocols.conftest import small_federation
from tests.protocols.secure_runs import noise_of_the_servers, released, run_secure, small_training
from tests.refmpc.harness import Secret, opened
from tests.refmpc.transcripts import Case, leaks, watch_streams
from vfl.gradients import GlobalModel
from vfl.hidden import (
    CLIP,
    CLIP_EDGE,
    LARGEST_OUTPUT,
    LARGEST_SLOPE,
    WEIGHT_BITS,
    HiddenClip,
    clip_wave,
    wave,
    wave_slope,
)
from vfl.twins import train_g_bmf

BITS = 30  # of weights

# certificates --------------------------------------------------------------------------------------------------------


def test_the_waves_stay_within_their_bounds_on_the_whole_circle():
    z = np.arange(2**16) / 2**11
    for series, twin, bound in zip(waves(), (wave, wave_slope), (LARGEST_OUTPUT, LARGEST_SLOPE), strict=True):
        values, step = series(z), 2.0**-11
        turns = 2 * np.pi * np.array(series.turns) / 32
        slope = float(np.hypot(series.sine, series.cosine) @ turns) * 2.0**-series.coefficient_bits
        assert np.abs(values).max() + slope * step / 2 + float(series.error) + 2.0**-13 < float(bound)
        assert np.abs(values - twin(z)).max() < 1e-8
    near = np.abs(z - 32 * np.round(z / 32)) < 10
    assert np.abs(wave(z) - np.tanh(z - 32 * np.round(z / 32)))[near].max() < 0.03


def test_the_clip_is_below_one_over_the_root_for_every_word_that_can_be_opened():
    """F and its error at the angle that is opened, up to two units below q, and the unit that F is rounded up by.
    Numbers are floating-point ones with 2^-40 to spare; the stored coefficients are as good as what the generator
    makes."""
    series = clip_series()
    words = np.arange(0, int(CLIP_EDGE * 2**20) + 1)
    spare = float(series.error) + 2.0**-FACTOR.fraction_bits + 2.0**-40
    for begun in range(0, len(words), 2**17):
        x = words[begun : begun + 2**17]
        factor = series(x * 2.0**-20)
        assert np.abs(factor - clip_wave(x * 2.0**-20)).max() < 1e-9
        assert ((np.abs(factor) + spare) * np.sqrt((x + 2) * 2.0**-20)).max() <= 1
        assert factor.min() > -0.4 and factor.max() + spare < 15
    edge = float(CLIP_EDGE)
    q = np.linspace(0.05, 1, 4000) ** 2 * edge
    below = np.minimum(10 / np.sqrt(edge), 1 / np.sqrt(q))
    best = (clip_below(q, len(CLIP) // 2, 10.0, edge) / below).mean()
    assert (clip_wave(q) / below).mean() > 0.999 * best > 0.98


# steps ----------------------------------------------------------------------------------------------------------------


class _Separate(HiddenClip):
    """Of several logits, each a class of its own."""

    @property
    def error_bound(self) -> Fraction:
        return Fraction(102, 100) * 4


def one_step(
    rng: Any, hidden: tuple[int, ...], outputs: int, clip_norm: float, growth: tuple[float, float], rows: int = 500
) -> tuple[list[np.ndarray], list[np.ndarray], SmoothScales, HiddenWeights, list[np.ndarray], np.ndarray, np.ndarray]:
    """(inputs and u of every layer as integers, and what they were made of) of one batch."""
    sizes = (int(rng.integers(1, 30)), *hidden, outputs)
    x = rng.normal(size=(rows, sizes[0]))
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-9)
    words = np.rint(np.hstack([x, np.ones((rows, 1))]) * 2.0**EMBEDDING_BITS).astype(np.int64)
    labels = np.eye(max(2, outputs), dtype=np.int64)[rng.integers(0, outputs if outputs > 1 else 2, rows)]
    labels = labels if outputs > 1 else labels[:, 1:]
    layers = [
        rng.normal(size=(fan_in + 1, fan_out)) * scale / np.sqrt(fan_in)
        for fan_in, fan_out, scale in zip(sizes, sizes[1:], (growth[0], *(growth[1] for _ in hidden)), strict=False)
    ]
    integers = [np.rint(layer * 2.0**BITS).astype(np.int64) for layer in layers]
    kind = HiddenClip if outputs == 1 else _Separate
    scales = plan_smooth(kind.of_rows("binary", clip_norm, 1.0, sizes[0]), rows, 10.0)
    used = hidden_weights([PublicLayer(layer) for layer in integers], BITS, scales)

    def program(party: Any, embeddings: Any, one_hot: Any) -> list[Any]:
        inputs, updates = party.complete(hidden_updates(embeddings, one_hot, used, scales))
        return [*inputs[1:], *updates]

    found = [each.words.view(np.int64) for each in opened(program, Secret(words, EMBEDDING_BITS), Secret(labels, 0))]
    return [words, *found[: len(hidden)]], found[len(hidden) :], scales, used, layers, x, labels


def contributions(
    inputs: list[np.ndarray], updates: list[np.ndarray], scales: SmoothScales
) -> tuple[np.ndarray, np.ndarray]:
    """Whether what each row adds to all layers is within γ, in exact integers, and the squares of it."""
    squares = np.zeros(len(inputs[0]), dtype=object)
    for a, u in zip(inputs, updates, strict=True):
        squares = squares + (a.astype(object) ** 2).sum(axis=1) * (u.astype(object) ** 2).sum(axis=1)
    clip = Fraction(scales.public.clip_norm)
    over = clip.numerator**2 * 4**scales.gradient_bits
    within = np.array([int(each) * clip.denominator**2 <= over for each in squares])
    return within, squares.astype(float)


def test_contributions_are_never_above_the_clip_for_any_weights_and_rows():
    """Sums that wrap thousands of times, gradients of every size; outputs that are undecided or as wrong as can be."""
    rng, largest = np.random.default_rng(5), 0.0
    for _ in range(24):
        hidden = tuple(int(n) for n in rng.integers(1, 24, 1 + int(rng.random() < 0.3)))
        clip_norm, outputs = float(rng.choice([0.05, 0.3, 1.0, 7.7])), int(rng.choice([1, 1, 2, 10]))
        growth = float(rng.choice([0.0, 0.01, 1.0, 40.0, 3000.0])), float(rng.choice([0.001, 0.1, 1.0, 4.0]))
        inputs, updates, scales, *_ = one_step(rng, hidden, outputs, clip_norm, growth)
        within, squares = contributions(inputs, updates, scales)
        assert within.all()
        largest = max(largest, float(np.sqrt(squares.max())) * 2.0**-scales.gradient_bits / clip_norm)
    assert largest > 0.95  # it was the clip that held them


@pytest.mark.parametrize("hidden, outputs", [((32,), 1), ((20,), 10), ((9, 7), 3)])
def test_updates_are_the_twins(hidden, outputs):
    rng = np.random.default_rng(2)
    inputs, updates, scales, used, layers, x, labels = one_step(rng, hidden, outputs, 1.0, (1.0, 1.0))
    model = GlobalModel(layers, "tanh")
    rows = np.hstack([x, np.ones((len(x), 1))])
    activations, logits = model.forward(rows)
    from vfl.losses import half_wave

    deltas = model.backward(activations, half_wave(logits, used.wave) - labels)
    factors = scales.public.factor(layers[1:], deltas)
    for depth, (own, u, a, delta) in enumerate(zip(inputs, updates, activations, deltas, strict=True)):
        bits = OUTPUT_BITS if depth else EMBEDDING_BITS
        assert np.abs(own[:, : a.shape[1] - 1] * 2.0**-bits - a[:, :-1]).max() < 0.005
        assert np.abs(u * 2.0 ** (bits - scales.gradient_bits) - factors[:, None] * delta).max() < 0.002


def test_weights_that_no_level_holds_end_the_run():
    scales = plan_smooth(HiddenClip.of_rows("binary", 1e-3, 1.0, 4), 32, 1.0)
    layers = [np.full((5, 3), 2**20), np.full((4, 1), 2**20)]
    with pytest.raises(InvalidArgument, match="gradients up to .* the training diverges: lower the learning rate"):
        integers = [PublicLayer(layer << (BITS - WEIGHT_BITS)) for layer in layers]
        hidden_weights(integers, BITS, scales)


@pytest.mark.parametrize("row_bound, clip_norm", [(0.1, 3e-4), (0.1, 5e-4), (300.0, 1.0), (1.0, 1.0)])
@pytest.mark.parametrize("hidden", [(5,), (6, 4)])
def test_an_accepted_plan_has_room_for_its_first_step(row_bound, clip_norm, hidden):
    training = small_training(
        batch_size=16, hidden=hidden, learning_rate=0.25 / row_bound / clip_norm, weights="open", clip_norm=clip_norm
    )
    federation = small_federation(2 * 16 + 3, (4, 3), 4, row_bound=row_bound)
    if clip_norm == 3e-4:
        with pytest.raises(InvalidArgument, match="clip_norm = 0.0003: must be at least .* for the gradients of the"):
            plan_run("g_bmf", federation, training)
        return
    plan = plan_run("g_bmf", federation, training)
    start, smooth = public_start(plan.start, plan.scales, plan.training), plan.scales.smooth
    assert smooth is not None and hidden_weights(start, plan.scales.weight_bits, smooth).bounds.level <= 13


@pytest.mark.parametrize(
    "hidden, task, rounds",
    [
        ((6,), "binary", 8),
        ((6,), "regression", 8),
        ((5, 4), "binary", 10),
        ((6,), "softmax", 16),
        ((6,), "bounded_softmax", 11),
        ((5, 4), "bounded_softmax", 13),
    ],
)
def test_a_run_opens_the_twins_layers_in_the_rounds_and_bytes_that_are_planned(tmp_path, hidden, task, rounds):
    classes = {"regression": 1, "binary": 2}.get(task, 4)
    federation = small_federation(2 * 16 + 3, (4, 3), classes)
    loss = {"task": task} if classes < 3 else {"loss": task}
    training = small_training(batch_size=16, hidden=hidden, learning_rate=0.25, weights="open", **loss)
    plan = plan_run("g_bmf", federation, training)
    result, cost, steps = run_secure(plan, federation, tmp_path), step_cost(plan), plan.schedule.num_steps
    twin = train_g_bmf(federation, training, noise=noise_of_the_servers(plan, tmp_path))
    for ours, layer, start in zip(released(result), twin.model.layers, plan.start, strict=True):
        assert np.abs(ours - layer).max() < 2e-4 < 0.05 * np.abs(layer - start).max()
    assert cost.rounds == rounds
    assert result.ledgers[0].phases["training"].rounds == steps * rounds
    assert sum(ledger.phases["training"].bytes_sent for ledger in result.ledgers) == steps * cost.bytes


# views ----------------------------------------------------------------------------------------------------------------

PLAN = plan_smooth(HiddenClip.of_rows("binary", 1.0, 1.0, 2), 64, 10.0)
FIRST, SECOND = np.array([[0.7], [-0.4], [0.05]]), np.array([[0.6], [0.05]])
LAYERS = [PublicLayer(np.rint(each * 2.0**BITS).astype(np.int64)) for each in (FIRST, SECOND)]


async def step_of_equal_rows(party: Any, rows: Any, label: Any) -> list[Any]:
    """Each input has three equal entries a row; what is public about them is done here."""
    turned = rows.scale_by_integers(np.array([1, -2, 0])).reinterpret(EMBEDDING_BITS) + np.array([0.0, 0.0, 1.0])
    _, updates = await hidden_updates(turned, label[:, :1].reinterpret(0), hidden_weights(LAYERS, BITS, PLAN), PLAN)
    return updates


STEP = Case(
    step_of_equal_rows,
    ("arithmetic",) * 2,
    ((round(0.3 * 2**14), 1), (round(-0.25 * 2**14), 0)),
    composed=True,
    shape=(3,),
)


@pytest.fixture
def _watched(monkeypatch):
    watch_streams(monkeypatch)
    monkeypatch.setattr(dealing, "FEWEST_ROWS", 10**9)


@pytest.mark.usefixtures("_watched")
def test_no_message_of_a_step_tells_one_batch_from_another():
    assert leaks(STEP) == []
