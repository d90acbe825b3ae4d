"""A released model on disk: the only reader and the only writer. An .npz file with ``layer_1``, ``layer_2``, … ([W; b]
each).

A client's file also says what the model is for, and holds all that this client needs to use it on new rows: the schema
of its own columns with their scaling constants, its row bound, and the layers that it has trained itself (``local_…``,
GL-BMF). Nothing of another client but its name and width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.errors import InvalidArgument
from accel.files import Damaged, read_arrays, write_arrays
from accel.validate import require, require_choice
from protocols.plan.run_plan import Plan
from vfl.hidden import ACTIVATIONS
from vfl.losses import TASKS

if TYPE_CHECKING:  # servers read models too, and need no Arrow
    from vfl.tables import Schema

__all__ = ["FORMAT", "MODEL", "ReleasedModel", "SharedModel", "read_model", "write_model"]

MODEL = "model.npz"  # its name in the folder of a run
FORMAT = 1  # of what ``about`` holds; files without it are older than names and scaling constants
_LAYER, _LOCAL = "layer_", "local_"
_FACTS = ("classes", "clients", "widths")


@dataclass(frozen=True)
class SharedModel:
    """What is public of a model of one layer that servers have on shares: which run it is of, and the ranges of that
    run. Nothing here depends on the data."""

    run: str
    steps: int
    outputs: int
    row_bound: float
    logit_bound: float
    weight_bits: int

    @classmethod
    def of(cls, plan: Plan) -> SharedModel:
        """The model that this run ends with."""
        require(
            plan.training.hidden == (),
            "hidden",
            plan.training.hidden,
            "empty: training leaves out rows beyond a norm limit, and nobody sees which, so ranges for a prediction on "
            "shares are not certain",
            "predict with the released model: python -m protocols.predict --clear, ppvfl predict --clear",
        )
        scales = plan.scales
        return cls(
            plan.fingerprint,
            plan.schedule.num_steps,
            plan.outputs,
            scales.row_bound,
            scales.logit_bound,
            scales.weight_bits,
        )

    def file(self, server: Path) -> Path:
        """A server's own shares, in its directory of the run."""
        return server / f"checkpoint-{self.steps:08d}.npz"


@dataclass(frozen=True)
class ReleasedModel:
    """Layers, first one first. What a client needs to use them: the names of the classes, whose columns they are and
    how wide, the claim of the training, and its own layers by name.

    ``task``: ``classification`` (an output for each class), ``binary`` (one output, the logit of the second class) or
    ``regression`` (one output; ``target_range`` is what −1 and 1 stand for). ``schema``, ``row_bound`` (of this
    client's own block), ``row_rule`` and ``local_model`` (fingerprint of a frozen model, empty for none) are the
    writing client's own. ``client`` is its name. ``curve``: (epoch, accuracy, loss) on public rows, if the run was
    measured on some. ``shared``: what clients and servers must know to predict with the servers' shares, where servers
    do not know the model. ``version`` 0: a file from before there was one, which knows no names of columns.
    """

    layers: Sequence[np.ndarray]
    classes: tuple[str, ...] = ()
    clients: tuple[str, ...] = ()
    widths: tuple[int, ...] = ()
    claim: str = ""
    local: Mapping[str, np.ndarray] = field(default_factory=dict)
    task: str = "classification"
    target_range: tuple[float, float] | None = None
    schema: Schema | None = None
    row_bound: float | None = None
    row_rule: str = ""
    local_model: str = ""
    client: str = ""
    curve: tuple[tuple[int, float, float], ...] = ()
    label_type: str = ""  # numpy's name of the labels' type, of which ``classes`` are the texts; empty: text
    shared: SharedModel | None = None
    activation: str = "relu"  # of hidden layers
    version: int = FORMAT

    def __post_init__(self) -> None:
        require_choice("task", self.task, TASKS)
        require_choice("activation", self.activation, ACTIVATIONS)
        both = (self.task == "regression") == (self.target_range is not None)
        require(
            both,
            "target_range",
            self.target_range,
            f"{'given' if self.task == 'regression' else 'absent'} with {self.task}",
        )

    def about(self) -> dict[str, Any]:
        """What the file says beside its arrays: plain values."""
        own = {name: getattr(self, name) for name in ("row_bound", "row_rule", "local_model", "client")}
        own["curve"] = [list(point) for point in self.curve]
        own |= {"label_type": self.label_type} if self.label_type else {}
        own |= {"activation": self.activation} if len(self.layers) > 1 else {}
        own["shared"] = None if self.shared is None else asdict(self.shared)
        target = None if self.target_range is None else list(self.target_range)
        schema = None if self.schema is None else self.schema.as_dict()
        return {"version": self.version, "task": self.task, "target_range": target, **own, "schema": schema}


