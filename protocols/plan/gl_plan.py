"""The public plan of GL-BMF: shapes, noise and claim. The mathematics of its scales is in
``protocols.plan.gl_scales``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from accel.validate import require
from protocols.plan.combinations import refuse_combination
from protocols.plan.gl_scales import AdapterScales, FactorBounds, plan_layer_scales
from protocols.plan.gl_shapes import AdapterShape, JacobianShape, LayerFacts, public_facts
from protocols.plan.row_test import (
    FAULT_CLAIM,
    STEP_FAULT_CLAIM,
    NormTest,
    norm_test,
    step_release,
    upload_release,
)
from protocols.plan.run_plan import MODEL_RELEASE, Plan, own_bounds, with_receivers
from protocols.plan.scales import EMBEDDING_BITS, GRADIENT_BITS, RELEASE_BITS
from vfl.dp import CalibratedNoise, Claim, FixedPointSlack, labels_only_claim, with_delta_checked
from vfl.dp.claim import ROW_BOUND_CHECKED_IN_STEPS, ROW_BOUND_TRUSTED
from vfl.federation import Federation
from vfl.local.client import LocalUpdate
from vfl.methods import GL_BMF
from vfl.run_mechanism import calibrate_run, choose_factorisation, choose_schedule
from vfl.training import TrainingConfig

__all__ = [
    "EMBEDDINGS",
    "PROJECTED",
    "ROW_FACTORS",
    "UP",
    "LayerPlan",
    "block",
    "layer_release",
    "plan_from_facts",
    "plan_layer_run",
]

MOST_ENTRIES = 1 << 24
KEPT = "the clients keep"
EMBEDDINGS, PROJECTED, UP, ROW_FACTORS = (
    "embeddings",
    "projected",
    "up",
    "row factors",
)  # what a client shares in a step


def block(layer: int) -> str:
    """The name of the input of a client's layer among what it shares."""
    return f"block {layer}"


def layer_release(client: str) -> str:
    """The name of what a client is told in every step."""
    return f"layer gradient of {client}"


@dataclass(frozen=True)
class LayerPlan(Plan):
    """The plan of G-BMF, and what the clients' layers add to it."""

    shapes: tuple[AdapterShape | JacobianShape, ...]
    adapters: AdapterScales
    local_update: LocalUpdate
    layer_starts: tuple[str, ...]  # hashes of the clients' layers before the first step
    joint_claim: Claim

    @property
    def parameters(self) -> int:
        """Coordinates of one noise row: the global layer, then each client's shared layers."""
        return self.global_parameters + sum(shape.parameters for shape in self.shapes)

    @property
    def claim(self) -> Claim:
        return self.joint_claim

    def as_simulation(self) -> Self:
        """As of a ``Plan``; the claim is that of all layers."""
        return replace(super().as_simulation(), joint_claim=self.joint_claim.as_simulation())

    @property
    def releases(self) -> dict[str, str]:
        """One layer gradient per client and step, with open weights the global sums too, and the global model at the
        end, under one claim."""
        text = self.claim.paragraph()
        layers = {layer_release(name): text for name in self.client_names}
        tests = {step_release(name): STEP_FAULT_CLAIM for name in self.client_names if self.tests_steps}
        labels = {upload_release(self.client_names[-1]): FAULT_CLAIM} if self.tests_steps else {}
        return {MODEL_RELEASE: text} | self._sums_release | layers | tests | labels

    def public_parameters(self) -> dict[str, Any]:
        """What all participants compare before anything is shared."""
        return super().public_parameters() | {
            "adapters": str(self.adapters),
            "layers": str(self.shapes),
            "layer_starts": list(self.layer_starts),
            "local_update": str(self.local_update),
        }

    def step_tests(self, place: int) -> dict[str, NormTest | None]:
        """How the servers test what a client shares in a step: embeddings, and of LoRA layers their factors."""
        shape, rows, limits, scales = self.shapes[place], self.schedule.batch_size, self.adapters.bounds, self.adapters
        tests = {EMBEDDINGS: norm_test(rows, shape.width, self.client_bounds[place], EMBEDDING_BITS)}
        if not isinstance(shape, AdapterShape):
            return tests
        stacked, down = shape.stacked_rank, shape.with_down
        return (
            tests
            | {
                PROJECTED: norm_test(rows, stacked, limits.projected, scales.projected_bits),
                UP: norm_test(1, shape.width * stacked, limits.up, scales.up_bits),
                ROW_FACTORS: norm_test(rows, 1, limits.row_factor, scales.row_factor_bits),
            }
            | {
                block(i): norm_test(rows, w, limits.block, EMBEDDING_BITS)
                for i, w in enumerate(shape.block_widths)
                if down
            }
        )

    @property
    def tests_steps(self) -> bool:
        """Whether 64 bits are enough for all of these tests; otherwise clients are trusted, and the claim says so."""
        return all(test is not None for place in range(len(self.shapes)) for test in self.step_tests(place).values())

    def noise_slices(self) -> list[slice]:
        """Each client's part of a noise row."""
        found, start = [], self.global_parameters
        for shape in self.shapes:
            found.append(slice(start, start + shape.parameters))
            start += shape.parameters
        return found


