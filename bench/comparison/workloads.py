"""The workloads that all systems run: inputs, the float64 result, and how far an answer is from it.

Inputs lie on a grid that every system represents exactly, so the error is that of the computation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from accel.validate import require
from bench.shapes import StepInputs, StepShape, on_grid, step_inputs
from vfl.gradients import GlobalModel, clipped_gradient, softmax

__all__ = ["Workload", "exact_step", "make_workload", "standard_workloads"]


@dataclass(frozen=True)
class Workload:
    """One row of the comparison. ``program`` and ``arguments`` name it in every system; ``exact`` is the float64
    answer, None where the answer is random (then ``error`` tests what can be tested)."""

    title: str
    program: str
    arguments: tuple[Any, ...]
    inputs: tuple[np.ndarray, ...]
    exact: np.ndarray | None
    shape: StepShape | None = None
    weights: str = "secret"  # of our training step; the peers' weights are secret always

    def error(self, values: np.ndarray) -> float:
        """Largest absolute error. Shuffled rows are compared in sorted order; of Gaussian samples the deviation from
        1 of the standard deviation."""
        if self.program == "gaussian":
            return abs(float(np.std(values)) - 1.0)
        assert self.exact is not None
        found = np.asarray(values, dtype=np.float64)
        require(found.size == self.exact.size, f"{self.title}: values", found.size, f"{self.exact.size} numbers")
        found = found.reshape(self.exact.shape)
        if self.program == "shuffle":
            return float(np.abs(_sorted_rows(found) - _sorted_rows(self.exact)).max())
        return float(np.abs(found - self.exact).max())


def _sorted_rows(rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort(rows.T[::-1])]


def exact_step(shape: StepShape, inputs: StepInputs) -> np.ndarray:
    """[W; b] after one step without noise, in float64."""
    model = GlobalModel([inputs.weights.copy()])
    labels = inputs.one_hot.argmax(axis=1)
    gradient = clipped_gradient(model, inputs.rows, labels, shape.clip_norm)
    return inputs.weights - shape.rate * gradient.total.reshape(inputs.weights.shape)


def make_workload(title: str, program: str, arguments: tuple[Any, ...], seed: int = 1) -> Workload:
    """The workload of a program for these sizes, on random inputs."""
    rng = np.random.default_rng(seed)
    if program == "step":
        method, shape = arguments
        inputs = step_inputs(shape, seed)
        arrays = inputs.rows, inputs.one_hot, inputs.norms, np.array([shape.clip_norm**-2.0]), inputs.weights
        sizes = method, shape.batch, shape.width + 1, shape.classes, shape.rate
        return Workload(title, program, sizes, arrays, exact_step(shape, inputs), shape)
    if program == "matmul":
        rows, inner, columns = arguments
        x, y = on_grid(rng.uniform(-4, 4, (rows, inner))), on_grid(rng.uniform(-4, 4, (inner, columns)))
        return Workload(title, program, arguments, (x, y), x @ y)
    if program == "softmax":
        logits = on_grid(rng.uniform(-6, 6, arguments))
        return Workload(title, program, arguments, (logits,), softmax(logits))
    if program == "shuffle":
        rows = on_grid(rng.uniform(-4, 4, arguments))
        return Workload(title, program, arguments, (rows,), rows)
    n = arguments[0]
    if program == "gaussian":
        return Workload(title, program, arguments, (), None)
    x = on_grid(rng.uniform(-4, 4, n))
    if program == "multiply":
        y = on_grid(rng.uniform(-4, 4, n))
        return Workload(title, program, arguments, (x, y), x * y)
    if program == "comparison":
        return Workload(title, program, arguments, (x,), (x < 0).astype(np.float64))
    if program == "relu":
        return Workload(title, program, arguments, (x,), np.maximum(x, 0))
    if program == "division":
        y = on_grid(np.exp(rng.uniform(np.log(0.5), np.log(100.0), n)))
        return Workload(title, program, arguments, (x, y), x / y)
    if program == "reciprocal":
        y = on_grid(np.exp(rng.uniform(np.log(0.01), np.log(250.0), n)))
        return Workload(title, program, arguments, (y,), 1 / y)
    if program == "inverse_sqrt":
        q = on_grid(np.exp(rng.uniform(np.log(0.1), np.log(1000.0), n)))
        return Workload(title, program, arguments, (q,), q**-0.5)
    if program == "clip_factor":
        q = on_grid(np.exp(rng.uniform(np.log(0.1), np.log(500.0), n)))
        return Workload(title, program, arguments, (q,), np.maximum(q, 1.0) ** -0.5)
    require(program == "exp", "program", program, "one of the workloads of this file")
    below = on_grid(rng.uniform(-12, 0, n))
    return Workload(title, program, arguments, (below,), np.exp(below))


def standard_workloads(quick: bool = False) -> list[Workload]:
    """The rows of ``bench.compare``; ``quick`` shrinks all sizes to a few seconds in all."""
    if quick:
        shape, many, some = StepShape(16, 40, 5, samples=1600, epochs=2), 2000, 500
    else:
        shape, many, some = StepShape(128, 2000, 10), 100_000, 10_000
    d, batch, classes = shape.width, shape.batch, shape.classes
    rows, columns = many // 20, 20
    step = f"B={batch}, d={d}, S={classes}"
    return [
        make_workload(f"{10 * many:,} fixed-point products", "multiply", (10 * many,)),
        make_workload(f"matmul {batch}×{d} · {d}×{classes}", "matmul", (batch, d, classes)),
        make_workload(f"matmul {d}×{batch} · {batch}×{classes}", "matmul", (d, batch, classes)),
        make_workload(f"{many:,} comparisons", "comparison", (many,)),
        make_workload(f"{many:,} comparisons and selections", "relu", (many,)),
        make_workload(f"{some:,} divisions", "division", (some,)),
        make_workload(f"{some:,} reciprocals", "reciprocal", (some,)),
        make_workload(f"{some:,} inverse square roots", "inverse_sqrt", (some, "fast")),
        make_workload(f"{some:,} clip factors", "clip_factor", (some,)),
        make_workload(f"{some:,} exponentials", "exp", (some,)),
        make_workload(f"softmax of {batch}×{classes}", "softmax", (batch, classes)),
        make_workload(f"shuffle of {rows:,}×{columns}", "shuffle", (rows, columns)),
        make_workload(f"{some:,} Gaussian samples", "gaussian", (some,)),
        make_workload(f"training step, factored ({step})", "step", ("factored", shape)),
        replace(
            make_workload(f"training step, factored, ours with open weights ({step})", "step", ("factored", shape)),
            weights="open",
        ),
        make_workload(f"training step, explicit ({step})", "step", ("explicit", shape)),
    ]
