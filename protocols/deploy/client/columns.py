"""A client's own columns, from its file to bounded embeddings and one-hot labels. Nothing here leaves the client."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from accel.errors import InvalidArgument
from accel.validate import require
from protocols.deploy.config.read import ClientEntry, FederationConfig
from vfl.data.columns import ClientTable, read_client_file
from vfl.data.embeddings import embed_own_rows
from vfl.data.scaling import RowBound, bound_rows, split_row_bound
from vfl.local.config import LOCAL_MODELS, LocalModelConfig
from vfl.local.lora import ParallelLora

__all__ = ["OwnColumns", "add_column_options", "read_columns"]


@dataclass(frozen=True)
class OwnColumns:
    """A file, and how its columns become embeddings: ``outputs`` of the local model, each row brought within ``bound``.
    ``source`` says what was taken as public."""

    table: ClientTable
    outputs: np.ndarray = field(repr=False)
    bound: RowBound
    source: str

    def embeddings(self, rows: np.ndarray, layers: ParallelLora | None = None) -> np.ndarray:
        """What this client shares of these rows: from its frozen local model, or with the layers that it has trained."""
        outputs = self.outputs[rows]
        return self.bound.apply(outputs if layers is None else outputs + layers.output([self.block(rows)]))

    def block(self, rows: np.ndarray) -> np.ndarray:
        """What a layer of this client reads (GL-BMF): its scaled columns, rows of norm one."""
        return bound_rows(self.outputs[rows], 1.0, "normalise")

    @property
    def ids(self) -> tuple[str, ...]:
        return self.table.ids

    def one_hot(self, rows: np.ndarray, classes: tuple[str, ...]) -> np.ndarray:
        """Labels of these rows as one-hot rows."""
        hot: np.ndarray = np.eye(len(classes), dtype=np.int64)[self.label_numbers(rows, classes)]
        return hot

    def label_numbers(self, rows: np.ndarray, classes: tuple[str, ...]) -> np.ndarray:
        """Labels of these rows as places in ``classes``."""
        labels = self.table.labels
        assert labels is not None
        index = {name: i for i, name in enumerate(classes)}
        found = np.array([index.get(labels[row], -1) for row in rows], dtype=np.int64)
        wrong = np.flatnonzero(found < 0)
        require(
            not len(wrong),
            f"{self.table.source}: labels",
            f"{len(wrong)} that are no class",
            f"one of {', '.join(classes)}",
            "the classes are listed in federation.toml, [run] classes",
        )
        return found


def add_column_options(parser: argparse.ArgumentParser) -> None:
    """Options on a client's file, for all commands that read one."""
    group = parser.add_argument_group("columns")
    group.add_argument("--id", default="id", metavar="COLUMN", help="column that names the person (default id)")
    scaling = group.add_mutually_exclusive_group()
    scaling.add_argument("--public", metavar="FILE", help="public rows with the same columns, to scale by")
    scaling.add_argument("--value-range", metavar="LOW,HIGH", help="stated range of all columns, to scale by")
    scaling.add_argument("--scaled", action="store_true", help="the columns are embeddings, or scaled, already")
    group.add_argument("--local-model", choices=LOCAL_MODELS, default="identity", help="frozen model (default: none)")
    group.add_argument("--local-weights", metavar="FILE", help="weights of the local model, from public data")
    group.add_argument("--local-width", type=int, metavar="N", help="output width of the local model")


def read_columns(
    config: FederationConfig,
    entry: ClientEntry,
    file: str | Path,
    arguments: argparse.Namespace,
    *,
    label_column: str | None,
) -> OwnColumns:
    """Read, scale, embed and bound the rows of one client."""
    require(
        arguments.scaled or arguments.public is not None or arguments.value_range is not None,
        "scaling",
        "none",
        "by public constants, since anything fitted on private rows would void the claim",
        "give --public FILE, --value-range LOW,HIGH or --scaled",
    )
    require(
        config.run.layers is None or arguments.local_model == "identity",
        "--local-model",
        arguments.local_model,
        "'identity' with gl_bmf, where a layer reads the scaled columns themselves",
        "embed the rows beforehand and give them with --scaled",
    )
    table = read_client_file(file, id_column=arguments.id, label_column=label_column)
    public = None
    if arguments.public is not None:
        other = read_client_file(arguments.public, id_column=arguments.id, forbidden_column=None)
        missing = [name for name in table.columns if name not in other.columns]
        require(
            not missing, f"{other.source}: columns", f"without {', '.join(missing[:5])}", "those of the private file"
        )
        public = other.features[:, [other.columns.index(name) for name in table.columns]]
    outputs, source = embed_own_rows(
        table.features,
        LocalModelConfig(arguments.local_model, arguments.local_width, weights=arguments.local_weights),
        name=table.source,
        public=public,
        value_range=_value_range(arguments.value_range),
        are_embeddings=arguments.scaled,
    )
    width = outputs.shape[1]
    require(
        width == entry.width,
        f"{table.source}: columns after the local model",
        width,
        f"{entry.width}, the width of {entry.name} in {config.source}",
        "drop columns, or agree on another width with everybody",
    )
    bound = split_row_bound(config.run.row_bound, len(config.clients))[0]
    return OwnColumns(table, outputs.astype(np.float64), RowBound(bound, config.run.row_rule), source)


def _value_range(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        low, high = (float(item) for item in text.split(","))
    except ValueError:
        raise InvalidArgument(f"--value-range {text!r} must be two numbers, LOW,HIGH, such as 0,1") from None
    return low, high