def plan_layer_run(federation: Federation, training: TrainingConfig, bounds: FactorBounds | None = None) -> LayerPlan:
    """The plan for clients that are all on this machine."""
    return plan_from_facts(public_facts(federation), training, bounds)


def plan_from_facts(facts: LayerFacts, training: TrainingConfig, bounds: FactorBounds | None = None) -> LayerPlan:
    """Calibrate the noise with the slack of the arithmetic that will run, and choose all scales; or refuse."""
    refuse_combination(GL_BMF, training)
    schedule = choose_schedule(GL_BMF, training, facts.num_samples)
    shapes = tuple(client.shape(training.gradients) for client in facts.clients)
    for client, shape in zip(facts.clients, shapes, strict=True):
        entries = training.batch_size * shape.width * shape.parameters
        require(
            isinstance(shape, AdapterShape) or entries <= MOST_ENTRIES,
            f"{client.name}: entries of the Jacobians of a batch",
            entries,
            f"at most {MOST_ENTRIES}, 256 MB of shares at each server",
            "train a smaller layer, use smaller batches, or LoRA layers with factored gradients",
        )
    factorisation = choose_factorisation(GL_BMF, training, schedule)
    parameters = (facts.width + 1) * facts.classes + sum(shape.parameters for shape in shapes)

    def calibrate(row_bound: float, clip_rounding: float, overflow: float) -> CalibratedNoise:
        slack = FixedPointSlack(
            row_bound=row_bound,
            classes=facts.classes,
            width=facts.width,
            steps=schedule.num_steps,
            batch_size=training.batch_size,
            # with open weights β·v is public and not part of what is cut
            momentum=0.0 if training.weights == "open" else training.momentum,
            truncated_bits=GRADIENT_BITS - RELEASE_BITS,
            coordinates=parameters,
            clip_rounding=clip_rounding,
            overflow_probability=overflow,
        )
        return calibrate_run(GL_BMF, training, schedule, factorisation, slack)

    # the ranges depend on the noise, and the noise (a little) on the ranges: plan for 1 % more noise than was found
    noise = calibrate(facts.row_bound, 0.0, 0.0)
    for _ in range(4):
        planned_std = 1.01 * noise.outsider_std
        scales, adapters = plan_layer_scales(training, schedule, factorisation, facts, shapes, bounds, planned_std)
        noise = calibrate(scales.row_bound, adapters.clip_rounding, adapters.overflow_probability)
        if noise.outsider_std <= planned_std:
            break
    require(
        noise.outsider_std <= planned_std,
        "clip_norm",
        training.clip_norm,
        f"well above the rounding of a contribution, {adapters.clip_rounding:.3g}",
        "raise the clip norm, or lower the learning rate or the epochs",
    )
    claim = labels_only_claim(noise.claim) if facts.update.kind == "estimated" else noise.claim
    claim = with_delta_checked(claim, schedule.num_samples)
    claim = with_receivers(claim, training.weights, schedule.num_steps, of=" of the global layer")
    limits = adapters.bounds
    kept = []
    if any(isinstance(shape, AdapterShape) for shape in shapes):
        kept.append(
            f"their layer factors within public bounds (block outputs {limits.block:g}, projections "
            f"{limits.projected:g}, "
            f"U {limits.up:g}, row factor {limits.row_factor:g})"
        )
    if any(isinstance(shape, JacobianShape) for shape in shapes):
        kept.append(f"the Jacobians of their layers within a public bound ({limits.jacobian:g})")
    enforced = f"{KEPT} {' and '.join(kept)}"
    plan = LayerPlan(
        protocol=GL_BMF,
        training=training,
        schedule=schedule,
        factorisation=factorisation,
        noise=noise,
        scales=scales,
        client_names=tuple(client.name for client in facts.clients),
        client_widths=tuple(client.width for client in facts.clients),
        classes=facts.classes,
        shapes=shapes,
        adapters=adapters,
        local_update=facts.update,
        layer_starts=tuple(client.start for client in facts.clients),
        joint_claim=replace(claim, public=(*claim.public, enforced, *facts.public_inputs)),
        client_bounds=own_bounds([client.bound for client in facts.clients], facts.row_bound),
    )
    return replace(plan, joint_claim=_checked_claim(plan)) if plan.tests_steps else plan


def _checked_claim(plan: LayerPlan) -> Claim:
    """The servers test rows and factors in every step; Jacobians stay the clients' matter."""
    checked = {ROW_BOUND_TRUSTED: ROW_BOUND_CHECKED_IN_STEPS}
    if all(isinstance(shape, AdapterShape) for shape in plan.shapes):
        checked |= {
            text: f"{text}, which the servers check in every step (proofs §11.6)"
            for text in plan.claim.public
            if text.startswith(KEPT)
        }
    return replace(plan.claim, public=tuple(checked.get(text, text) for text in plan.claim.public))
