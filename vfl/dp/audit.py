"""Empirical audit: attack the noise that really runs, and bound ε from below by what the attack achieves.

The exact sampler, the integer taps (or the recursion), the sum of the two honest servers and the
truncation run on two neighbouring worst-case streams: a canary of norm γ in every participation, or
nothing. The attacker sees all releases and applies the optimal linear test (matched filter in the
coordinates of Ω̂). Each column is one independent trial.

The bound is free of distributional assumptions: the threshold is chosen on one half of the trials;
Clopper–Pearson limits on the other half give ε ≥ ln((TPR − δ)/FPR) with the stated confidence. It must
stay below the claim, and must exceed it when the noise is halved on purpose: an audit that cannot fail
shows nothing.

``python -m vfl.dp.audit`` runs both directions; with ``--protocol g_bmf`` (or g_shuff, gl_bmf) on the whole protocol,
on shares: see ``vfl.dp.protocol_audit``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from accel.errors import PpvflError
from accel.gaussian import GridGaussian
from accel.prg import KEY_BYTES, Stream
from accel.validate import require_integer, require_real
from vfl.dp import protocol_audit
from vfl.dp.factorisation import KINDS, Factorisation, factorise
from vfl.dp.filter import NoiseFilter
from vfl.dp.lower_bound import epsilon_lower_bound
from vfl.dp.mechanism import CalibratedNoise, calibrate_matrix_factorisation
from vfl.dp.slack import FixedPointSlack

__all__ = ["AuditResult", "attack_scores", "audit", "epsilon_lower_bound", "main"]

_RELEASE_BITS = 12  # f_y: what is released keeps 12 fractional bits
_COLUMNS = 1 << 14


@dataclass(frozen=True)
class AuditResult:
    """A claim and what an attack on the running mechanism proves about it, with the given confidence."""

    mechanism: str
    claimed_epsilon: float
    delta: float
    noise_scale: float  # 1: as calibrated; 0.5: halved on purpose
    trials: int
    confidence: float
    epsilon_lower_bound: float
    false_positive_rate: float
    true_positive_rate: float

    @property
    def within_claim(self) -> bool:
        """Whether the attack left the claim standing."""
        return self.epsilon_lower_bound <= self.claimed_epsilon


def audit(
    factorisation: Factorisation,
    max_participations: int,
    min_separation: int,
    *,
    epsilon: float,
    delta: float,
    clip_norm: float = 1.0,
    trials: int = 1_000_000,
    noise_scale: float = 1.0,
    confidence: float = 0.999,
    key: bytes | None = None,
    progress: Callable[[int], None] | None = None,
) -> AuditResult:
    """Calibrate for (ε, δ), run ``trials`` canaries and as many empty runs with noise times
    ``noise_scale``, attack.

    Cost: 4·steps·trials samples (about a second per 10^7). ``key`` makes the run repeatable; fresh when
    not given. A δ of 10^-3 makes the audit sharpest: the events that decide must be seen often enough.
    """
    require_integer("trials", trials, 1000)
    require_real("noise_scale", noise_scale, 0, open_low=True)
    require_real("confidence", confidence, 0.5, 1, open_high=True)
    slack = FixedPointSlack(
        row_bound=1.0, classes=1, width=1, coordinates=1, steps=factorisation.num_steps, batch_size=16
    )
    noise = calibrate_matrix_factorisation(
        epsilon, delta, clip_norm, factorisation, max_participations, min_separation, slack
    )
    key = secrets.token_bytes(KEY_BYTES) if key is None else key
    scores = []
    for world, canary in enumerate((0.0, clip_norm)):
        gradients = np.zeros(factorisation.num_steps)
        gradients[: max_participations * min_separation : min_separation] = canary
        direction = np.zeros_like(gradients)
        direction[: max_participations * min_separation : min_separation] = 1.0
        streams = [Stream(key, bytes([world, server, 0, 0, 0, 0, 0, 0])) for server in range(3)]
        scores.append(attack_scores(factorisation, noise, gradients, direction, trials, streams, noise_scale, progress))
    bound, false_positive, true_positive = epsilon_lower_bound(scores[0], scores[1], delta, confidence)
    return AuditResult(
        noise.claim.mechanism,
        epsilon,
        delta,
        noise_scale,
        trials,
        confidence,
        bound,
        false_positive,
        true_positive,
    )


def attack_scores(
    factorisation: Factorisation,
    noise: CalibratedNoise,
    gradients: np.ndarray,
    direction: np.ndarray,
    trials: int,
    streams: list[Stream],
    noise_scale: float = 1.0,
    progress: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Matched-filter score of each trial: run the integer mechanism on the stream ``gradients`` (one
    coordinate).

    Streams 0 and 1 are the honest servers' noise; stream 2 gives the low bits that the truncation's mask
    adds. The corrupted server's own noise is a constant to it, so it is left out.
    """
    steps = factorisation.num_steps
    scale_bits = noise.noise_bits + factorisation.tap_bits
    cut = scale_bits - _RELEASE_BITS
    signal = np.round(gradients * 2.0**scale_bits).astype(np.int64)[:, None]
    strategy = factorisation.strategy_coefficients()
    encoded = np.convolve(strategy, direction)[:steps]
    weights = np.convolve(strategy, encoded[::-1])[:steps][::-1] / np.linalg.norm(encoded)  # Ω̂ᵀΩ̂·direction
    sampler = GridGaussian(noise.server_std_in_grid_units * noise_scale)
    scores = np.empty(trials)
    for left in range(0, trials, _COLUMNS):
        columns = min(_COLUMNS, trials - left)
        filtered = np.zeros((steps, columns), dtype=np.int64)
        for honest in streams[:2]:
            z = sampler.sample(honest, steps * columns).reshape(steps, columns)
            filtered += NoiseFilter(factorisation, columns).next_block(z)
        mask = (streams[2].words(steps * columns) >> np.uint64(64 - cut)).astype(np.int64)
        released = (signal + filtered + mask.reshape(steps, columns)) >> cut
        scores[left : left + columns] = weights @ (released * 2.0**-_RELEASE_BITS)
        if progress is not None:
            progress(columns)
    return scores


