"""Runs that lose a participant at a chosen point."""

from __future__ import annotations

import pytest

import refmpc
from protocols.methods import g_bmf
from protocols.server.open_training import OpenTrainingRun
from protocols.server.training import ServerJob, TrainingRun
from tests.protocols.secure_runs import run_secure

__all__ = ["run_until_crash"]


def run_until_crash(plan, federation, directory, monkeypatch, crash_at, servers=g_bmf.servers, every=2):
    """The run with checkpoints every two steps, in which server-1 fails before step ``crash_at``."""
    kind = OpenTrainingRun if plan.opens_sums else TrainingRun
    real = kind.gradient_step

    async def failing(self, rows):
        if self.party.step == crash_at and self.party.id == 1:
            raise OSError("power cut")
        await real(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "gradient_step", failing)
        patch.setattr("tests.protocols.secure_runs.ServerJob", lambda plan, path, _: ServerJob(plan, path, every))
        with pytest.raises(refmpc.PartyFailed, match="server-1 failed: OSError: power cut"):
            run_secure(plan, federation, directory, servers)
