"""How a run was begun: written once at every server, compared whenever the run goes on.

Whoever edits the configuration of a run and resumes it would put a new claim on an old model. So the first attempt
writes down the plan and the claim, and whether releases are kept on disk; a later attempt with anything else is refused
before anything is computed, with a sentence that names what differs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accel.files import Damaged, read_json, write_json
from accel.gaussian import SAMPLER_VERSION
from protocols.plan.run_plan import Plan
from protocols.state.checkpoint import CannotResume, ServerDirectory
from protocols.state.model_file import MODEL

__all__ = ["begin", "bind_noise_key", "require_same_plan", "require_same_run"]

BEGUN = "begun.json"
_KEY = "noise key"
_LONGEST = 60  # characters of a value that is quoted
_MOST = 4  # differences that are quoted
WAY_OUT = "put that back, or start a new run: every release spends its own ε"


def _facts(plan: Plan) -> dict[str, Any]:
    """What a run is bound to, as JSON keeps it: what its user chose and its claim says, then everything else."""
    training, claim = plan.training, plan.claim
    chosen = {"epsilon": training.epsilon, "delta": training.delta}
    claimed = {"claim": [claim.epsilon, claim.delta, claim.covers, claim.proven]}
    sampler = {"sampler of the noise": SAMPLER_VERSION}
    found: dict[str, Any] = json.loads(json.dumps({**chosen, **plan.public_parameters(), **claimed, **sampler}))
    return found


def _read(directory: Path) -> dict[str, Any] | None:
    file = directory / BEGUN
    if not file.exists():
        return None
    found = read_json(file)
    if not isinstance(found, dict) or not {"fingerprint", "keeps_releases", "plan"} <= found.keys():
        raise Damaged(file, "it is not how a run was begun")
    return found


def require_same_plan(directory: Path, plan: Plan) -> None:
    """Refuse a plan or a claim that is not the one with which the run in this server's directory was begun, if any
    was."""
    begun = _read(directory)
    if begun is None:
        return
    then, now = begun["plan"], _facts(plan)
    names = [name for name in {**now, **then} if now.get(name) != then.get(name)]
    if not names and begun["fingerprint"] == plan.fingerprint:
        return
    quoted = [
        f"{name} was {then.get(name)!r} and is {now.get(name)!r}"
        for name in names
        if len(f"{then.get(name)!r}{now.get(name)!r}") <= _LONGEST
    ]
    said = [*quoted[:_MOST], *([] if quoted else names[:_MOST])] or ["the plan's fingerprint"]
    more = len(names) - len(said)
    rest = f", and what follows from it ({more} more)" if more > 0 else ""
    raise CannotResume(f"{directory} belongs to a run with another plan: {', '.join(said)}{rest}; {WAY_OUT}")


def require_same_run(run: Path, plan: Plan) -> None:
    """``require_same_plan`` for the three servers of a run on this machine, before any of them starts."""
    servers = [run / f"server-{i}" for i in range(3)]
    for server in servers:
        require_same_plan(server, plan)
    if (run / MODEL).exists() and not any(_read(server) for server in servers):
        raise CannotResume(
            f"{run} holds a released model, but its servers' files are missing. Training again would spend another ε; "
            "start a new run"
        )


def begin(directory: ServerDirectory, plan: Plan, *, keeps_releases: bool = True, finished: bool = False) -> None:
    """Write down how the run begins; if it has begun before, refuse to go on in any other way.

    ``keeps_releases``: whether every release is on disk before it is sent. A run without that cannot be begun again at
    all: nobody knows what it has released, and the same noise would cover two different values. Unless it is
    ``finished``, and only what everybody knows is to be handed over.
    """
    begun = _read(directory.path)
    if begun is None:
        if directory.has_noise or directory.steps():
            raise CannotResume(
                f"{directory.path} holds a run, but {BEGUN}, which says how it was begun, is missing or of an earlier "
                "version: restore the file, or start a new run"
            )
        facts = {"fingerprint": plan.fingerprint, "keeps_releases": keeps_releases, "plan": _facts(plan)}
        write_json(directory.path / BEGUN, facts)
        return
    require_same_plan(directory.path, plan)
    if not finished and not (begun["keeps_releases"] and keeps_releases):
        which = "begun" if not begun["keeps_releases"] else "to be resumed"
        raise CannotResume(
            f"the run in {directory.path} was {which} without checkpoints, so what it has released is not on disk. "
            "Releasing again would spend ε twice; start a new run in an empty directory"
        )


def bind_noise_key(directory: ServerDirectory) -> None:
    """Draw this server's noise key if the run has none, and write down its check value; refuse another key than that.

    Called when the servers have agreed that a run without a key has opened nothing. The check value is a hash of the
    key: who reads it learns nothing of the noise.
    """
    begun = _read(directory.path)
    assert begun is not None
    if not directory.has_noise and _KEY in begun:  # an attempt that died before its first step
        del begun[_KEY]
        write_json(directory.path / BEGUN, begun)
    check = directory.noise_check()
    if _KEY not in begun:
        write_json(directory.path / BEGUN, {**begun, _KEY: check})
    elif begun[_KEY] != check:
        raise CannotResume(
            f"{directory.path / 'noise.key'} is not the key with which this run was begun, so the remaining steps "
            f"would have other noise; restore the key, or {WAY_OUT.partition(', or ')[2]}"
        )
