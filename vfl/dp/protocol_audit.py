"""What an audit of a whole protocol finds, and where auditors are: ``python -m vfl.dp.audit --protocol …``.

An auditor runs the protocol as it is, many canaries at once, and gives back one score for each: what a corrupted server
could compute of it after subtracting its own noise. Here the scores are held against the claim, in three ways: their
deviation must not be below that of the claimed noise, the shift by a canary not above the sensitivity, and the ε that
the best threshold proves (``epsilon_lower_bound``) not above the claimed one. Auditors live in packages above this one,
so they are found by name.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from scipy.stats import chi2, norm

from accel.errors import InvalidArgument, PpvflError
from accel.validate import require, require_integer, require_real
from vfl.dp.lower_bound import epsilon_lower_bound
from vfl.methods import SECURE

__all__ = ["AUDITORS", "ProtocolAudit", "ProtocolScores", "Scores", "find_auditor", "judge", "run_command"]

GROUP = "ppvfl.audits"  # the entry points of packages that bring an auditor of their own
# ours: also found where the package runs from its source and has no entry points
AUDITORS = dict.fromkeys(SECURE, "protocols.methods.audit:protocol_scores")
LEAST_TRIALS = 400


@dataclass(frozen=True)
class Scores:
    """Scores of all canaries: the score of each, and whether its record was there."""

    values: np.ndarray
    present: np.ndarray


@dataclass(frozen=True)
class ProtocolScores:
    """What an auditor gives back: the claim's figures, and scores in the units of the gradients.

    ``layer_deviation``: (claimed, found, count) of noise that was opened to clients; None where nothing is.
    """

    protocol: str
    claimed_epsilon: float
    delta: float
    allowed_shift: float
    claimed_deviation: float
    steps: int
    runs: int
    scores: Scores
    layer_deviation: tuple[float, float, int] | None = None


class Auditor(Protocol):
    """Run ``protocol`` until there are ``trials`` canaries, with noise times ``noise_scale``."""

    def __call__(
        self,
        protocol: str,
        *,
        epsilon: float,
        delta: float,
        trials: int,
        noise_scale: float,
        seed: int | None,
        progress: Callable[[int], None] | None,
    ) -> ProtocolScores: ...


@dataclass(frozen=True)
class ProtocolAudit:
    """The verdict; every bound holds with ``confidence``."""

    protocol: str
    noise_scale: float
    claimed_epsilon: float
    delta: float
    epsilon_lower_bound: float
    false_positive_rate: float
    true_positive_rate: float
    allowed_shift: float
    shift: float
    shift_lower_bound: float
    claimed_deviation: float
    deviation: float
    deviation_upper_bound: float
    trials: int
    runs: int
    steps: int
    confidence: float
    layer_deviation_ratio: float | None  # of noise opened to clients: found over claimed, at most

    @property
    def refutations(self) -> tuple[str, ...]:
        """What was found against the claim; empty if it stands."""
        found = []
        if self.epsilon_lower_bound > self.claimed_epsilon:
            found.append(f"ε is at least {self.epsilon_lower_bound:.3g}, not {self.claimed_epsilon:.3g}")
        if self.deviation_upper_bound < self.claimed_deviation:
            found.append(f"the noise deviates by {self.deviation:.4g}, not {self.claimed_deviation:.4g}")
        if self.shift_lower_bound > self.allowed_shift:
            found.append(f"a record shifts by {self.shift:.4g}, more than {self.allowed_shift:.4g}")
        if self.layer_deviation_ratio is not None and self.layer_deviation_ratio < 1:
            found.append(f"the noise opened to clients is {self.layer_deviation_ratio:.3g} of the claimed")
        return tuple(found)

    @property
    def within_claim(self) -> bool:
        """Whether the claim is left standing."""
        return not self.refutations


def find_auditor(protocol: str) -> Auditor:
    """The auditor of a protocol: an entry point of the group ``ppvfl.audits``, else ours by its module's name."""
    known = {point.name: point.value for point in importlib.metadata.entry_points(group=GROUP)}
    known = AUDITORS | known
    require(protocol in known, "protocol", protocol, f"one of {', '.join(sorted(known))}")
    module, function = known[protocol].split(":")
    try:
        return getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        raise InvalidArgument(
            f"protocol = {protocol!r}: needs the package {error.name!r}, which is not installed; install the "
            "whole of ppvfl, or audit the noise alone with --mechanism"
        ) from error


