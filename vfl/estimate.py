"""Estimating the clipped per-sample gradients from one released, noised layer gradient (paper, Eq. 6 and 8).

The client knows A, X, U of its layer and receives

    Y_U = s·QᵀA + noise,      Y_V = s·(Q U)ᵀX + noise,      Q = Ĝ/B   (B × d_i),

where row j of Ĝ is the clipped gradient of sample j at the embedding. Estimates are of **Q = Ĝ/B**, which is
what gradient descent needs; the paper's formula calls it Ĝ (PROTOCOLS §7). Kronecker structure makes ridge an
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
    (the same formula; λ comes from ``regulariser``). ``solver``: "direct", or "lsqr" (matrix-free, iterative).
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
    # (aaᵀ + λ)Q + s²·XXᵀ·Q·UUᵀ = a·Y_Uᵀ + s·X·Y_Vᵀ·Uᵀ. In the eigenvectors P of UUᵀ the columns of QP separate:
    # the d_i − r directions orthogonal to U see U's equations only, the others one B×B system each.
    left, singular, _ = np.linalg.svd(up, full_matrices=False)
    estimate = _solve_thin(a, damping, right_up - (right_up @ left) @ left.T)
    right = a @ (right_up @ left) + scale * (inputs @ (released_down.T @ (up.T @ left)))
    gram_a, gram_x = a @ a.T, scale**2 * (inputs @ inputs.T)
    for k, value in enumerate(singular):
        system = gram_a + value**2 * gram_x
        column = _solve_square(system, damping, right[:, k])
        estimate = estimate + np.outer(column, left[:, k])
    return estimate


def _solve_thin(a: Floats, damping: float, right: Floats) -> Floats:
    """a(aᵀa + λI)⁻¹·right, or pinv(aᵀ)·right for λ = 0."""
    if damping == 0.0:
        return np.linalg.pinv(a.T) @ right
    return a @ np.linalg.solve(a.T @ a + damping * np.eye(a.shape[1]), right)


def _solve_square(system: Floats, damping: float, right: Floats) -> Floats:
    if damping == 0.0:
        return np.linalg.pinv(system, hermitian=True) @ right
    return np.linalg.solve(system + damping * np.eye(len(system)), right)


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
    smallest_eigenvalue: float
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
    gram = scale**2 * (projected @ projected.T)
    spectra: list[tuple[int, Floats]] = []
    if with_down:
        values = np.linalg.svd(up, compute_uv=False) ** 2
        gram_x = scale**2 * (inputs @ inputs.T)
        spectra += [(1, np.linalg.eigvalsh(gram + v * gram_x)) for v in values]
        spectra.append((width - len(values), np.linalg.eigvalsh(gram)))
    else:
        spectra.append((width, np.linalg.eigvalsh(gram)))
    spectra = [(count, np.maximum(mu, 0.0)) for count, mu in spectra if count > 0]
    smallest = min(float(mu[0]) for _, mu in spectra)
    largest = max(float(mu[-1]) for _, mu in spectra)
    variance_of_noise, lam = noise_std**2, max(regularisation, np.finfo(float).tiny)
    variance = variance_of_noise * sum(c * float(np.sum(mu / (mu + lam) ** 2)) for c, mu in spectra)
    bias = (lam / (smallest + lam)) ** 2 * signal_bound**2
    sigma_t = noise_std * batch
    top = sigma_t**4 * clip_norm**2 + sigma_t**2 * width * batch**3 * largest
    bottom = (batch**2 * smallest + sigma_t**2) ** 2
    paper = top / bottom if bottom > 0 else float("inf")
    return ErrorBound(paper, bias, variance, smallest, largest)
