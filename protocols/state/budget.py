"""What was spent on whose data: a ledger for every client at every server, across runs, with a limit from
federation.toml.

A run on the joint rows of all clients spends its ε on each client's people. Every server keeps, for each client, a
``vfl.dp.PrivacyBudget`` beside the runs' own directories (so that another configuration finds it), charged before the
first opening and composed as that module says. All runs at a server count together, whatever clients and people were
called: servers cannot see whether two runs had people in common, and this is the bound that holds in any case. Only
runs whose ``people`` are named in ``[budget] apart_from`` are left out. All participants have that sentence in the file
that they compare when they connect, each with its own certificate, so all of them state it.

Beside each run stands a tag of each client's list of people (``protocols.client.people``), without which nothing is
charged and nothing trained. Runs with a tag in common are about the same people and count together, whatever
``apart_from`` says. A tag is of the whole list: with one id more or less, another key or another name of the client it
is another, and only then is ``apart_from`` believed.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
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
        """Charge a run to every client, once however often it is begun; or raise, and charge nobody. ``people``:
        tags."""
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
        runs = self._counted(people.values())
        if run in runs:
            return ""
        if silent := [client for client in self._clients if client not in people]:
            return f"{' and '.join(silent)} sent no tag of whose data it is: install the same version, and begin anew"
        relations = {claim.neighbouring, *(earlier.neighbouring for earlier in runs.values())}
        if len(relations) > 1:
            return (
                f"this run's claim is about other neighbours than those of earlier runs "
                f"({'; '.join(sorted(relations))}), so they do "
                "not add up: keep rows_per_person and local_update as they were"
            )
        total = self._composed({**runs, run: claim})
        if total <= min(self._config.epsilon, _UNLIMITED) * (1 + 1e-9):
            return ""
        return (
            f"this run would bring what was spent on these people from ε = {self._composed(runs):.4g} in {len(runs)} "
            f"runs to "
            f"{total:.4g}, [budget] allows {self._config.epsilon:g}; runs on other people, which all participants "
            f"state in [budget] "
            "apart_from, do not count"
        )

    def _composed(self, runs: Mapping[str, Claim]) -> float:
        return composed_epsilon([*runs.values()], self._config.delta) if runs else 0.0

    def _counted(self, people: Iterable[str] = ()) -> dict[str, Claim]:
        """All runs that may be about the same people: a run has one claim for all clients. Left out are those of people
        in ``apart_from``, unless they have a tag in common with one that counts, or with ``people``."""
        apart, tags = {_key(word) for word in self._config.apart_from}, self._tags()
        counted: dict[str, Claim] = {}
        others: dict[str, Claim] = {}
        for file in ledger_files(self._directory):
            runs = counted if file.stem[-8:] not in apart else others
            for entry in read_json(file)["runs"]:
                runs[entry["run"]] = Claim.from_json(json.dumps(entry["claim"]))
        same = {*people, *(tag for run in counted for tag in tags.get(run, {}).values())}
        return counted | {run: claim for run, claim in others.items() if same & {*tags.get(run, {}).values()}}

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
        limits, runs = self._config, self._counted()
        total = self._composed(runs)
        return [Spent(c, limits.people, total, limits.delta, limits.epsilon, len(runs)) for c in self._clients]

    def _ledger(self, client: str) -> PrivacyBudget:
        limits = self._config
        name = f"{client}-{re.sub('[^a-z0-9]+', '-', limits.people.lower())[:32]}-{_key(limits.people)}.json"
        epsilon = limits.epsilon if math.isfinite(limits.epsilon) else _UNLIMITED
        return PrivacyBudget(self._directory / name, epsilon, limits.delta, limits_are_agreed=True)

    def _note(self, run: str, people: Mapping[str, str]) -> None:
        known = self._tags()
        if run not in known:
            file = self._directory / PEOPLE
            write_json(file, {**known, run: dict(people)})


_UNLIMITED = 1e9  # ε of a ledger without a limit: everything that is proven fits, and an unproven claim does not


def _key(people: str) -> str:
    """How a ledger's file name ends."""
    return hashlib.sha256(people.encode()).hexdigest()[:8]


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
