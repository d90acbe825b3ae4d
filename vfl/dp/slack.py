"""What fixed point costs: the sensitivity and the δ of the mechanism that runs, not of the one on paper.

Integer noise z through integer taps does not cover the grid: at scale f_z + g the low g bits of the first
release would be those of the data. Privacy comes from cutting m ≥ g bits afterwards, and from this
(proofs §6.2):

**Theorem.** x_t = G_t + Σ_k ω_k z_{t−k} (integers, ω_0 = 2^g), y_t = ⌊(x_t + s_t + a_t)/2^m⌋ with m ≥ g, s_t
independent of the data, a_t a function of y_{<t}. Releasing (y_t) is as private as one Gaussian mechanism
with noise z and sensitivity Δ = sens·γ' + ‖Ω̂‖·√(nT)·2^-f_z, γ' = γ + √S·√(R²+1)·2^-f_u.
If the gradients are finer than f_z + g by h bits (``noise_shift``), the taps are 2^h·ω_k: the same with g + h.

*Recursion* (bsr): each of two honest servers rounds for itself. A shift D of the release splits into
⌊D/2⌋ and ⌈D/2⌉, halves ±η, |η| ≤ 1/2, and each recursion adds a rounding difference of at most 1, so in
grid steps Δ = √((sens·γ' + w)² + w²) + 2√(nT), w = ‖Ω̂‖√(nT) (proofs §6.3).

*Two servers, one Gaussian.* For independent ζ, ζ' ~ N(0, s²) the law of round(ζ) + round(ζ') is, up to a
factor 1 ± 3·exp(−π²s²), that of N(0, 2s²) rounded stochastically to a neighbouring integer (Poisson
summation, for each pair of rounding offsets). Stochastic rounding commutes with integer shifts, so the
analytic Gaussian bound holds for the sum as it stands. At s ≥ 8 the factor is below 10^-270 and is not
carried further.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.stats import norm

from accel.gaussian import SAMPLER_DISTANCE
from accel.validate import require, require_integer, require_real

__all__ = ["DEFAULT_NOISE_BITS", "FixedPointSlack"]

DEFAULT_NOISE_BITS = 30

_ROUNDING_MARGIN = 1 + 1e-9  # covers the float64 rounding of sens and of the sums here


@dataclass(frozen=True)
class FixedPointSlack:
    """Public sizes of a run, and from them what its arithmetic adds to the sensitivity and to δ.

    ``width`` is the width d of the embeddings: a linear layer releases n = (d+1)·S coordinates; give
    ``coordinates`` for other models. ``clip_rounding`` replaces √S·√(R²+1)·2^-f_u when the clip is
    rounded elsewhere.
    """

    row_bound: float  # R, enforced by the clients
    classes: int
    width: int
    steps: int
    fraction_bits_u: int = 32
    noise_bits: int = DEFAULT_NOISE_BITS
    batch_size: int = 4096  # an upper bound: sizes |G| for the overflow probability
    momentum: float = 0.0  # β, if β·v is added before the truncation: sizes it too
    truncated_bits: int = 30  # m: bits cut after the noise went in; the theorem needs m ≥ tap_bits + noise_shift
    noise_shift: int = 0  # the noise is multiplied by 2^this, to the scale of the gradients
    value_bits: int = 62  # |noised value| < 2^62 is the domain of the truncation
    coordinates: int | None = None
    clip_rounding: float | None = None
    overflow_probability: float = 0.0  # of the protocol's other ranges (logits, weights), over the whole run
    slope_error: float = 0.0  # joint noise only (proofs §7.1): bound on |d/dz log(p̂/p)| in units of 1/std

    def __post_init__(self) -> None:
        require_real("row_bound", self.row_bound, 0, open_low=True, way_out="clients clip every row to it")
        for name in ("classes", "width", "steps", "batch_size"):
            require_integer(name, getattr(self, name), 1)
        require_integer("fraction_bits_u", self.fraction_bits_u, 1, 62)
        require_integer("noise_bits", self.noise_bits, 1, 46, way_out="30 keeps the grid slack near 10^-4")
        require_integer("value_bits", self.value_bits, 8, 63)
        require_integer("truncated_bits", self.truncated_bits, 0, 62)
        require_integer("noise_shift", self.noise_shift, 0, 30)
        require_real("momentum", self.momentum, 0, 1, open_high=True)
        if self.coordinates is not None:
            require_integer("coordinates", self.coordinates, 1)
        if self.clip_rounding is not None:
            require_real("clip_rounding", self.clip_rounding, 0)
        require_real("overflow_probability", self.overflow_probability, 0, 1)
        require_real("slope_error", self.slope_error, 0, 1)

    @property
    def released_coordinates(self) -> int:
        """n: coordinates of one release."""
        return (self.width + 1) * self.classes if self.coordinates is None else self.coordinates

    @property
    def clip_slack(self) -> float:
        """γ' − γ: how far rounding u = c·δ can push a clipped contribution over γ (worst case)."""
        if self.clip_rounding is not None:
            return self.clip_rounding
        return math.sqrt(self.classes) * math.hypot(self.row_bound, 1) * 2.0**-self.fraction_bits_u

    def grid_slack(self, strategy_norm: float, affected_steps: int | None = None) -> float:
        """‖Ω̂‖·√(n·steps)·2^-f_z; ``affected_steps`` is κ when Ω = 1 (other steps do not differ at all)."""
        steps = self.steps if affected_steps is None else affected_steps
        return strategy_norm * math.sqrt(self.released_coordinates * steps) * 2.0**-self.noise_bits

    def sensitivity(
        self,
        factorisation_sensitivity: float,
        clip_norm: float,
        *,
        strategy_norm: float,
        recursive: bool = False,
        affected_steps: int | None = None,
    ) -> float:
        """Δ of the theorem above: an upper bound, in the units of the gradients."""
        require_real("factorisation_sensitivity", factorisation_sensitivity, 0, open_low=True)
        require_real("clip_norm", clip_norm, 0, open_low=True)
        require_real("strategy_norm", strategy_norm, 1)
        data = factorisation_sensitivity * (clip_norm + self.clip_slack)
        grid = self.grid_slack(strategy_norm, affected_steps)
        total = data + grid
        if recursive:
            total = math.hypot(total, grid) + 2 * self.grid_slack(1.0, affected_steps)
        return total * _ROUNDING_MARGIN

    def noise_overflow(self, largest_noise_std: float, clip_norm: float, tap_bits: int) -> float:
        """Probability that some noised coordinate of the run leaves ±2^value_bits (union bound over n·T).

        What is truncated is v_t = βv_{t−1} + G_t + noise: sums of B clipped gradients and the roundings of earlier v
        count 1/(1−β) times, and ``largest_noise_std`` is that of the noise in v (``Factorisation.velocity_norm``).
        """
        gradient_bits = self.noise_bits + tap_bits + self.noise_shift
        bits = self.value_bits - gradient_bits
        rounding = 2.0 ** (self.truncated_bits - gradient_bits)
        sums = (self.batch_size * (clip_norm + self.clip_slack) + rounding) / (1 - self.momentum)
        room = 2.0**bits - sums
        require(
            room > 6 * largest_noise_std,
            "clip_norm",
            clip_norm,
            f"small enough that batch_size·clip_norm/(1 − momentum) = {sums:.4g} and noise of deviation"
            f" {largest_noise_std:.3g}, six times, fit 2^{bits:d}",
            "lower the clip norm and the row bound together, the batch size or the momentum, or raise epsilon",
        )
        tail = 2 * float(norm.sf(room / largest_noise_std))
        return min(1.0, self.released_coordinates * self.steps * tail)

    def statistical_distance(self, noise_overflow: float = 0.0) -> float:
        """Total variation between the run and the ideal mechanism: both honest samplers, overflows."""
        samples = 2 * self.released_coordinates * self.steps
        return samples * SAMPLER_DISTANCE + self.overflow_probability + noise_overflow

    def delta_addition(self, epsilon: float, noise_overflow: float = 0.0) -> float:
        """(1+e^ε)·distance: what the distance adds to δ."""
        distance = self.statistical_distance(noise_overflow)
        return (1 + math.exp(epsilon)) * distance

    def epsilon_addition(self, noise_multiplier: float, participations: int | None = None) -> float:
        """What an inexact joint sampler adds to ε (zero for the exact one): slope times the l1 norm of the shift.

        slope·√(nT)/σ when σ belongs to the whole run. With ``participations`` σ belongs to one step, which shifts by
        1/σ at most, n coordinates at a time: slope·κ·√n/σ.
        """
        if participations is not None:
            return self.slope_error * participations * math.sqrt(self.released_coordinates) / noise_multiplier
        return self.slope_error * math.sqrt(self.released_coordinates * self.steps) / noise_multiplier
