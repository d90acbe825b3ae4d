"""The differential-privacy engine: factorisations, calibration, slack, claims, budget and audit."""

from vfl.dp.baselines import calibrate_shuffled, example_level, ldp_claim, shuffled_claim, subsampled_claim
from vfl.dp.budget import BudgetExceededError, PrivacyBudget
from vfl.dp.calibration import (
    any_order_epsilon,
    any_order_sigma,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_sigma,
    opacus_epsilon,
    poisson_epsilon,
    poisson_sigma,
    zcdp_epsilon,
    zcdp_sigma,
)
from vfl.dp.claim import Claim, DeltaWarning, Figure, labels_only_claim, with_delta_checked
from vfl.dp.factorisation import KINDS, Factorisation, default_bands, factorise, workload_factorisation
from vfl.dp.filter import NoiseFilter, NoiseSource, sample_grid_gaussian
from vfl.dp.mechanism import (
    CalibratedNoise,
    NoiseSplit,
    calibrate_matrix_factorisation,
    matrix_factorisation_claim,
)
from vfl.dp.random_allocation.allocation import Padding, padding
from vfl.dp.secret_order import amplified_factorisation, calibrate_secret_order, for_one_row
from vfl.dp.sensitivity import Participation, Sensitivity, fixed_order, participation_sensitivity
from vfl.dp.slack import FixedPointSlack

__all__ = [
    "KINDS",
    "BudgetExceededError",
    "CalibratedNoise",
    "Claim",
    "DeltaWarning",
    "Factorisation",
    "Figure",
    "FixedPointSlack",
    "NoiseFilter",
    "NoiseSource",
    "NoiseSplit",
    "Padding",
    "Participation",
    "PrivacyBudget",
    "Sensitivity",
    "amplified_factorisation",
    "any_order_epsilon",
    "any_order_sigma",
    "calibrate_matrix_factorisation",
    "calibrate_secret_order",
    "calibrate_shuffled",
    "default_bands",
    "example_level",
    "factorise",
    "fixed_order",
    "for_one_row",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_sigma",
    "labels_only_claim",
    "ldp_claim",
    "matrix_factorisation_claim",
    "opacus_epsilon",
    "padding",
    "participation_sensitivity",
    "poisson_epsilon",
    "poisson_sigma",
    "sample_grid_gaussian",
    "shuffled_claim",
    "subsampled_claim",
    "with_delta_checked",
    "workload_factorisation",
    "zcdp_epsilon",
    "zcdp_sigma",
]
