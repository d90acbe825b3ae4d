"""Estimating the clipped per-sample gradients from one released, noised layer gradient (paper, Eq. 6 and 8).

The client knows A, X, U of its layer and receives

    Y_U = s·QᵀA + noise,      Y_V = s·(Q U)ᵀX + noise,      Q = Ĝ/B   (B × d_i),

where row j of Ĝ is the clipped gradient of sample j at the embedding. Estimates are of **Q = Ĝ/B**, which is
what gradient descent needs; the paper's formula calls it Ĝ (proofs §8.3). Kronecker structure makes ridge an
r×r solve for U alone and r solves of size B×B for U and V together; nothing of size d_i·B is ever formed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.sparse.linalg import LinearOperator, lsqr

from accel.validate import require, require_choice, require_real

__all__ = [
    "ErrorBound",
    "dense_system",
    "error_bound",
    "estimate_from_jacobian",
    "estimate_per_sample_gradients",
    "regulariser",
]

Floats = npt.NDArray[np.floating]


def regulariser(
    rule: str | float,
    *,
    noise_std: float,
    noise_row_norm: float = 1.0,
    prior_variance: float | None = None,
) -> float:
    """λ of the ridge estimate for one step.

    ``noise_std`` is the standard deviation of the noise *really present* in the released mean gradient at
    this step (σ_t/B; under `distributed` noise it contains the factor √1.5).

    "noise"  its variance, as the paper's text says ("λ = noise variance"). This presumes unit prior variance.
    "paper"  what the paper's experiments print: (σγ·sens·‖Ω⁻¹[t,:]‖²/B)². The row norm enters squared, so
             the variance is multiplied once more by ``noise_row_norm``².
    "mmse"   variance / ``prior_variance``: the linear MMSE estimate when Q has that variance per entry.
    a number λ itself.
    """
    require_real("noise_std", noise_std, 0.0)
    if not isinstance(rule, str):
        return require_real("lambda", rule, 0.0)
    require_choice("lambda", rule, ("noise", "paper", "mmse"), way_out="or give a number")
    if rule == "noise":
        return noise_std**2
    if rule == "paper":
        return (noise_std * require_real("noise_row_norm", noise_row_norm, 0.0)) ** 2
    require(prior_variance is not None, "prior_variance", None, "a positive number for lambda='mmse'")
    return noise_std**2 / require_real("prior_variance", prior_variance, 0.0, open_low=True)


def estimate_per_sample_gradients(
    released_up: Floats,
    released_down: Floats | None,
    projected: Floats,
    inputs: Floats,
    up: Floats,
    scale: float,
    *,
    estimator: str = "ridge",
    regularisation: float = 0.0,
    solver: str = "direct",
) -> Floats:
    """Q = Ĝ/B (B×d_i) from Y_U (d_i×r) and, unless None, Y_V (r×m).

    ``estimator``: "ls" (least squares of smallest norm; ``regularisation`` is ignored), "ridge" or "mmse"
    (the same formula; λ comes from ``regulariser``). ``solver``: "direct", or "lsqr" (matrix-free).
    """
    require_choice("estimator", estimator, ("ls", "ridge", "mmse"))
    require_choice("solver", solver, ("direct", "lsqr"))
    width, rank = up.shape
    require(released_up.shape == (width, rank), "released_up", released_up.shape, f"of shape {(width, rank)}")
    damping = 0.0 if estimator == "ls" else require_real("regularisation", regularisation, 0.0)
    if solver == "lsqr":
        return _lsqr(released_up, released_down, projected, inputs, up, scale, damping)
    a = scale * projected
    right_up = released_up.T
    if released_down is None:
        return _solve_thin(a, damping, right_up)
    # (aaᵀ + λ)Q + s²·XXᵀ·Q·UUᵀ = a·Y_Uᵀ + s·X·Y_Vᵀ·Uᵀ. In the left singular vectors of U the columns of Q
    # separate: the d_i − r directions orthogonal to U see U's equations only; direction k sees the factor
    # [a, σ_k·s·X].
    left, singular, right_t = np.linalg.svd(up, full_matrices=False)
    along = right_up @ left
    estimate = _solve_thin(a, damping, right_up - along @ left.T)
    for k, value in enumerate(singular):
        factor = np.concatenate([a, value * scale * inputs], axis=1)
        observed = np.concatenate([along[:, k], released_down.T @ right_t[k]])
        estimate = estimate + np.outer(_solve_thin(factor, damping, observed), left[:, k])
    return estimate


def _solve_thin(factor: Floats, damping: float, observed: Floats) -> Floats:
    """F(FᵀF + λI)⁻¹·y = (FFᵀ + λI)⁻¹F·y by the smaller of the two systems; pinv(Fᵀ)·y for λ = 0."""
    rows, columns = factor.shape
    if damping == 0.0:
        return np.linalg.pinv(factor.T) @ observed
    if columns <= rows:
        return factor @ np.linalg.solve(factor.T @ factor + damping * np.eye(columns), observed)
    return np.linalg.solve(factor @ factor.T + damping * np.eye(rows), factor @ observed)


def _lsqr(
    released_up: Floats,
    released_down: Floats | None,
    projected: Floats,
    inputs: Floats,
    up: Floats,
    scale: float,
    damping: float,
) -> Floats:
    width, rank = up.shape
    batch, m = inputs.shape

    def forward(q: Floats) -> Floats:
        gradient = q.reshape(batch, width)
        parts = [scale * (gradient.T @ projected).ravel()]
        if released_down is not None:
            parts.append(scale * ((gradient @ up).T @ inputs).ravel())
        return np.concatenate(parts)

    def adjoint(y: Floats) -> Floats:
        out = scale * (projected @ y[: width * rank].reshape(width, rank).T)
        if released_down is not None:
            out = out + scale * ((inputs @ y[width * rank :].reshape(rank, m).T) @ up.T)
        return out.ravel()

    right = released_up.ravel()
    if released_down is not None:
        right = np.concatenate([right, released_down.ravel()])
    operator = LinearOperator((len(right), batch * width), matvec=forward, rmatvec=adjoint, dtype=np.float64)
    solved = lsqr(operator, right, damp=damping**0.5, atol=1e-13, btol=1e-13, iter_lim=20_000)[0]
    return solved.reshape(batch, width)


def estimate_from_jacobian(
    released: Floats, jacobian: Floats, *, estimator: str = "ridge", regularisation: float = 0.0
) -> Floats:
    """Q = Ĝ/B for any layer, from its released gradient (n_L,) and its Jacobians (B, d_i, n_L).

    Solves the smaller of the systems n_L and B·d_i; for layers of thousands of parameters use LoRA's factors.
    """
    require_choice("estimator", estimator, ("ls", "ridge", "mmse"))
    batch, width, count = jacobian.shape
    require(released.shape == (count,), "released", released.shape, f"of shape ({count},)")
    damping = 0.0 if estimator == "ls" else require_real("regularisation", regularisation, 0.0)
    # released = Σ_{j,d} Q[j,d]·J[j,d,:]: the factor of the observations is F = J as a (B·d_i, n_L) matrix.
    return _solve_thin(jacobian.reshape(batch * width, count), damping, released).reshape(batch, width)


def dense_system(projected: Floats, inputs: Floats, up: Floats, scale: float, *, with_down: bool) -> Floats:
    """The matrix of Eq. 6 written out, (n_L, B·d_i): for tests on small sizes."""
    width, rank = up.shape
    rows = [scale * np.einsum("de,jr->drje", np.eye(width), projected).reshape(width * rank, -1)]
    if with_down:
        m = inputs.shape[1]
        rows.append(scale * np.einsum("er,jm->rmje", up, inputs).reshape(rank * m, -1))
    return np.concatenate(rows)


@dataclass(frozen=True)
class ErrorBound:
    """What can be said about E‖Q̂ − Q‖² before the release arrives; Q = Ĝ/B.

    ``paper`` is the paper's Eq. 9, in its own units (it bounds ‖Ĝ‖ by γ, which the clip does not imply, and
    mixes Ĝ with Ĝ/B): a trend to watch, not a bound. ``variance`` is exact; ``bias`` holds for
    ‖Q‖ ≤ ``signal_bound``. ``bound`` is their sum.
    """

    paper: float
    bias: float
    variance: float
    largest_eigenvalue: float

    @property
    def bound(self) -> float:
        return self.bias + self.variance


def error_bound(
    projected: Floats,
    inputs: Floats,
    up: Floats,
    scale: float,
    *,
    with_down: bool,
    noise_std: float,
    regularisation: float,
    clip_norm: float,
    signal_bound: float,
) -> ErrorBound:
    """The error of the ridge estimate at this step, from quantities the client has (paper, appendix).

    ``noise_std`` is that of the released mean gradient, σ_t/B. With fewer equations than unknowns (r < B)
    the smallest eigenvalue is 0 and the bias bound is ``signal_bound``².
    """
    require_real("clip_norm", clip_norm, 0.0, open_low=True)
    batch, width = projected.shape[0], up.shape[0]
    a = scale * projected
    spectra: list[tuple[int, Floats]] = []
    values = np.linalg.svd(up, compute_uv=False) if with_down else np.zeros(0)
    for value in values:
        spectra.append((1, _spectrum(np.concatenate([a, value * scale * inputs], axis=1))))
    spectra.append((width - len(values), _spectrum(a)))
    spectra = [(count, mu) for count, mu in spectra if count > 0]
    smallest = min(float(mu[0]) for _, mu in spectra)
    largest = max(float(mu[-1]) for _, mu in spectra)
    variance_of_noise, lam = noise_std**2, max(regularisation, np.finfo(float).tiny)
    variance = variance_of_noise * sum(c * float(np.sum(mu / (mu + lam) ** 2)) for c, mu in spectra)
    bias = (lam / (smallest + lam)) ** 2 * signal_bound**2
    sigma_t = noise_std * batch
    top = sigma_t**4 * clip_norm**2 + sigma_t**2 * width * batch**3 * largest
    bottom = (batch**2 * smallest + sigma_t**2) ** 2
    paper = top / bottom if bottom > 0 else float("inf")
    return ErrorBound(paper, bias, variance, largest)


def _spectrum(factor: Floats) -> Floats:
    """Eigenvalues of FFᵀ (B of them), ascending."""
    values = np.linalg.svd(factor, compute_uv=False) ** 2
    return np.concatenate([np.zeros(max(0, len(factor) - len(values))), values[::-1]])
