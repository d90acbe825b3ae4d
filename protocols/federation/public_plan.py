"""What all participants know of a run before anything is shared: from federation.toml, and the number of aligned rows.

Each participant makes the whole plan (calibration, scales, releases) from this by itself, and all compare the result.
"""

from __future__ import annotations

from dataclasses import fields, replace

from accel.errors import InvalidArgument
from accel.validate import require
from protocols.federation.public_rows import public_rows_of
from protocols.federation.read import FederationConfig
from protocols.log import Log
from protocols.plan.gl_plan import LayerPlan, plan_from_facts
from protocols.plan.gl_shapes import AdapterShape, LayerFacts, PublicLayers, start_digest
from protocols.plan.public_rows import with_public_rows
from protocols.plan.run_plan import Plan, PublicClient, PublicFederation, plan_run
from protocols.settings import RunConfig
from vfl.data.scaling import split_row_bound
from vfl.defaults import chosen_training
from vfl.dp.claim import WARNING, Claim
from vfl.local.client import LocalUpdate, initial_layers
from vfl.local.lora import ParallelLora
from vfl.methods import GL_BMF, facts
from vfl.training import TrainingConfig

__all__ = [
    "client_bounds",
    "held_out_rows",
    "layer_plan_for",
    "local_update",
    "log_claim",
    "plan_for",
    "starting_layers",
    "training_for",
]

_PUBLIC_INPUTS = ("each client states that its scaling and its local model come from public data only",)
_MATCHING = {
    "ot": "OT extension on ed25519",
    "ecdh": "ECDH on Curve25519",
}


def plan_for(config: FederationConfig, rows: int) -> Plan:
    """The plan of this federation's run on ``rows`` aligned rows; or refuse."""
    run = config.run
    require(rows <= run.maximum_rows, "rows", rows, f"at most {run.maximum_rows}, see [run] maximum_rows")
    try:
        return _plan(config, rows)
    except InvalidArgument as error:
        chosen = str(error).split(" = ")[0]
        if chosen not in run.automatic:
            raise
        allowed = f"a number for which an automatic {chosen} fits these columns and hidden layers"
        raise InvalidArgument(f"rows = {rows}: must be {allowed}; state [run] {chosen} and others. {error}") from None


def _plan(config: FederationConfig, rows: int) -> Plan:
    run = config.run
    if run.layers is not None:
        return layer_plan_for(config, rows)
    public = PublicFederation(
        clients=tuple(
            PublicClient(client.name, client.width, bound)
            for client, bound in zip(config.ordered_clients, client_bounds(config), strict=True)
        ),
        num_samples=rows - held_out_rows(config, rows),
        classes=len(run.classes) or 1,
        row_bound=run.row_bound,
        public_inputs=_public_inputs(config),
    )
    plan, measured = plan_run(run.protocol, public, training_for(config, rows)), public_rows_of(config)
    return plan if measured is None else with_public_rows(plan, measured)


def _public_inputs(config: FederationConfig) -> tuple[str, ...]:
    """What the claim says of what happens before anything is shared."""
    clients, matching = len(config.clients), config.run.matching
    if clients == 1:
        return _PUBLIC_INPUTS
    overlaps = ", the label client also how large some overlaps are" if matching == "ecdh" and clients > 2 else ""
    return (
        *_PUBLIC_INPUTS,
        f"rows are matched by private set intersection ({_MATCHING[matching]}, proofs §10.2), in which clients learn "
        f"which of their ids "
        f"all others have, and the lengths of the lists unless padded{overlaps}, and servers the number of common rows",
    )


def held_out_rows(config: FederationConfig, rows: int) -> int:
    """How many of the common rows, the last of the aligned order, take no part in the training. Public: it looks at no
    value."""
    return int(config.run.held_out * rows)


def training_for(config: FederationConfig, rows: int) -> TrainingConfig:
    """The parameters of a training on ``rows`` common rows: what the file leaves open follows from public sizes."""
    run = config.run
    if not run.automatic:
        return run.training
    used, training = rows - held_out_rows(config, rows), run.training
    chosen = chosen_training(
        {each.name: getattr(training, each.name) for each in fields(training) if each.name not in run.automatic},
        used,
        regression=run.target_range is not None,
        averages=facts(run.protocol).takes("averages"),
        patience=run.patience,
    )
    return training.with_(**chosen)


def client_bounds(config: FederationConfig) -> tuple[float, ...]:
    """The parts of the row bound, in the order of the columns: by width with ``clip``, the same for all with
    ``normalise``."""
    clients = config.ordered_clients
    widths = [client.width for client in clients] if config.run.row_rule == "clip" else None
    return tuple(split_row_bound(config.run.row_bound, len(clients), widths))


def log_claim(log: Log, claim: Claim) -> None:
    """What a run will claim, and a warning if that is not proven, or says little because δ is large."""
    log.info("privacy", claim=claim.headline())
    if not claim.proven:
        log.warning("the epsilon that was asked for is not proven", claim=claim.headline())
    for caveat in claim.caveats:
        if caveat.startswith(WARNING):
            log.warning("the privacy parameters say little", reason=caveat.removeprefix(WARNING))


# GL-BMF ------------------------------------------------------------------------------------------


def layer_plan_for(config: FederationConfig, rows: int) -> LayerPlan:
    """``plan_for`` with protocol gl_bmf: each client has one LoRA layer, on its scaled columns."""
    run, clients, start = config.run, [], 0
    update = local_update(config)
    for place, client in enumerate(config.ordered_clients):
        columns = slice(start, start := start + client.width)
        lora = starting_layers(config, place)
        shape = AdapterShape(columns, (client.width,), _layers(config).rank, update.parts == "UV")
        digest = start_digest([(layer.up, layer.down) for layer in lora.layers])
        layers = PublicLayers(client.name, columns, run.row_rule, shape.parameters, shape, lora.scale, digest)
        clients.append(replace(layers, bound=client_bounds(config)[place]))
    used = rows - held_out_rows(config, rows)
    facts = LayerFacts(tuple(clients), used, len(run.classes), run.row_bound, update, _public_inputs(config))
    return plan_from_facts(facts, training_for(config, rows))


def local_update(config: FederationConfig) -> LocalUpdate:
    """What every client does with its gradient."""
    layers, training = _layers(config), config.run.training
    return LocalUpdate(
        layers.local_update,
        learning_rate=layers.local_learning_rate,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
    )


def starting_layers(config: FederationConfig, place: int) -> ParallelLora:
    """The layer that the client at this place of the columns begins with. Public: from sizes and the public seed."""
    layers, width = _layers(config), config.ordered_clients[place].width
    seed = config.run.training.seed
    return initial_layers([width], width, place, rank=layers.rank, alpha=layers.lora_alpha, seed=seed)


def _layers(config: FederationConfig) -> RunConfig:
    layers = config.run.layers
    require(layers is not None, "[run] protocol", config.run.protocol, f"{GL_BMF!r}, where clients train layers")
    assert layers is not None
    return layers
