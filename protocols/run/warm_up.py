"""The smallest training of its kind, in threads of this process and thrown away: afterwards its kernels are loaded.

Loading what numba has compiled before takes half a second to two seconds of a server's time; without this it happens in
the tests of the uploads and in the first step, while the others wait. Rows are zeros, files go into a folder that is
removed.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from protocols.client.upload import ClientJob
from protocols.plan.run_plan import PublicClient, PublicFederation, plan_run
from protocols.run.session import Session, Where
from vfl.methods import G_BMF
from vfl.training import TrainingConfig

__all__ = ["KINDS", "forget_earlier", "warm_up", "warm_up_everything"]

# trainings with other kernels, and their classes; all others, GL-BMF and predictions too, need no more than these
# together
KINDS = (
    (TrainingConfig(weights="open"), 3),
    (TrainingConfig(weights="secret"), 3),
    (TrainingConfig(weights="open", task="binary"), 2),
    (TrainingConfig(weights="open", hidden=(4,)), 3),
)

_ROWS, _BATCH, _WIDTH = 16, 8, 4  # small: kernels are the same for every size
_TIMEOUT = 300.0  # where nothing was compiled yet
_FOLDER = "warm-up-"


def warm_up(training: TrainingConfig, classes: int, directory: Path | None = None) -> None:
    """Three servers and a client train G-BMF with the kind of step that ``training`` asks for (weights, task, hidden
    layers).

    ``directory``: where the folder is made (default: that of temporary files). About 1.5 s, a minute where nothing was
    ever compiled.
    """
    small = TrainingConfig(
        epochs=1,
        batch_size=_BATCH,
        learning_rate=0.1,
        delta=1e-6,
        weights=training.weights,
        task=training.task,
        hidden=training.hidden,
    )
    plan = plan_run(G_BMF, PublicFederation((PublicClient("client", _WIDTH),), _ROWS, classes, 1.0, ()), small)
    labels = plan.labels_to_share(np.zeros(_ROWS) if training.task == "regression" else np.zeros(_ROWS, dtype=np.int64))
    job = ClientJob(plan, np.zeros((_ROWS, _WIDTH)), labels)
    with tempfile.TemporaryDirectory(prefix=_FOLDER, dir=directory) as folder:
        where = Where("threads", timeout=_TIMEOUT, checkpoint_every=1, synced=False)
        Session(plan, where, Path(folder)).play({"client": job})


def warm_up_everything(directory: Path | None = None) -> None:
    """``warm_up`` of every kind: afterwards no training on this machine compiles anything. A minute where nothing was
    compiled."""
    for training, classes in KINDS:
        warm_up(training, classes, directory)


def forget_earlier(directory: Path) -> None:
    """Remove the folders of processes that ended while they warmed up: they are older than any warm-up takes."""
    for folder in directory.glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > 2 * _TIMEOUT:
                shutil.rmtree(folder)
