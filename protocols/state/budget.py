"""What was spent on whose data: a ledger for every client at every server, across runs, with a limit from federation.toml.

A run on the joint rows of all clients spends its ε on each client's people. Every server keeps, for each client, a
``vfl.dp.PrivacyBudget`` beside the runs' own directories (so that another configuration finds it), charged before the first
opening and composed as that module says. All runs of a client count together, whoever its rows were about: servers cannot
see whether two runs had people in common, and this is the bound that holds in any case. A federation on other people says
so by another ``people`` in ``[budget]``: each value has a ledger of its own.

Beside each run stands a tag of the client's list of people (``protocols.client.people``). Runs with the same tag are about
the same people, so they count together whatever they were called: another word in ``[budget]`` does not make other people.
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
from accel.files import Damaged, private_folder, read_json, write_json
from protocols.federation.schema import BudgetConfig, FederationConfig
from vfl.dp.budget import BudgetExceededError, PrivacyBudget, composed_epsilon
from vfl.dp.claim import Claim

__all__ = ["BUDGET", "PEOPLE", "Budgets", "Spent", "ledger_files", "read_spent"]

BUDGET = "budget"  # the directory, in a server's --state
PEOPLE = "people.json"  # the tags of the people of each run


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
        private_folder(self._directory)
        self._clients = [client.name for client in config.clients]
        self._config = config.budget or BudgetConfig(math.inf, config.run.training.delta)

    def charge(self, run: str, claim: Claim, people: Mapping[str, str]) -> None:
        """Charge a run to every client, once however often it is begun; or raise, and charge nobody. ``people``: tags."""
        if objection := self.objection(run, claim, people):
            raise BudgetExceededError(objection)
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
        self._note(run, people)

    def objection(self, run: str, claim: Claim, people: Mapping[str, str]) -> str:
        """Why this run would not be charged, or nothing. Charges nothing: servers compare it before they begin."""
        for client in self._clients:
            runs = self._runs_on(client, people.get(client))
            total = self._composed({**runs, run: claim})
            if run not in self._ledger(client).runs() and total > min(self._config.epsilon, _UNLIMITED) * (1 + 1e-9):
                elsewhere = sorted(runs.keys() - self._ledger(client).runs().keys())
                also = (
                    f" (with {len(elsewhere)} under another [budget] people, on the same list of ids)"
                    if elsewhere
                    else ""
                )
                return (
                    f"this run would bring what was spent on the people of {client} from ε = {self._composed(runs):.4g}{also} to "
                    f"{total:.4g}, [budget] allows {self._config.epsilon:g}"
                )
        return ""

    def _composed(self, runs: Mapping[str, Claim]) -> float:
        return composed_epsilon([*runs.values()], self._config.delta) if runs else 0.0

    def _runs_on(self, client: str, tag: str | None = None) -> dict[str, Claim]:
        """All runs charged to this client's people: under this ``people``, and under any other with the same tag as one of
        these, or as ``tag``."""
        runs = self._ledger(client).runs()
        tags = self._tags()
        same = {tag, *(tags.get(run, {}).get(client) for run in runs)} - {None}
        found = {run for run, own in tags.items() if own.get(client) in same} - runs.keys()
        return {**runs, **{run: claim for run, claim in self._all_runs().items() if run in found}}

    def _all_runs(self) -> dict[str, Claim]:
        """Every run that is charged here, under whatever ``people``: a run has one claim for all clients."""
        contents = (read_json(file) for file in ledger_files(self._directory))
        return {e["run"]: Claim.from_json(json.dumps(e["claim"])) for content in contents for e in content["runs"]}

    def _tags(self) -> dict[str, dict[str, str]]:
        """For each run, the tags of its clients."""
        file = self._directory / PEOPLE
        known: dict[str, dict[str, str]] = read_json(file) if file.exists() else {}
        if not isinstance(known, dict):
            raise Damaged(file, "it does not name runs", "bring it back from a backup")
        return known

    def refund(self, run: str) -> None:
        """Nothing of this run was ever opened."""
        for client in self._clients:
            self._ledger(client).refund(run)

    def spent(self) -> list[Spent]:
        """For each client."""
        found = []
        for client in self._clients:
            limits, runs = self._config, self._runs_on(client)
            found.append(Spent(client, limits.people, self._composed(runs), limits.delta, limits.epsilon, len(runs)))
        return found

    def _ledger(self, client: str) -> PrivacyBudget:
        limits = self._config
        key = hashlib.sha256(limits.people.encode()).hexdigest()[:8]
        name = f"{client}-{re.sub('[^a-z0-9]+', '-', limits.people.lower())[:32]}-{key}.json"
        epsilon = limits.epsilon if math.isfinite(limits.epsilon) else _UNLIMITED
        return PrivacyBudget(self._directory / name, epsilon, limits.delta, limits_are_agreed=True)

    def _note(self, run: str, people: Mapping[str, str]) -> None:
        known = self._tags()
        if run not in known:
            file = self._directory / PEOPLE
            write_json(file, {**known, run: dict(people)})


_UNLIMITED = 1e9  # ε of a ledger without a limit: everything that is proven fits, and an unproven claim does not


def ledger_files(directory: Path) -> list[Path]:
    """The ledgers in a server's budget directory; other files lie beside them."""
    return sorted(file for file in directory.glob("*.json") if re.search(r"-[0-9a-f]{8}\.json$", file.name))


def read_spent(file: Path) -> dict[str, Any]:
    """A ledger file for people: totals, runs, and what they come to together."""
    content = read_json(file)
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