def main(arguments: list[str] | None = None) -> int:
    """Both directions on the command line; exit status 1 when either comes out wrong."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table

    parser = argparse.ArgumentParser(prog="python -m vfl.dp.audit", description="Attack the running noise path.")
    parser.add_argument("--protocol", help="audit a whole protocol on shares: g_bmf, g_shuff or gl_bmf")
    parser.add_argument("--mechanism", choices=KINDS, default="bisr", help="audit the noise of a mechanism alone")
    parser.add_argument("--epsilon", type=float, help="default 1, or 2 for a protocol")
    parser.add_argument(
        "--delta", type=float, help="default 0.001, or 0.01 for a protocol: large δ are audited sharply"
    )
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--bands", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batches", type=int, default=8, help="batches per epoch")
    parser.add_argument("--trials", type=int, help="default 1,000,000, or 10,000 canaries for a protocol")
    parser.add_argument("--confidence", type=float, default=0.999)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args(arguments)
    console = Console(stderr=options.json)
    if options.protocol is not None:
        for name in ("mechanism", "momentum", "bands", "epochs", "batches"):
            if getattr(options, name) != parser.get_default(name):
                parser.error(f"--{name} goes with the noise of a mechanism alone, not with --protocol")
        return protocol_audit.run_command(options, console)
    options.epsilon = 1.0 if options.epsilon is None else options.epsilon
    options.delta = 1e-3 if options.delta is None else options.delta
    options.trials = 1_000_000 if options.trials is None else options.trials
    try:
        factorisation = factorise(
            options.mechanism,
            options.epochs * options.batches,
            momentum=options.momentum,
            bands=None if options.mechanism == "identity" else options.bands,
            min_separation=options.batches,
        )
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        results = []
        with Progress(*columns, console=console, transient=True) as bar:
            for scale, label in ((1.0, "noise as calibrated"), (0.5, "noise halved on purpose")):
                task = bar.add_task(label, total=2 * options.trials)
                results.append(
                    audit(
                        factorisation,
                        options.epochs,
                        options.batches,
                        epsilon=options.epsilon,
                        delta=options.delta,
                        trials=options.trials,
                        noise_scale=scale,
                        confidence=options.confidence,
                        progress=lambda done, task=task: bar.advance(task, done),  # type: ignore[misc]
                    )
                )
    except PpvflError as error:
        console.print(f"[red]{error}")
        return 2
    as_wanted = results[0].within_claim and not results[1].within_claim
    if options.json:
        print(json.dumps({"as_wanted": as_wanted, "results": [dataclasses.asdict(r) for r in results]}))
        return 0 if as_wanted else 1
    title = f"{results[0].mechanism}: {factorisation.num_steps} steps, δ = {options.delta:g}"
    table = Table(title=title, caption=f"2 × {options.trials:,} trials, confidence {options.confidence:g}")
    for heading in ("noise", "claimed ε", "attack: ε ≥", "FPR", "TPR", "claim", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for result, wanted in zip(results, (True, False), strict=True):
        right = result.within_claim is wanted
        table.add_row(
            f"{result.noise_scale:g}×",
            f"{result.claimed_epsilon:g}",
            f"{result.epsilon_lower_bound:.3f}",
            f"{result.false_positive_rate:.1e}",
            f"{result.true_positive_rate:.1e}",
            "holds" if result.within_claim else "refuted",
            "[green]as it should" if right else "[red]WRONG",
        )
    console.print(table)
    console.print("The claim must hold with the calibrated noise and must be refuted with half of it.")
    return 0 if as_wanted else 1


if __name__ == "__main__":
    sys.exit(main())
