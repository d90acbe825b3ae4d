"""Labelled public rows: a run with open weights may be measured on them while it trains, at no cost in ε.

The weights of every step are public then, and so is anything that is computed from them and from public rows (proofs
§6.6): an accuracy, a loss, the decision to stop. Never a private row: that would be a release that the claim does not
cover.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from accel.validate import require, require_integer
from protocols.plan.run_plan import Plan
from protocols.plan.scales import EMBEDDING_BITS
from vfl.methods import facts

__all__ = ["PublicRows", "with_public_rows"]


@dataclass(frozen=True)
class PublicRows:
    """Public rows as the servers hold private ones, in integers, so that all servers count the same.

    ``words``: [h 1] at 14 bits; ``patience``: stop when so many epochs have not brought a better accuracy, and release
    the best model; 0: train to the end.
    """

    words: np.ndarray
    labels: np.ndarray
    patience: int = 0

    def __post_init__(self) -> None:
        require(len(self.labels) > 0, "public rows", len(self.labels), "at least one")
        require(len(self.words) == len(self.labels), "public rows", len(self.words), "as many as their labels")
        require_integer("patience", self.patience, 0)

    @classmethod
    def of(cls, embeddings: np.ndarray, labels: np.ndarray, patience: int = 0) -> PublicRows:
        """From bounded embeddings, as those of the clients."""
        words = np.rint(embeddings * 2.0**EMBEDDING_BITS).astype(np.int64)
        ones = np.full((len(words), 1), 1 << EMBEDDING_BITS, dtype=np.int64)
        return cls(np.concatenate([words, ones], axis=1), labels.astype(np.int64), patience)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def digest(self) -> str:
        """Digest of everything: a run goes on with the same rows and the same patience only."""
        found = hashlib.sha256(str((self.words.shape, self.patience)).encode())
        for part in (self.words, self.labels):
            found.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
        return found.hexdigest()


def with_public_rows(plan: Plan, rows: PublicRows) -> Plan:
    """A plan whose run is measured on ``rows`` after every epoch; its claim says so. Open weights only."""
    require(
        plan.opens_sums and facts(plan.protocol).takes("public rows"),
        "public rows",
        f"{len(rows)} with protocol {plan.protocol!r} and weights {plan.training.weights!r}",
        "given to g_bmf or g_shuff with open weights",
        "secret weights cannot be measured during training, and in gl_bmf only clients have their layers",
    )
    require(
        plan.training.task != "regression",
        "public rows",
        f"{len(rows)} with task 'regression'",
        "given to a classification",
        "the learning curve counts right answers, which a regression does not have: give no public rows",
    )
    require(
        rows.patience == 0 or plan.training.average != "fifth",
        "patience",
        rows.patience,
        "0 with --average fifth",
        "with early stopping the last fifth of the steps is not known: use an exponential average",
    )
    require(rows.words.shape[1] == plan.width + 1, "public rows: columns", rows.words.shape[1] - 1, f"{plan.width}")
    said = (
        f"{len(rows)} labelled rows are public and take no part in the training; accuracy on them, computed from "
        f"open weights "
        "after every epoch, costs no privacy, and they are not covered by the claim"
    )
    if rows.patience:
        said += f"; the run stops when {rows.patience} epochs have not raised it, and releases the best model"
    claim = plan.noise.claim
    noise = replace(plan.noise, claim=replace(claim, public=(*claim.public, said)))
    return replace(plan, noise=noise, public_rows=rows)
