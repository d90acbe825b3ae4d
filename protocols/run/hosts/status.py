"""What a server is doing, as plain facts: for ``ppvfl status``, for the page, for Prometheus. Nothing that is not
public already.

``COVERED`` says of each part why it may be shown. Names, sizes and progress are public among participants by the plan;
what was opened stands in the ledger with its claim; rounds and bytes depend on public sizes only.
"""

from __future__ import annotations

import datetime
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from protocols.federation.read import FederationConfig, configuration_hash
from protocols.log import Log
from protocols.net.waiting import Waiting
from protocols.run.hosts.jobs import TrainingTask
from protocols.run.hosts.sessions import Session, SessionStore, thinned
from protocols.state.budget import Budgets
from protocols.state.disk import free_bytes
from protocols.version import software_version

__all__ = ["COVERED", "StatusSource", "metrics_text"]

COVERED = {
    "federation": "federation.toml, which every participant has",
    "waits": "who has called, and who has not: participants see it themselves",
    "sessions": "rows, clients and steps are public sizes of the plan (proofs §10.4)",
    "traffic": "rounds and bytes depend on public sizes only, never on values (proofs §2.10)",
    "curve": "public weights on rows that are public: post-processing of what was opened (proofs §6.6)",
    "releases": "each was declared with the claim that covers it, and stands in the ledger",
    "budget": "sums of public claims (proofs §9)",
    "errors": "log lines hold names, counts, addresses and reasons; only this server's operator sees them",
}


class StatusSource:
    """Facts of one server, whenever somebody asks."""

    def __init__(
        self,
        config: FederationConfig,
        name: str,
        directory: Path,
        store: SessionStore,
        waiting: Waiting,
        budgets: Budgets,
        log: Log,
    ):
        self._config, self._name, self._directory = config, name, directory
        self._store, self._waiting, self._budgets, self._log = store, waiting, budgets, log
        self._started = datetime.datetime.now(datetime.UTC)
        self._alive = time.monotonic()
        self._quiet = 4 * config.run.timeout + 60.0  # seconds; an attempt reports more often than that

    def tick(self) -> None:
        """The thread that computes is alive."""
        self._alive = time.monotonic()

    @property
    def is_healthy(self) -> bool:
        """Whether the thread that computes has given a sign of life lately."""
        return time.monotonic() - self._alive < self._quiet

    def facts(self, *, errors: bool = False) -> dict[str, Any]:
        """Everything, without infinite numbers. ``errors``: also the last lines of the log that are no information."""
        found = {
            "server": self._name,
            "version": software_version(),
            "federation": self._config.name,
            "configuration": configuration_hash(self._config)[:16],
            "started": self._started.isoformat(timespec="seconds"),
            "free_bytes": free_bytes(self._directory),
            "waits": [
                {"whom": wait.whom, "since": wait.since.isoformat(timespec="seconds"), "why": wait.why}
                for wait in self._waiting.now
            ],
            "sessions": [self._session(session) for session in self._store],
            "budget": [_finite(asdict(spent)) for spent in self._budgets.spent()],
        }
        return found | ({"errors": self._log.last_errors} if errors else {})

    def _session(self, session: Session) -> dict[str, Any]:
        task, missing = session.task, [] if session.done else session.missing
        ledger, progress = session.ledger, session.progress
        opened = Counter((r.name, r.receiver) for r in ledger.releases) if ledger is not None else Counter()
        total = ledger.total() if ledger is not None else None
        claim = task.plan.claim if isinstance(task, TrainingTask) else None
        return {
            "kind": session.kind,
            "name": session.name[:8],
            "rows": session.facts["rows"],
            "here": [client for client in task.plan.client_names if client not in missing],
            "missing": missing,
            "state": _state(session),
            "failed": session.failed,
            "phase": progress.get("phase"),
            "done": progress.get("done"),
            "total": progress.get("total"),
            "rate": round(session.pace.rate, 3) if session.computing else None,
            "seconds_left": round(session.pace.left)
            if session.computing and math.isfinite(session.pace.left)
            else None,
            "rounds": total.rounds if total else None,
            "bytes_sent": total.bytes_sent if total else None,
            "curve": thinned(session.shown_curve),
            "releases": [{"name": name, "to": to, "times": times} for (name, to), times in opened.items()],
            "claim": claim.headline() if claim else None,
            "epsilon": claim.proven_epsilon if claim else None,
        }


def _state(session: Session) -> str:
    if session.failed:
        return "failed"
    if session.done:
        return "done, everybody has it" if session.taken else "done"
    if session.computing:
        return "computing"
    return "waiting for clients" if session.missing else "waiting for servers"


def _finite(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(value, float) and math.isinf(value) else value for name, value in entry.items()}


def metrics_text(facts: Mapping[str, Any]) -> str:
    """The facts in Prometheus' text format."""
    lines: list[str] = []

    def metric(name: str, kind: str, words: str, samples: list[tuple[dict[str, str], Any]]) -> None:
        lines.append(f"# HELP ppvfl_{name} {words}")
        lines.append(f"# TYPE ppvfl_{name} {kind}")
        for labels, value in samples:
            if value is not None:
                shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
                lines.append(f"ppvfl_{name}{{{shown}}} {float(value):g}")

    sessions = [({"kind": s["kind"], "session": s["name"]}, s) for s in facts["sessions"]]
    metric("up", "gauge", "1: the server answers.", [({"server": facts["server"], "version": facts["version"]}, 1)])
    metric("disk_free_bytes", "gauge", "Room where the state lies.", [({}, facts["free_bytes"])])
    now = datetime.datetime.now(datetime.UTC)
    waits = [
        ({"peer": w["whom"]}, (now - datetime.datetime.fromisoformat(w["since"])).total_seconds())
        for w in facts["waits"]
    ]
    metric("waiting_seconds", "gauge", "How long a participant has been waited for.", waits)
    for name, words in (("done", "Steps done in the phase."), ("total", "Steps of the phase.")):
        metric(f"steps_{name}", "gauge", words, [(labels, s[name]) for labels, s in sessions])
    metric("steps_per_second", "gauge", "Pace of the phase.", [(labels, s["rate"]) for labels, s in sessions])
    metric("rounds", "counter", "Rounds of the attempt.", [(labels, s["rounds"]) for labels, s in sessions])
    metric("sent_bytes", "counter", "Bytes sent in the attempt.", [(labels, s["bytes_sent"]) for labels, s in sessions])
    metric("failed", "gauge", "1: it cannot go on.", [(labels, int(bool(s["failed"]))) for labels, s in sessions])
    metric(
        "epsilon_spent",
        "gauge",
        "Composed, over all runs.",
        [({"client": b["client"]}, b["epsilon"]) for b in facts["budget"]],
    )
    metric(
        "epsilon_limit",
        "gauge",
        "Of federation.toml.",
        [({"client": b["client"]}, b["limit"]) for b in facts["budget"]],
    )
    return "\n".join(lines) + "\n"


def _escaped(text: Any) -> str:
    return str(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
