"""A client's own columns, from its file to bounded embeddings and one-hot labels. Nothing here leaves the client."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from accel.errors import InvalidArgument
from accel.validate import require
from protocols.federation.public_plan import client_bounds
from protocols.federation.read import ClientEntry, FederationConfig, RunConfig
from protocols.state.model_file import ReleasedModel
from vfl.data.embeddings import embed_own_rows
from vfl.data.scaling import RowBound, bound_rows
from vfl.defaults import NARROW, table_row_bound
from vfl.local.config import LOCAL_MODELS, LocalModelConfig
from vfl.local.lora import ParallelLora
from vfl.losses import scaled_targets
from vfl.tables import (
    ClientTable,
    IdRule,
    Label,
    Number,
    RawTable,
    Schema,
    TableReport,
    apply_schema,
    fit_schema,
    read_schema,
    read_table,
)
from vfl.tables.ids import ID_RULES, Ids
from vfl.tables.kinds import as_is

__all__ = [
    "EmbeddedRows",
    "OwnColumns",
    "add_column_options",
    "client_row_bound",
    "read_columns",
    "resolve_schema",
    "rule_warning",
]


@dataclass(frozen=True)
class OwnColumns:
    """A file, and how its columns become embeddings: ``outputs`` of the local model, each row brought within ``bound``.
    ``source`` says what was taken as public; ``local_model`` is the frozen model's fingerprint."""

    table: ClientTable
    outputs: np.ndarray = field(repr=False)
    bound: RowBound
    source: str
    schema: Schema | None = field(default=None, repr=False)
    local_model: str = ""
    report: TableReport | None = field(default=None, repr=False)

    def embeddings(self, rows: np.ndarray, layers: ParallelLora | None = None) -> np.ndarray:
        """What this client shares of these rows: from its frozen local model, or with the layers that it has
        trained."""
        outputs = self.outputs[rows].astype(np.float64)
        return self.bound.apply(outputs if layers is None else outputs + layers.output([self.block(rows)]))

    def block(self, rows: np.ndarray) -> np.ndarray:
        """What a layer of this client reads (GL-BMF): its scaled columns, rows of norm one."""
        return bound_rows(self.outputs[rows].astype(np.float64), 1.0, "normalise")

    @property
    def ids(self) -> Ids:
        return self.table.ids

    @property
    def id_form(self) -> str:
        """How ids are written, which all clients compare (``vfl.tables.ids``)."""
        return IdRule().form if self.schema is None else self.schema.id.form

    @property
    def notes(self) -> tuple[str, ...]:
        """What this client should know about its own file."""
        return () if self.report is None else self.report.notes

    def labels_of(self, rows: np.ndarray, run: RunConfig) -> np.ndarray:
        """Labels of these rows as a run takes them: places in its classes, or targets scaled to −1 … 1."""
        if run.target_range is None:
            return self.label_numbers(rows, run.classes)
        assert self.table.targets is not None
        return scaled_targets(self.table.targets[rows], run.target_range)

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


