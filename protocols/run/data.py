"""Data of a run on this machine, as the clients hold them; and rows that are declared public: set aside, never trained
on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from accel.validate import require
from protocols.plan.public_rows import PublicRows, with_public_rows
from protocols.plan.run_plan import Plan
from protocols.settings import RunOptions
from vfl.data.sets import VerticalData, load_data, load_embeddings
from vfl.federation import Federation, build_federation
from vfl.local.client import LocalUpdate
from vfl.local.config import LocalModelConfig
from vfl.local.lora import ALL_LAYERS
from vfl.methods import facts

__all__ = ["make_federation", "measured_plan", "set_aside", "with_public"]


def make_federation(options: RunOptions) -> Federation:
    """Data, local models and bounded embeddings; fresh LoRA layers (or the layer to be trained) where clients train
    any."""
    training, layers = options.training, facts(options.protocol).takes("layers")
    require(
        options.embeddings is None or not layers,
        "embeddings",
        options.embeddings,
        "absent: clients that train layers need the local models' blocks",
    )
    if options.embeddings is not None:
        data = load_embeddings(options.embeddings, num_clients=options.clients)
    else:
        data = load_data(options.data, num_clients=options.clients, data_root=options.data_root, seed=training.seed)
    config = LocalModelConfig(kind=options.local_model, weights=options.local_weights)
    bounds: dict[str, Any] = {"row_bound": options.row_bound, "row_rule": options.row_rule}
    if not layers:
        federation = build_federation(set_aside(data, options), config, **bounds, seed=training.seed)
        return with_public(federation, len(data.test_labels))
    update = LocalUpdate(
        options.local_update,
        learning_rate=options.local_learning_rate,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
    )
    if options.train_layer is None:
        lora: dict[str, Any] = {
            "rank": options.rank,
            "lora_alpha": options.lora_alpha,
            "lora_layers": options.lora_layers,
        }
        return build_federation(data, config, **bounds, **lora, lora=True, update=update, seed=training.seed)
    require(
        options.lora_layers == ALL_LAYERS,
        "lora_layers",
        options.lora_layers,
        "left out beside train_layer",
        "the layer that train_layer names is trained instead of LoRA layers",
    )
    from vfl.local.layer_client import build_layer_federation

    jacobian = options.jacobian_bound
    return build_layer_federation(data, config, options.train_layer, update=update, **bounds, largest_jacobian=jacobian)


def set_aside(data: VerticalData, options: RunOptions) -> VerticalData:
    """The data without the training rows that are declared public; those follow the test rows, so that they pass
    through the same local models. Which rows depends on the seed alone, never on a value."""
    count = round(options.public_fraction * len(data.train_labels))
    if count == 0:
        return data
    order = np.random.default_rng([options.training.seed, 0x7075626C]).permutation(len(data.train_labels))
    public, rest = order[:count], np.sort(order[count:])
    note = (
        f"{count} training rows are declared public and set aside, by a permutation from seed {options.training.seed}"
    )
    return replace(
        data,
        train=tuple(columns[rest] for columns in data.train),
        train_labels=data.train_labels[rest],
        test=tuple(np.concatenate([t, c[public]]) for t, c in zip(data.test, data.train, strict=True)),
        test_labels=np.concatenate([data.test_labels, data.train_labels[public]]),
        notes=(*data.notes, note),
    )


def with_public(federation: Federation, test_rows: int) -> Federation:
    """The federation with its ``test_rows`` alone; what was set aside behind them is its ``public``."""
    if len(federation.test_labels) == test_rows:
        return federation
    return replace(
        federation,
        test_labels=federation.test_labels[:test_rows],
        test_embeddings=[part[:test_rows] for part in federation.test_embeddings],
        test_blocks=[[block[:test_rows] for block in blocks] for blocks in federation.test_blocks],
        public=(federation.test_rows()[test_rows:], federation.test_labels[test_rows:]),
    )


def measured_plan(plan: Plan, federation: Federation, patience: int) -> Plan:
    """The plan, measured on the federation's public rows if it has any."""
    if federation.public is None:
        require(patience == 0, "patience", patience, "0 without public rows", "set some aside: --public-fraction 0.1")
        return plan
    return with_public_rows(plan, PublicRows.of(*federation.public, patience))
