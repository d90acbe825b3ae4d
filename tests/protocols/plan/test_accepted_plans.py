"""Whole configurations, drawn through the parser of the command line: what is accepted keeps its claim, what is refused
says why.

For every accepted plan, on real shares: the worst rows contribute at most γ', no operand leaves its domain (a step from
the largest momentum included), the claim is what brute force and dp_accounting give for the noise that is really added,
and a few steps are those of the plaintext twin.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from itertools import product
from typing import Any

import dp_accounting
import numpy as np
import pytest
from hypothesis import example, given, seed, settings
from hypothesis import strategies as st
from scipy.linalg import toeplitz

import refmpc
from protocols.methods import g_bmf, g_shuff
from protocols.plan.gl_plan import LayerPlan, plan_layer_run
from protocols.plan.plausibility import largest_weights
from protocols.plan.run_plan import Plan, plan_run
from protocols.plan.scales import EMBEDDING_BITS
from protocols.run.options import parse_options
from refmpc.mathematics.gaussian import SMOOTHING
from tests.protocols.conftest import lora_federation, small_federation
from tests.protocols.secure_runs import noise_of_the_servers, released, run_secure
from tests.protocols.step import test_gl_jacobians, test_gl_step
from tests.protocols.step.agreement import twin_and_bound
from tests.protocols.step.gl_inputs import make_inputs, on_grid, secure_sum, step_bound
from tests.protocols.step.worst_rows import (
    contributions,
    extreme_step,
    extreme_weights,
    open_contributions,
    plausible_weights,
    worst_rows,
)
from vfl.dp import calibration
from vfl.dp.mechanism import NoiseSplit
from vfl.federation import Federation

PROTOCOLS = ("g_bmf", "g_shuff", "gl_bmf")
OPTIONS = [
    "row_bound",
    "clip_norm",
    "epsilon",
    "delta",
    "batch_size",
    "epochs",
    "momentum",
    "weight_decay",
    "learning_rate",
    "hidden",
    "factorisation",
    "noise",
    "gradients",
    "bands",
    "jacobian_bound",
    "task",
    "class_weights",
]


@dataclass(frozen=True)
class Drawn:
    """A command line, and the federation that it would find."""

    protocol: str
    arguments: tuple[str, ...]
    batches: int
    widths: tuple[int, ...]
    classes: int

    def federation(self, row_bound: float, batch_size: int) -> Federation:
        rows = self.batches * batch_size
        if self.protocol == "gl_bmf":
            blocks = tuple((2 + index, 3) for index in range(len(self.widths)))
            return lora_federation(rows, self.widths, blocks, self.classes, row_bound=row_bound)
        return small_federation(rows, self.widths, self.classes, row_bound=row_bound)

    def plan(self) -> tuple[Plan, Federation]:
        """As the command makes it, from what its parser read; raises ``ValueError`` if it is refused."""
        options = parse_options(self.protocol, None, list(self.arguments))
        federation = self.federation(options.row_bound, options.training.batch_size)
        if self.protocol == "gl_bmf":
            return plan_layer_run(federation, options.training), federation
        return plan_run(self.protocol, federation, options.training), federation


def powers(low: float, high: float) -> st.SearchStrategy[float]:
    """10^x, x uniform: every order of magnitude alike."""
    return st.floats(low, high).map(lambda exponent: float(f"{10.0**exponent:.4g}"))


@st.composite
def configurations(draw: Any, protocol: str) -> Drawn:
    row_bound = draw(powers(-1, 4.2))
    clip_norm = row_bound * draw(powers(-2.5, 0.7))
    epochs, batches = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    momentum = draw(st.sampled_from([0.0, 0.0, 0.5, 0.9, 0.99]))
    # a learning rate whose logits may reach this much: from hardly any training to the end of the ring
    logits = draw(powers(0, 6))
    rate = logits * (1 - momentum) / (math.hypot(row_bound, 1.0) * clip_norm * epochs * batches)
    found: dict[str, Any] = {
        "row-bound": row_bound,
        "clip-norm": clip_norm,
        "learning-rate": rate,
        "epochs": epochs,
        "momentum": momentum,
        "batch-size": draw(st.sampled_from([1, 4, 16])),
        "epsilon": draw(powers(-0.7, 1.3)),
        "delta": draw(powers(-8, -3)),
        "weight-decay": draw(st.sampled_from([1.0, 1.0, 0.999, 0.995])),
        "gradients": draw(st.sampled_from(["factored", "factored", "explicit"])),
    }
    if protocol != "gl_bmf":
        hidden = draw(st.sampled_from(["", "", "5", "6,4"])) if found["gradients"] == "factored" else ""
        found |= {"hidden": hidden, "noise": draw(st.sampled_from(["distributed", "distributed", "joint"]))}
        found["weights"] = draw(st.sampled_from(["open", "secret"]))
    classes = draw(st.integers(2, 4))
    if protocol != "gl_bmf" and found["gradients"] == "factored" and not found["hidden"]:
        task = draw(st.sampled_from(["classification", "classification", "binary", "regression"]))
        classes = {"classification": classes, "binary": 2, "regression": 1}[task]
        found["task"] = task
        if task != "regression" and draw(st.booleans()):
            weights = draw(st.lists(st.sampled_from([0.25, 1.0, 5.0]), min_size=classes, max_size=classes))
            found["class-weights"] = ",".join(map(str, weights))
        elif task == "classification":
            found["loss"] = draw(st.sampled_from(["softmax", "bounded_softmax"]))
    if protocol == "g_shuff":
        found["accounting"] = draw(st.sampled_from(["any-order", "any-order", "paper"]))
    if found.get("accounting") != "paper":
        found["rows-per-person"] = draw(st.sampled_from([1, 1, 1, 4]))
    if protocol != "g_shuff":
        found["factorisation"] = draw(st.sampled_from(["bisr", "bsr", "identity"]))
    widths = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    arguments = tuple(f"--{name}={value}" for name, value in found.items())
    return Drawn(protocol, arguments, batches, widths, classes)


# weights may outgrow the short step of this plan, and the norms of rows, shared once, have few bits
SHORT_OF_BITS = Drawn(
    "g_bmf",
    (
        "--row-bound=1.843",
        "--clip-norm=0.03033",
        "--learning-rate=61.66",
        "--epochs=25",
        "--batch-size=8",
        "--epsilon=0.699",
        "--hidden=64",
    ),
    7,
    (8, 8),
    10,
)


# the claim, recomputed ---------------------------------------------------------------------------


def brute_sensitivity(plan: Plan) -> tuple[float, float]:
    """(the largest ‖Ω̂·stream‖ of one record, ‖Ω̂‖): every place in the order, every sign, from the taps that really
    run."""
    steps, batches = plan.schedule.num_steps, plan.schedule.num_batches
    column = np.zeros(steps)
    taps = plan.factorisation.noising_taps
    column[: len(taps)] = taps
    omega = np.linalg.inv(toeplitz(column, np.zeros(steps)))
    largest = 0.0
    for place, signs in product(range(batches), product((1.0, -1.0), repeat=plan.schedule.epochs)):
        stream = np.zeros(steps)
        stream[place::batches] = signs
        largest = max(largest, float(np.linalg.norm(omega @ stream)))
    return largest, float(np.linalg.norm(omega, 2))


def check_claim(plan: Plan, clip_rounding: float) -> None:
    """ε is at least what this noise gives by dp_accounting for this sensitivity, at most what was asked for."""
    claim, noise, epochs = plan.noise.claim, plan.noise, plan.schedule.epochs
    assert claim.epsilon <= plan.training.epsilon and claim.delta == plan.training.delta
    rows = plan.training.rows_per_person  # in the worst case all in one batch
    contribution = rows * (plan.training.clip_norm + clip_rounding)
    grid = rows * 2.0**-noise.noise_bits * math.sqrt(plan.parameters)
    left = claim.delta - claim.slack_delta
    known = 1.0 if noise.split is NoiseSplit.JOINT else 2 * 0.5  # variance that one corrupted server does not know
    std = noise.target_std * math.sqrt(known)
    if noise.split is NoiseSplit.DISTRIBUTED:  # what two honest servers really sample, on the grid
        assert math.sqrt(2) * plan.server_noise_std * 2.0**-noise.noise_bits >= noise.target_std
    else:
        assert plan.server_noise_std * 2.0**-noise.noise_bits >= SMOOTHING * noise.target_std
    if plan.protocol == "g_shuff":
        rate, steps = plan.schedule.batch_size / plan.schedule.num_samples, plan.schedule.num_steps
        multiplier = std / (contribution + grid)
        (any_order,) = (figure.epsilon for figure in claim.figures if figure.name == "Any order of the batches")
        # each figure leaves its own e^ε times the distance of the arithmetic; ``left`` is the headline's
        own = (1 + math.exp(any_order)) * claim.statistical_distance
        proven = dp_accounting.get_epsilon_gaussian(multiplier / math.sqrt(epochs), claim.delta - own)
        event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(multiplier))
        accountant = dp_accounting.rdp.RdpAccountant(
            calibration.OPACUS_ORDERS, dp_accounting.NeighboringRelation.REPLACE_SPECIAL
        )
        paper = accountant.compose(dp_accounting.SelfComposedDpEvent(event, steps)).get_epsilon(left)
        assert any_order * 0.97 <= proven + claim.epsilon_addition <= any_order * (1 + 1e-6)
        expected = proven if claim.proven else paper
        assert claim.proven == (plan.training.accounting == "any-order")
    else:
        sensitivity, norm = brute_sensitivity(plan)
        steps = epochs if plan.factorisation.kind == "identity" else plan.schedule.num_steps
        total = sensitivity * contribution + norm * grid * math.sqrt(steps)
        assert total <= claim.sensitivity * (1 + 1e-9)
        assert claim.sensitivity <= 1.2 * total + 3 * norm * grid * math.sqrt(steps)  # the Gram bound may be loose
        expected = dp_accounting.get_epsilon_gaussian(std / claim.sensitivity, left)
    assert expected + claim.epsilon_addition == pytest.approx(claim.epsilon, rel=1e-3)
    assert expected + claim.epsilon_addition <= claim.epsilon * (1 + 1e-6)
    assert 0 <= claim.slack_delta < claim.delta


# accepted and refused ----------------------------------------------------------------------------


def check_accepted(drawn: Drawn, plan: Plan, federation: Federation, directory: Any) -> None:
    rng, gamma = np.random.default_rng(0), plan.training.clip_norm
    if isinstance(plan, LayerPlan):
        check_claim(plan, plan.adapters.clip_rounding)
        check_joint(plan)
        return
    check_claim(plan, plan.scales.clip_rounding)
    rows = worst_rows(plan, rng)
    for layers in extreme_weights(plan, rng):
        found = contributions(plan, rows, layers)
        assert found.max(initial=0.0) <= gamma + plan.scales.clip_rounding
        if plan.scales.norm_limit is not None:  # those beyond the limit wrap around and count nothing
            found = contributions(plan, rows, layers, check_ranges=False)
            assert found.max() <= gamma + plan.scales.clip_rounding
    if plan.opens_sums and plan.training.gradients == "factored":
        check_every_way(plan, rows, rng)
    extreme_step(plan, rows, extreme_weights(plan, rng)[-1 if plan.training.hidden else 0])
    in_any_order = drawn.protocol == "g_bmf" or plan.schedule.num_batches == 1
    if plan.training.noise == "distributed" and in_any_order:
        servers = g_bmf.servers if drawn.protocol == "g_bmf" else g_shuff.servers
        result = run_secure(plan, federation, directory, servers)
        layers, gaps = twin_and_bound(plan, federation, noise_of_the_servers(plan, directory))
        for layer, ours, gap in zip(layers, released(result), gaps, strict=True):
            assert np.linalg.norm(ours - layer) <= gap


def check_every_way(plan: Plan, rows: np.ndarray, rng: np.random.Generator) -> None:
    """At weights of every size within the bounds a step keeps the clip; beyond them there is no step. With waves there
    is one at the start and wherever gradients have room; behind that the run ends with a sentence."""
    largest = plan.training.clip_norm + plan.scales.clip_rounding
    models = extreme_weights(plan, rng)
    if plan.training.hidden:
        models += [[layer * 10.0**-power for layer in models[-1]] for power in (1, 3)]
    for layers in models:  # the start is the first
        assert open_contributions(plan, rows, layers).max() <= largest
    if plan.scales.smooth is not None:
        for layers in plausible_weights(plan, rng)[1:]:
            try:
                assert open_contributions(plan, rows, layers).max() <= largest
            except refmpc.PartyFailed as refusal:
                ended = r"weights = '(gradients|logits) up to .*': must be .* the training diverges: lower the learning"
                assert re.search(ended, str(refusal)), refusal
    for place, limit in enumerate(largest_weights(plan)):
        beyond = [np.array(layer) for layer in models[0]]
        beyond[place][0, 0] = 1.01 * limit
        with pytest.raises(refmpc.PartyFailed, match=f"layer {place} of the model has a"):
            open_contributions(plan, rows, beyond)


def check_joint(plan: LayerPlan) -> None:
    """GL-BMF: all factors at their bounds, rows of every length; one step is the float gradient on the same
    integers."""
    gamma, batch = plan.training.clip_norm, plan.schedule.batch_size
    lengths = np.exp2(-np.arange(batch) / 2)[:, None]
    weight_norm = 0.98 * min(plan.adapters.weight_bound, plan.scales.logit_bound / plan.scales.layers[0].reach)
    releases = {"test": "a test, no claim"}
    if plan.training.gradients == "explicit":
        rng, scales = np.random.default_rng(1), plan.adapters
        rows, weights = worst_rows(plan, rng, batch + 4)[:batch, :-1], rng.normal(size=(plan.width + 1, plan.classes))
        weights = on_grid(weights * weight_norm / np.linalg.norm(weights), scales.block_bits)
        jacobians = []
        for shape in plan.shapes:
            whole = rng.normal(size=(batch, shape.width, shape.parameters))
            whole *= (
                0.99
                * scales.bounds.jacobian
                * lengths[:, :, None]
                / np.linalg.norm(whole, 2, axis=(1, 2))[:, None, None]
            )
            jacobians.append(on_grid(whole, scales.jacobian_bits))
        explicit = rows, rng.integers(0, plan.classes, batch), weights, jacobians
        result = checked(test_gl_jacobians.clip_only, (plan, explicit), releases)
        factor, *samples = result.outputs[0]
        norms = np.sqrt(sum((each**2).sum(axis=1) for each in samples))
        assert (factor[:, 0] * norms).max() <= gamma
        return
    inputs = make_inputs(plan, weight_norm, 1)
    for index in range(len(plan.shapes)):
        bounds, own = plan.adapters.bounds, inputs.projected[index]
        own = own * (0.99 * bounds.projected * lengths / np.linalg.norm(own, axis=1, keepdims=True))
        inputs.projected[index] = on_grid(own, plan.adapters.projected_bits)
        up = inputs.up[index] * 0.99 * bounds.up / np.linalg.norm(inputs.up[index])
        inputs.up[index] = on_grid(up, plan.adapters.up_bits)
        inputs.row_factors[index][:] = bounds.row_factor
    inputs.rows = on_grid(worst_rows(plan, np.random.default_rng(2), batch + 4)[:batch, :-1], EMBEDDING_BITS)
    result = checked(test_gl_step.clip_only, (plan, inputs), releases)
    ratio, _ = test_gl_step.clip_ratio(plan, inputs, result.outputs[0])
    assert ratio.max() <= 1.0
    if plan.training.weight_decay == 1.0:  # the sum is read from the change of W
        found, _ = secure_sum(plan, inputs)
        bound = step_bound(plan, inputs)
        assert np.linalg.norm(found - test_gl_step.float_sum(plan, inputs)) <= bound


def checked(program: Any, job: Any, releases: dict[str, str]) -> refmpc.RunResult:
    with pytest.warns(UserWarning, match="insecure_"):
        return refmpc.run(program, [job] * 3, releases=releases, insecure_check_ranges=True, timeout=60)


def check_configuration(drawn: Drawn, directory: Any) -> str:
    try:
        plan, federation = drawn.plan()
    except ValueError as refusal:
        sentence = str(refusal)
        assert re.match(r"[\w :]+ = .+: must be .+", sentence), sentence
        assert any(name in sentence for name in OPTIONS), sentence
        return "refused"
    check_accepted(drawn, plan, federation, directory)
    return "accepted"


def run_many(protocol: str, examples: int, number: int, tmp_path_factory: Any) -> Counter[str]:
    seen: Counter[str] = Counter()

    @seed(number)
    @settings(max_examples=examples, derandomize=False)
    @given(configurations(protocol))
    def every_configuration(drawn: Drawn) -> None:
        seen[check_configuration(drawn, tmp_path_factory.mktemp("run"))] += 1

    every_configuration()
    return seen


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_accepted_configuration_keeps_its_claim(tmp_path_factory, protocol):
    seen = run_many(protocol, 10, 1, tmp_path_factory)
    assert seen["accepted"] >= 4, seen


@st.composite
def hidden_layers(draw: Any) -> Drawn:
    """One hidden layer, open weights, runs so long that weights may grow out of the short step."""
    row_bound = draw(powers(-1, 3))
    clip_norm, epochs, batches = row_bound * draw(powers(-2.5, 0.7)), draw(st.integers(1, 30)), draw(st.integers(1, 20))
    momentum = draw(st.sampled_from([0.0, 0.9]))
    found = {
        "row-bound": row_bound,
        "clip-norm": clip_norm,
        "learning-rate": draw(powers(0, 5))
        * (1 - momentum)
        / (math.hypot(row_bound, 1.0) * clip_norm * epochs * batches),
        "epochs": epochs,
        "momentum": momentum,
        "batch-size": draw(st.sampled_from([1, 8])),
        "epsilon": draw(powers(-0.7, 1.3)),
        "hidden": draw(st.sampled_from([2, 5, 32])),
    }
    arguments = tuple(f"--{name}={value}" for name, value in found.items())
    return Drawn("g_bmf", arguments, batches, (3, 4), draw(st.integers(2, 11)))


def check_ways(examples: int, number: int) -> Counter[str]:
    seen: Counter[str] = Counter()

    @seed(number)
    @settings(max_examples=examples, derandomize=False)
    @example(SHORT_OF_BITS)
    @given(hidden_layers())
    def every_configuration(drawn: Drawn) -> None:
        try:
            plan, _ = drawn.plan()
        except ValueError:
            seen["refused"] += 1
            return
        seen["accepted"] += 1
        rng = np.random.default_rng(0)
        check_every_way(plan, worst_rows(plan, rng), rng)

    every_configuration()
    return seen


def test_a_step_keeps_the_clip_on_every_way_that_weights_may_lead_it():
    assert check_ways(3, 1)["accepted"] >= 2


@pytest.mark.heavy
@pytest.mark.parametrize("number", range(2, 10))
def test_many_more_steps_keep_the_clip_on_every_way(number):
    assert check_ways(25, number)["accepted"] >= 12


@pytest.mark.heavy
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("number", range(2, 6))
def test_many_more_configurations_keep_their_claim(tmp_path_factory, protocol, number):
    seen = run_many(protocol, 100, number, tmp_path_factory)
    assert seen["accepted"] >= 20 and seen["refused"] >= 5, seen