def judge(found: ProtocolScores, noise_scale: float, confidence: float) -> ProtocolAudit:
    """Hold scores against the claim. Each of the bounds may err with probability 1 − ``confidence``."""
    require_real("confidence", confidence, 0.5, 1, open_high=True)
    require(bool(np.isfinite(found.scores.values).all()), "scores", "not finite", "numbers: the auditor is at fault")
    absent, there = found.scores.values[~found.scores.present], found.scores.values[found.scores.present]
    require_integer("trials", min(len(absent), len(there)), LEAST_TRIALS // 4)
    error = 1 - confidence
    variance = (len(absent) * absent.var() + len(there) * there.var()) / (len(absent) + len(there) - 2)
    freedom = len(absent) + len(there) - 2
    deviation = math.sqrt(variance)
    shift = float(there.mean() - absent.mean())
    spread = deviation * math.sqrt(1 / len(absent) + 1 / len(there))
    bound, false_positive, true_positive = epsilon_lower_bound(absent, there, found.delta, confidence)
    layers = None
    if found.layer_deviation is not None:
        claimed, measured, count = found.layer_deviation
        layers = measured / claimed * math.sqrt((count - 1) / chi2.ppf(error, count - 1))
    return ProtocolAudit(
        protocol=found.protocol,
        noise_scale=noise_scale,
        claimed_epsilon=found.claimed_epsilon,
        delta=found.delta,
        epsilon_lower_bound=bound,
        false_positive_rate=false_positive,
        true_positive_rate=true_positive,
        allowed_shift=found.allowed_shift,
        shift=shift,
        shift_lower_bound=shift - float(norm.isf(error)) * spread,
        claimed_deviation=found.claimed_deviation,
        deviation=deviation,
        deviation_upper_bound=deviation * math.sqrt(freedom / chi2.ppf(error, freedom)),
        trials=len(found.scores.values),
        runs=found.runs,
        steps=found.steps,
        confidence=confidence,
        layer_deviation_ratio=layers,
    )


def run_command(options: argparse.Namespace, console: Console) -> int:
    """``--protocol``: with the calibrated noise and with half of it; exit status 1 when either comes out wrong."""
    epsilon = 2.0 if options.epsilon is None else options.epsilon
    delta = 1e-2 if options.delta is None else options.delta
    trials = 10_000 if options.trials is None else options.trials
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    results = []
    try:
        auditor = find_auditor(options.protocol)
        require_integer("trials", trials, LEAST_TRIALS)
        with Progress(*columns, console=console, transient=True) as bar:
            for scale, label in ((1.0, "noise as calibrated"), (0.5, "noise halved on purpose")):
                task = bar.add_task(f"{options.protocol}, {label}", total=trials)
                found = auditor(
                    options.protocol,
                    epsilon=epsilon,
                    delta=delta,
                    trials=trials,
                    noise_scale=scale,
                    seed=None,
                    progress=lambda done, task=task: bar.advance(task, done),  # type: ignore[misc]
                )
                results.append(judge(found, scale, options.confidence))
    except PpvflError as error:
        console.print(f"[red]{error}")
        return 2
    kept, halved = results
    as_wanted = kept.within_claim and not halved.within_claim
    if options.json:
        shown = [
            {**dataclasses.asdict(r), "within_claim": r.within_claim, "refutations": r.refutations} for r in results
        ]
        print(json.dumps({"as_wanted": as_wanted, "results": shown}))
    else:
        _print(results, console)
    return 0 if as_wanted else 1


def _print(results: Sequence[ProtocolAudit], console: Console) -> None:
    kept = results[0]
    title = f"{kept.protocol} on shares: {kept.steps} steps, claimed ε = {kept.claimed_epsilon:.4g}, δ = {kept.delta:g}"
    caption = (
        f"ε ≥: by the attack; {kept.trials:,} canaries in {kept.runs} runs, every bound with confidence "
        f"{kept.confidence:g}"
    )
    table = Table(title=title, caption=caption)
    for heading in ("noise", "ε ≥", "shift (allowed)", "deviation (claimed)", "claim", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for result, wanted in zip(results, (True, False), strict=True):
        table.add_row(
            f"{result.noise_scale:g}×",
            f"{result.epsilon_lower_bound:.3f}",
            f"{result.shift:.2f} ({result.allowed_shift:.2f})",
            f"{result.deviation:.2f} ({result.claimed_deviation:.2f})",
            "holds" if result.within_claim else "refuted",
            "[green]right" if result.within_claim is wanted else "[red]WRONG",
        )
    console.print(table)
    for result in results:
        for sentence in result.refutations:
            console.print(f"With {result.noise_scale:g}× the noise: {sentence}.")
    console.print("The claim must hold with the calibrated noise and must be refuted with half of it.")