@dataclass(frozen=True)
class EmbeddedRows:
    """What a client shares of ``rows``, embedded when a part of them is taken: memory for that part, not for all."""

    own: OwnColumns
    rows: np.ndarray = field(repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> np.ndarray:
        return self.own.embeddings(self.rows[part])


def add_column_options(parser: argparse.ArgumentParser) -> None:
    """Options on a client's file, for all commands that read one."""
    group = parser.add_argument_group("columns")
    group.add_argument("--id", metavar="COLUMN", help="column that names the person (default: the schema's, or id)")
    group.add_argument("--id-rule", choices=ID_RULES, help="how ids are compared (default: the schema's, or text)")
    scaling = group.add_mutually_exclusive_group()
    scaling.add_argument(
        "--schema", metavar="FILE", help="columns.toml, which `ppvfl schema` writes: kinds, ranges and fill rules"
    )
    scaling.add_argument("--public", metavar="FILE", help="public rows with the same columns, to scale by")
    scaling.add_argument("--value-range", metavar="LOW,HIGH", help="stated range of all columns, to scale by")
    scaling.add_argument("--scaled", action="store_true", help="the columns are embeddings, or scaled, already")
    group.add_argument("--local-model", choices=LOCAL_MODELS, default="identity", help="frozen model (default: none)")
    group.add_argument("--local-weights", metavar="FILE", help="weights of the local model, from public data")
    group.add_argument("--local-width", type=int, metavar="N", help="output width of the local model")


def client_row_bound(config: FederationConfig, entry: ClientEntry) -> float:
    """This client's part R_i of the row bound."""
    return client_bounds(config)[[client.name for client in config.ordered_clients].index(entry.name)]


def rule_warning(config: FederationConfig, entry: ClientEntry) -> str:
    """A row rule that takes away what this client's columns say; empty if there is none."""
    if config.run.row_rule != "normalise" or entry.width > NARROW:
        return ""
    suited = table_row_bound(sum(client.width for client in config.clients))
    return (
        f"[run] row_rule = 'normalise' gives every row of these {entry.width} columns the same norm, and leaves "
        f"little but signs; agree "
        f"on row_rule = 'clip' and row_bound = 'auto' ({suited:g})"
    )


def read_columns(
    config: FederationConfig,
    entry: ClientEntry,
    file: str | Path,
    arguments: argparse.Namespace,
    *,
    label_column: str | None = None,
    with_label: bool = True,
    model: ReleasedModel | None = None,
) -> OwnColumns:
    """Read, scale, embed and bound the rows of one client.

    ``label_column``: the label client's, if it is not the schema's. ``with_label`` False: new rows, whose label is not
    known. ``model``: the file whose schema and constants hold; options that say something else are refused.
    """
    require(
        config.run.layers is None or arguments.local_model == "identity",
        "--local-model",
        arguments.local_model,
        "'identity' with gl_bmf, where a layer reads the scaled columns themselves",
        "embed the rows beforehand and give them with --scaled",
    )
    known = None if model is None else model.schema
    stated = read_schema(arguments.schema) if arguments.schema is not None else known
    id_column = arguments.id or ("id" if stated is None else stated.id.column)
    if entry.label and label_column is None and (stated is None or stated.label is None):
        label_column = "label"
    with_label = with_label and entry.label
    raw = read_table(file, id_column=id_column, label_column=_label_name(stated, label_column) if with_label else None)
    schema = resolve_schema(arguments, raw, label_column, known)
    require(entry.label or schema.label is None, "[label]", "given", f"absent at {entry.name}, which has no labels")
    if entry.label and schema.label is not None:
        schema = _with_label_of_run(schema, schema.label, config)
        assert schema.label is not None
        require(
            not schema.label.classes or set(schema.label.classes) == set(config.run.classes),
            "[label] classes",
            ", ".join(schema.label.classes),
            f"those of {config.source}: {', '.join(config.run.classes)}",
        )
    table, report = apply_schema(schema, raw, with_label=with_label)
    local = LocalModelConfig(arguments.local_model, arguments.local_width, weights=arguments.local_weights)
    outputs, embedded = embed_own_rows(table.features, local, name=table.source, are_embeddings=True)
    width = outputs.shape[1]
    require(
        width == entry.width,
        f"{table.source}: columns after scaling and the local model",
        width,
        f"{entry.width}, the width of {entry.name} in {config.source}",
        "drop columns, or agree on another width with everybody (`ppvfl check` prints it)",
    )
    fingerprint = "" if local.kind == "identity" else local.fingerprint()
    bound = RowBound(client_row_bound(config, entry), config.run.row_rule)
    if model is not None and model.version > 0:
        _same_as_trained(model, fingerprint, bound)
    return OwnColumns(table, outputs, bound, f"{embedded}; {schema.source}", schema, fingerprint, report)


def resolve_schema(
    arguments: argparse.Namespace, raw: RawTable, label_column: str | None = None, known: Schema | None = None
) -> Schema:
    """The schema that the options mean for this file: columns.toml, public rows, a stated range, or none. ``known`` is
    that of a model: it holds by itself, and what the options say must agree with it."""
    given = (arguments.schema, arguments.public, arguments.value_range, arguments.scaled or None)
    if all(option is None for option in given):
        require(
            known is not None,
            "scaling",
            "none",
            "by public constants, since anything fitted on private rows would void the claim",
            "give --schema FILE (`ppvfl schema` writes it), --public FILE, --value-range LOW,HIGH or --scaled",
        )
        assert known is not None
        _refuse_other_id_rule(arguments, known)
        return _with_id(known, arguments.id)
    if arguments.schema is not None:
        schema = _with_id(read_schema(arguments.schema), arguments.id)
        _refuse_other_id_rule(arguments, schema)
        label = schema.label
        require(
            label_column is None or label is None or label.column == label_column,
            "--label-column",
            label_column,
            f"{label.column!r}, as in {arguments.schema}, or absent" if label else "",
        )
        if label_column is not None and label is None:
            schema = Schema(schema.columns, schema.id, Label(label_column), schema.ignored, schema.source)
    else:
        schema = _schema_of_options(arguments, raw, label_column, known)
    if known is not None:
        _refuse_other_id_rule(arguments, known)
        _refuse_other_constants(schema, known)
        return _with_id(known, arguments.id or schema.id.column)
    return schema


def _with_label_of_run(schema: Schema, label: Label, config: FederationConfig) -> Schema:
    """A regression's label is a number within the range that federation.toml states."""
    target = config.run.target_range
    if target is None:
        require(label.kind == "class", "[label] kind", label.kind, f"class: {config.source} lists classes")
        return schema
    same = label.range is None or label.range == target
    require(same, "[label] range", label.range, f"{list(target)}, [run] target_range of {config.source}")
    number = Label(label.column, "number", range=target, missing=label.missing)
    return Schema(schema.columns, schema.id, number, schema.ignored, schema.source)


def _schema_of_options(
    arguments: argparse.Namespace, raw: RawTable, label_column: str | None, known: Schema | None
) -> Schema:
    """--public, --value-range or --scaled: all columns of the file but id and label (of new rows: those of the
    model)."""
    rule = (
        _with_id(known, arguments.id).id
        if known is not None
        else IdRule(arguments.id or "id", arguments.id_rule or "text")
    )
    label = Label(label_column) if label_column is not None and known is None else None
    apart = (rule.column, label_column)
    names = [name for name in raw.names if name not in apart] if known is None else [c.name for c in known.columns]
    require(len(names) >= 1, f"{raw.source}: columns", "none", f"at least one feature beside {rule.column!r}")
    if arguments.public is not None:
        public = read_table(arguments.public, id_column=rule.column)
        missing = [name for name in names if name not in public.names]
        require(
            not missing, f"{public.source}: columns", f"without {', '.join(missing[:5])}", "those of the private file"
        )
        chosen = RawTable(public.source, public.table.select(names), public.notes)
        return fit_schema(chosen, id_column=rule.column, id_rule=rule.rule, label=label)
    if arguments.scaled:
        return Schema(
            tuple(as_is(name) for name in names), rule, label, source="scaled beforehand, as its owner states"
        )
    low, high = _value_range(arguments.value_range)
    columns = tuple(Number(n, centre=low, spread=high - low, limit=1.0, fill="refuse") for n in names)
    return Schema(columns, rule, label, source=f"stated range {low:g}..{high:g}")


def _with_id(schema: Schema, column: str | None) -> Schema:
    """The id may have another name in the file of new rows."""
    if column is None or column == schema.id.column:
        return schema
    rule = IdRule(column, schema.id.rule, schema.id.missing)
    ignored = tuple(name for name in schema.ignored if name != column)
    return Schema(schema.columns, rule, schema.label, ignored, schema.source)


def _refuse_other_id_rule(arguments: argparse.Namespace, schema: Schema) -> None:
    given, stated = arguments.id_rule, schema.id.rule
    require(given in (None, stated), "--id-rule", given, f"{stated!r}, the schema's own, or absent")


def _refuse_other_constants(given: Schema, known: Schema) -> None:
    """New rows must be scaled as those that the model was trained on."""
    theirs, ours = ({c.name: c.as_dict() for c in schema.columns} for schema in (given, known))
    other = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
    require(
        not other,
        "scaling of these columns",
        ", ".join(other[:10]),
        "as when the model was trained",
        "leave out --schema, --public, --value-range and --scaled: the model's file holds the constants",
    )


def _same_as_trained(model: ReleasedModel, fingerprint: str, bound: RowBound) -> None:
    require(
        fingerprint == model.local_model,
        "--local-model",
        "another one, or other weights",
        "the one with which the model was trained",
        "its kind, width and weights must be the same",
    )
    if model.row_bound is not None:
        same = (model.row_bound, model.row_rule) == (bound.norm, bound.rule)
        trained = f"{model.row_bound:g} and {model.row_rule!r}, with which the model was trained"
        require(same, "row bound and rule of this client", f"{bound.norm:g} and {bound.rule}", trained)


def _label_name(schema: Schema | None, label_column: str | None) -> str | None:
    if label_column is not None:
        return label_column
    return None if schema is None or schema.label is None else schema.label.column


def _value_range(text: str) -> tuple[float, float]:
    try:
        low, high = (float(item) for item in text.split(","))
    except ValueError:
        raise InvalidArgument(f"--value-range {text!r} must be two numbers, LOW,HIGH, such as 0,1") from None
    require(bool(np.isfinite([low, high]).all()) and low < high, "--value-range", text, "LOW,HIGH with LOW below HIGH")
    return low, high
