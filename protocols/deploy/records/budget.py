"""What was spent on whose data: a ledger for every client at every server, across runs, with a limit from federation.toml.

A run on the joint rows of all clients spends its ε on each client's people. Every server keeps, for each client, a
``vfl.dp.PrivacyBudget`` beside the runs' own directories (so that another configuration finds it), charged before the first
opening and composed as that module says. All runs of a client count together, whoever its rows were about: servers cannot
see whether two runs had people in common, and this is the bound that holds in any case. A federation on other people says
so by another ``people`` in ``[budget]``: each value has a ledger of its own.

Beside each run stands a tag of the client's columns, keyed by a secret of the client: two runs on the very same columns
have the same tag, and nothing else can be told from it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.errors import PpvflError
from accel.files import write_bytes
from protocols.deploy.config.schema import BudgetConfig, FederationConfig
from vfl.dp.budget import PrivacyBudget, composed_epsilon
from vfl.dp.claim import Claim

__all__ = ["BUDGET", "COLUMNS", "Budgets", "Spent", "read_spent"]

BUDGET = "budget"  # the directory, in a server's --state
COLUMNS = "columns.json"  # the tags of the columns of each run


@dataclass(frozen=True)
class Spent:
    """What one server has recorded for one client. ``limit`` is infinite if federation.toml has none."""

    client: str
    people: str
    epsilon: float
    delta: float
    limit: float
    runs: int

    @property
    def words(self) -> str:
        limit = f" of {self.limit:g}" if math.isfinite(self.limit) else ", no limit"
        epsilon = f"{self.epsilon:.4g}" if math.isfinite(self.epsilon) else "unbounded"
        return f"{self.client}: ε = {epsilon}{limit} at δ = {self.delta:g}, {self.runs} runs ({self.people})"


class Budgets:
    """The ledgers of all clients of one federation at one server."""

    def __init__(self, state: Path, config: FederationConfig):
        self._directory = state / BUDGET
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._clients = [client.name for client in config.clients]
        self._config = config.budget or BudgetConfig(math.inf, config.run.training.delta)

    def charge(self, run: str, claim: Claim, columns: Mapping[str, str]) -> None:
        """Charge a run to every client, once however often it is begun; or raise, and charge nobody. ``columns``: tags."""
        charged = []
        try:
            for client in self._clients:
                ledger = self._ledger(client)
                known = run in ledger.runs()
                try:
                    ledger.spend(run, claim)
                except PpvflError as error:
                    raise type(error)(f"{client}: {error}") from None
                charged += [] if known else [ledger]
        except BaseException:
            for ledger in charged:
                ledger.refund(run)
            raise
        self._note(run, columns)

    def objection(self, run: str, claim: Claim) -> str:
        """Why this run would not be charged, or nothing. Charges nothing: servers compare it before they begin."""
        for client in self._clients:
            ledger = self._ledger(client)
            runs = ledger.runs()
            total = composed_epsilon([*({**runs, run: claim}).values()], self._config.delta)
            if run not in runs and total > min(self._config.epsilon, _UNLIMITED) * (1 + 1e-9):
                before = ledger.spent_epsilon()
                return (
                    f"this run would bring what was spent on the people of {client} from ε = {before:.4g} to {total:.4g}, "
                    f"[budget] allows {self._config.epsilon:g}"
                )
        return ""

    def refund(self, run: str) -> None:
        """Nothing of this run was ever opened."""
        for client in self._clients:
            self._ledger(client).refund(run)

    def spent(self) -> list[Spent]:
        """For each client."""
        found = []
        for client in self._clients:
            ledger, limits = self._ledger(client), self._config
            runs = len(ledger.runs())
            found.append(Spent(client, limits.people, ledger.spent_epsilon(), limits.delta, limits.epsilon, runs))
        return found

    def _ledger(self, client: str) -> PrivacyBudget:
        limits = self._config
        key = hashlib.sha256(limits.people.encode()).hexdigest()[:8]
        name = f"{client}-{re.sub('[^a-z0-9]+', '-', limits.people.lower())[:32]}-{key}.json"
        epsilon = limits.epsilon if math.isfinite(limits.epsilon) else _UNLIMITED
        return PrivacyBudget(self._directory / name, epsilon, limits.delta, limits_are_agreed=True)

    def _note(self, run: str, columns: Mapping[str, str]) -> None:
        file = self._directory / COLUMNS
        known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        if run not in known:
            write_bytes(file, json.dumps({**known, run: dict(columns)}, indent=1).encode(), private=True)


_UNLIMITED = 1e9  # ε of a ledger without a limit: everything that is proven fits, and an unproven claim does not


def read_spent(file: Path) -> dict[str, Any]:
    """A ledger file for people: totals, runs, and what they come to together."""
    content = json.loads(file.read_text(encoding="utf-8"))
    claims = [Claim.from_json(json.dumps(entry["claim"])) for entry in content["runs"]]
    epsilon = composed_epsilon(claims, content["total_delta"]) if claims else 0.0
    limit = content["total_epsilon"]
    return {
        "ledger": file.stem,
        "epsilon": epsilon,
        "delta": content["total_delta"],
        "limit": None if limit >= _UNLIMITED else limit,
        "runs": [entry["run"] for entry in content["runs"]],
    }
