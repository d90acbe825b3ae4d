"""Rows of an embedded data set that a run on this machine declares to be public: set aside, labelled, never trained on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from accel.validate import require, require_real
from protocols.plan.public_rows import PublicRows, with_public_rows
from protocols.plan.run_plan import Plan
from protocols.settings import RunOptions
from vfl.data.sets import VerticalData
from vfl.federation import Federation

__all__ = ["measured_plan", "set_aside", "with_public"]


def set_aside(data: VerticalData, options: RunOptions) -> VerticalData:
    """The data without the training rows that are declared public; those follow the test rows, so that they pass through
    the same local models. Which rows depends on the seed alone, never on a value."""
    fraction = require_real("public_fraction", options.public_fraction, 0.0, 1.0, open_high=True)
    count = round(fraction * len(data.train_labels))
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
