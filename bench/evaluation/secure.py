"""A cell trained by three real servers: processes over loopback, the released model's accuracy beside its twin's."""

from __future__ import annotations

import tempfile
from typing import Any

from rich.console import Console

from protocols.run.launch import launch
from protocols.settings import RunOptions
from vfl.federation import Federation
from vfl.training import TrainingConfig

__all__ = ["run_secure"]


def run_secure(cell: Any, federation: Federation, config: TrainingConfig) -> dict[str, Any]:
    """The twin gets the servers' own noise (G-BMF, GL-BMF), so that the two accuracies differ by rounding only; the
    secret order of G-Shuff lies nowhere, so its twin draws its own.
    """
    with tempfile.TemporaryDirectory(prefix="secure-") as folder:
        options = RunOptions(
            cell.method,
            config.with_(dtype="float64"),
            local_update=cell.variant if cell.method == "gl_bmf" else "released",
            twin=True,
            out=folder,
            timeout=300.0,
        )
        report = launch(options, federation, Console(stderr=True, quiet=True))
    phases = report.phases()
    return {
        "accuracy": report.accuracy,
        "twin_accuracy": report.twin_accuracy,
        "steps": report.plan.schedule.num_steps,
        "megabytes": sum(phase["bytes"] for phase in phases) / 1e6,
        "rounds": sum(phase["rounds"] for phase in phases),
        "run_seconds": report.seconds,
        "claimed_epsilon": report.plan.claim.epsilon,
        "proven": report.plan.claim.proven,
        "proven_epsilon": report.plan.claim.proven_epsilon,
        "presumes": report.plan.claim.unproven_because,
    }
