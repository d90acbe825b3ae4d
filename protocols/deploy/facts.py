"""What all participants know of a run before anything is shared: from federation.toml, and the number of aligned rows.

Each participant makes the whole plan (calibration, scales, releases) from this by itself, and all compare the result.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocols.deploy.config import FederationConfig
from protocols.plan import Plan, plan_run

__all__ = ["PublicClient", "PublicFederation", "plan_for"]


@dataclass(frozen=True)
class PublicClient:
    """What the others know of a client."""

    name: str
    width: int


@dataclass(frozen=True)
class PublicFederation:
    """The public side of ``vfl.federation.Federation``: sizes and bounds, no rows."""

    clients: tuple[PublicClient, ...]
    num_samples: int
    classes: int
    row_bound: float
    public_inputs: tuple[str, ...]

    @property
    def width(self) -> int:
        return sum(client.width for client in self.clients)


def plan_for(config: FederationConfig, rows: int) -> Plan:
    """The plan of this federation's run on ``rows`` aligned rows; or refuse."""
    run = config.run
    public = PublicFederation(
        clients=tuple(PublicClient(client.name, client.width) for client in config.ordered_clients),
        num_samples=rows,
        classes=len(run.classes),
        row_bound=run.row_bound,
        public_inputs=("each client states that its scaling and its local model come from public data only",),
    )
    return plan_run(run.protocol, public, run.training)
