"""A ledger on disk of what was spent on one data set; a run that would exceed the total is refused.

Composition: runs whose claim names a covering Gaussian mechanism (matrix factorisation; G-Shuff by its
proven any-order bound) compose *exactly*: their 1/σ² add, and the sum is one Gaussian (dp_accounting's
analytic ε). This also holds when later runs are chosen after seeing earlier ones (Gaussian-DP filters,
Koskela, Tobaben & Honkela 2022). Other claims are added by basic composition (ε and δ sum), an upper
bound. The neighbouring relation is that of the claims and must be the same for all.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.errors import InvalidArgument, PpvflError
from accel.files import Damaged, read_json, write_json
from accel.validate import require, require_real
from vfl.dp.calibration import gaussian_epsilon
from vfl.dp.claim import Claim

try:
    import fcntl
except ImportError:  # Windows: no advisory locks; one process at a time is then the user's duty
    fcntl = None  # type: ignore[assignment]

__all__ = ["BudgetExceededError", "PrivacyBudget", "composed_epsilon"]

_VERSION = 1


class BudgetExceededError(PpvflError, RuntimeError):
    """The run would take the total over the budget; nothing was spent."""


def composed_epsilon(claims: list[Claim], delta: float) -> float:
    """ε of all ``claims`` together at total ``delta``; infinite when their own δ do not fit into it."""
    gaussians = [c for c in claims if c.gaussian_multiplier is not None]
    others = [c.proven_pair() for c in claims if c.gaussian_multiplier is None]
    basic_epsilon, basic_delta = sum(pair[0] for pair in others), sum(pair[1] for pair in others)
    if not gaussians:
        return basic_epsilon if basic_delta <= delta else math.inf
    precision = sum(float(c.gaussian_multiplier or math.inf) ** -2 for c in gaussians)
    basic_epsilon += sum(c.epsilon_addition for c in gaussians)
    distance = sum(c.statistical_distance for c in gaussians)
    total = 0.0
    for _ in range(50):  # a distance costs (1+e^ε) of δ at the *total* ε: smallest fixed point, from below
        left = delta - basic_delta - (1 + math.exp(min(total, 700.0))) * distance
        if left <= 0:
            return math.inf
        following = basic_epsilon + gaussian_epsilon(1 / math.sqrt(precision), left)
        if following <= total * (1 + 1e-12):
            return following
        total = following
    return math.inf


@dataclass
class PrivacyBudget:
    """The ledger file at ``path``: opened if it is there (the totals must then agree), created (mode
    0600) if not.

    ``limits_are_agreed``: the totals come from something that all who are concerned have agreed on (federation.toml),
    and replace those in the file; otherwise a budget is not raised by opening it.

    ``spend`` charges a run *before* it starts. The same run with the same claim may be charged again at
    no cost, which is what a resumed run does; another claim under the same run name is refused.
    """

    path: Path
    total_epsilon: float
    total_delta: float

    def __init__(
        self,
        path: str | os.PathLike[str],
        total_epsilon: float,
        total_delta: float,
        *,
        limits_are_agreed: bool = False,
    ):
        self._limits_are_agreed = limits_are_agreed
        self.path = Path(path)
        self.total_epsilon = require_real("total_epsilon", total_epsilon, 0, open_low=True)
        self.total_delta = require_real("total_delta", total_delta, 0, 1, open_low=True, open_high=True)
        with self._lock():
            if self.path.exists():
                self._read()
            else:
                self._write({})

    def runs(self) -> dict[str, Claim]:
        """Run names and the claims they were charged with."""
        return self._read()

    def spent_epsilon(self) -> float:
        """ε of all runs so far, at ``total_delta``; 0 before the first."""
        claims = list(self._read().values())
        return composed_epsilon(claims, self.total_delta) if claims else 0.0

    def spend(self, run: str, claim: Claim) -> float:
        """Charge ``claim`` to ``run`` and return the ε spent in all; raises ``BudgetExceededError`` and
        charges nothing.
        """
        require(bool(run), "run", run, "a non-empty name")
        with self._lock():
            runs = self._read()
            if run in runs:
                require(
                    runs[run] == claim,
                    "run",
                    run,
                    "a new name, or the claim it was charged with before",
                    "a resumed run must keep its claim",
                )
                return composed_epsilon(list(runs.values()), self.total_delta)
            relations = {c.neighbouring for c in runs.values()} | {claim.neighbouring}
            require(
                len(relations) == 1,
                "claim.neighbouring",
                claim.neighbouring,
                "the same for all runs of one budget",
                f"it holds {sorted(relations - {claim.neighbouring})}; keep a second budget file",
            )
            total = composed_epsilon([*runs.values(), claim], self.total_delta)
            if total > self.total_epsilon * (1 + 1e-9):
                before = composed_epsilon(list(runs.values()), self.total_delta) if runs else 0.0
                raise BudgetExceededError(
                    f"run {run!r} with ε = {claim.epsilon:.4g} would bring the total to ε = {total:.4g} at "
                    f"δ = {self.total_delta:g}: must stay within {self.total_epsilon:g} ({len(runs)} earlier "
                    f"runs spent {before:.4g}); ask for a smaller epsilon (ledger: {self.path.name})"
                )
            self._write({**runs, run: claim})
            return total

    def refund(self, run: str) -> None:
        """Take a charge back: only for a run of which nothing was opened, to anybody."""
        with self._lock():
            self._write({name: claim for name, claim in self._read().items() if name != run})

    def _read(self) -> dict[str, Claim]:
        try:
            content: dict[str, Any] = read_json(self.path)
            version = content["version"]
            totals = (content["total_epsilon"], content["total_delta"])
            runs = {entry["run"]: Claim.from_json(json.dumps(entry["claim"])) for entry in content["runs"]}
        except (Damaged, KeyError, TypeError) as error:
            raise InvalidArgument(
                f"budget file = {self.path.name!r}: must be a privacy ledger ({error}); restore it from a "
                "backup, and do not start a new one, because what was spent stays spent"
            ) from error
        require(version == _VERSION, "budget file version", version, f"{_VERSION}")
        require(
            self._limits_are_agreed or totals == (self.total_epsilon, self.total_delta),
            "total_epsilon, total_delta",
            (self.total_epsilon, self.total_delta),
            f"{totals} as in {self.path.name}",
            "opening a budget does not change its totals: edit the file and remove its last line, the checksum",
        )
        return runs

    def _write(self, runs: dict[str, Claim]) -> None:
        content = {
            "version": _VERSION,
            "total_epsilon": self.total_epsilon,
            "total_delta": self.total_delta,
            "runs": [{"run": name, "claim": json.loads(claim.to_json())} for name, claim in runs.items()],
        }
        write_json(self.path, content)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        lock = self.path.with_name(self.path.name + ".lock")
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)
