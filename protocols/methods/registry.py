"""The protocols by name: who plans them, and what servers and clients run.

G-BMF and G-Shuff train on rows that were uploaded once; GL-BMF has its clients stay until the end (``live``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accel.validate import require_choice
from protocols.client import gl_client, upload
from protocols.methods import g_bmf, g_shuff, gl_bmf
from protocols.plan.gl_plan import plan_layer_run
from protocols.plan.run_plan import Plan, plan_run
from vfl.federation import Federation
from vfl.training import TrainingConfig

__all__ = ["PROTOCOLS", "Protocol", "protocol"]


@dataclass(frozen=True)
class Protocol:
    """``plan`` makes the public plan of a federation and a training; ``servers`` is what each server runs, ``train`` the
    loop in it, given a run; ``client`` is what each client runs. ``live``: whether clients stay while it runs."""

    name: str
    plan: Callable[[Federation, TrainingConfig], Plan]
    servers: Callable[..., Any]
    train: Callable[..., Any]
    client: Callable[..., Any]
    live: bool = False


PROTOCOLS = {
    entry.name: entry
    for entry in (
        Protocol(
            "g_bmf",
            lambda federation, training: plan_run("g_bmf", federation, training),
            g_bmf.servers,
            g_bmf.train,
            upload.client_program,
        ),
        Protocol(
            "g_shuff",
            lambda federation, training: plan_run("g_shuff", federation, training),
            g_shuff.servers,
            g_shuff.train,
            upload.client_program,
        ),
        Protocol("gl_bmf", plan_layer_run, gl_bmf.servers, gl_bmf.train, gl_client.client_program, live=True),
    )
}


def protocol(name: str) -> Protocol:
    """The protocol called ``name``."""
    return PROTOCOLS[require_choice("protocol", name, PROTOCOLS)]
