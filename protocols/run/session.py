"""A session: a plan, and where it runs. Every training on this machine goes through here, whoever asked for it.

    Session(plan, Where(parties="threads"), directory).fit(federation)

The commands, the estimators, the measurements of a calibration and the warm-up make a plan and a place; that is all in
which they differ.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import refmpc
from accel.validate import require
from protocols.methods.method import Jobs
from protocols.methods.registry import method
from protocols.plan.run_plan import Plan
from protocols.server.server_noise import insecure_total_noise
from protocols.settings import RunOptions
from protocols.state.checkpoint import ServerDirectory
from vfl.federation import Federation
from vfl.twins import TwinResult

__all__ = ["Session", "Trained", "Where", "train_twin"]


@dataclass(frozen=True)
class Where:
    """How the parties of a run on this machine run; names as in ``RunOptions``."""

    parties: str = "processes"
    network: str = "loopback"
    tls: bool = False
    timeout: float = 60.0
    checkpoint_every: int = 0
    synced: bool = True

    @classmethod
    def of(cls, options: RunOptions) -> Where:
        """As the command line says."""
        synced = options.durability == "power"
        return cls(options.parties, options.network, options.tls, options.timeout, options.checkpoint_every, synced)


@dataclass(frozen=True)
class Trained:
    """A model, the federation with what its clients have learnt, and the run that made them."""

    layers: list[np.ndarray]
    federation: Federation
    run: refmpc.RunResult


class Session:
    """``directory``: where servers and clients keep what is their own (default: a folder that is removed)."""

    def __init__(self, plan: Plan, where: Where, directory: Path | None = None):
        self.plan, self.where, self._directory = plan, where, directory
        self._method = method(plan.protocol)

    def fit(
        self,
        federation: Federation,
        on_report: Callable[[Any, dict[str, Any]], None] | None = None,
        *,
        resumes: bool = False,
    ) -> Trained:
        """Train. Everything that can be refused is refused before a value is shared. ``on_report``: called with what
        servers report."""
        keeps = self.where.checkpoint_every > 0
        require(
            keeps or not resumes or not self._method.stays,
            "resume",
            str(self._directory),
            "the directory of a run with --checkpoint-every",
            "without checkpoints its releases are not on disk, and releasing again would spend the claim twice",
        )
        run = self.play(self._method.client_jobs(self.plan, federation, self._directory if keeps else None), on_report)
        layers, trained = self._method.trained(self.plan, federation, run.client_outputs)
        return Trained(layers, trained, run)

    def play(self, jobs: Jobs, on_report: Callable[[Any, dict[str, Any]], None] | None = None) -> refmpc.RunResult:
        """The run itself, on what each client is given."""
        with contextlib.ExitStack() as stack:
            folder = self._directory or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ppvfl-")))
            return refmpc.run(
                self._method.servers,
                self._method.server_jobs(self.plan, folder, self.where.checkpoint_every, self.where.synced),
                parties=self.where.parties,
                clients={name: (self._method.client, job) for name, job in jobs.items()},
                network=self.where.network,
                releases=self.plan.releases,
                parameters=self.plan.public_parameters(),
                tls=self.where.tls,
                timeout=self.where.timeout,
                on_report=on_report,
            )

    def way_on(self) -> str:
        """What to do after a failure."""
        if self.where.checkpoint_every:
            return f"continue with: python -m protocols.{self.plan.protocol} --resume {self._directory}"
        if self._method.stays:
            return "it cannot be continued: only a run with --checkpoint-every keeps what it has released"
        return "start a new run; with --checkpoint-every it could be continued"

    def twin(self, federation: Federation) -> TwinResult:
        """The plaintext twin, given the servers' own noise, which lies on this machine until the run is finished. A
        secret order of every epoch, and joint noise, lie nowhere: then the twin draws its own."""
        noise = None
        if (
            self._method.twin_takes_noise
            and self.plan.training.noise != "joint"
            and all(folder.has_noise for folder in self._folders())
        ):
            streams = [folder.noise_stream(self.plan.fingerprint) for folder in self._folders()]
            noise = insecure_total_noise(self.plan, streams)
        return train_twin(self.plan, federation, noise)

    def forget_noise(self) -> None:
        """Remove the servers' noise keys when nothing is left to be computed, a twin included: whoever has the
        directory could repeat the noise."""
        for folder in self._folders():
            folder.forget_noise()

    def _folders(self) -> list[ServerDirectory]:
        assert self._directory is not None
        return [ServerDirectory(self._directory / f"server-{i}") for i in range(3)]


def train_twin(plan: Plan, federation: Federation, noise: Any = None) -> TwinResult:
    """Train in the clear what the plan says, with this noise or noise of its own."""
    return method(plan.protocol).twin(federation, plan.training, noise=noise, norm_limit=plan.scales.norm_limit)