def write_model(file: Path, model: ReleasedModel) -> None:
    """All at once, mode 0600: a client's own layers and schema are private."""
    arrays = {f"{_LAYER}{index}": layer for index, layer in enumerate(model.layers, 1)}
    facts = {name: np.array(getattr(model, name)) for name in _FACTS if getattr(model, name)}
    if model.claim:
        facts["claim"] = np.array(model.claim)
    facts["about"] = np.array(json.dumps(model.about()))
    local = {f"{_LOCAL}{name}": array for name, array in model.local.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_arrays(file, {**arrays, **facts, **local}, private=True)


def read_model(file: Path, argument: str = "model") -> ReleasedModel:
    """The model in ``file``; ``argument`` is what the user gave, for the refusal."""
    require(file.exists(), argument, str(file), "an existing file with a released model")
    try:
        arrays = read_arrays(file)
    except Damaged as error:
        raise InvalidArgument(f"{argument} = {str(file)!r}: must be a released model (.npz): {error}") from None
    numbers = sorted(int(name.removeprefix(_LAYER)) for name in arrays if name.removeprefix(_LAYER).isdecimal())
    require(
        len(numbers) > 0 and numbers == list(range(1, len(numbers) + 1)),
        f"{argument} = {str(file)!r}: arrays",
        sorted(arrays),
        "'layer_1', 'layer_2', … without a gap",
    )
    return ReleasedModel(
        [arrays[f"{_LAYER}{number}"] for number in numbers],
        tuple(map(str, arrays.get("classes", ()))),
        tuple(map(str, arrays.get("clients", ()))),
        tuple(map(int, arrays.get("widths", ()))),
        str(arrays.get("claim", "")),
        {name.removeprefix(_LOCAL): array for name, array in arrays.items() if name.startswith(_LOCAL)},
        **_about(arrays, f"{argument} = {str(file)!r}"),
    )


def _about(arrays: Mapping[str, np.ndarray], where: str) -> dict[str, Any]:
    if "about" not in arrays:
        return {"version": 0}
    values = json.loads(str(arrays["about"]))
    require(
        values.get("version") == FORMAT,
        f"{where}: version",
        values.get("version"),
        f"{FORMAT}",
        "the file was written by a newer ppvfl: use that one, or train again",
    )
    target, schema = values["target_range"], values["schema"]
    if schema is not None:
        from vfl.tables import Schema

        schema = Schema.from_dict(schema)
    return {
        **{name: values[name] for name in ("version", "task", "row_bound", "row_rule", "local_model")},
        "client": values.get("client", ""),  # absent in files of the first versions, as are curve and shared
        "shared": SharedModel(**values["shared"]) if values.get("shared") else None,
        "label_type": values.get("label_type", ""),
        "activation": values.get("activation", "relu"),
        "curve": tuple((int(epoch), right, loss) for epoch, right, loss in values.get("curve", ())),
        "target_range": None if target is None else (float(target[0]), float(target[1])),
        "schema": schema,
    }
