"""A released model on disk: the only reader and the only writer. An .npz file with ``layer_1``, ``layer_2``, … ([W; b] each);
a client's also says what the model is for, and holds the layers that the client has trained itself (``local_…``, GL-BMF).
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from accel.errors import InvalidArgument
from accel.files import write_arrays
from accel.validate import require

__all__ = ["MODEL", "ReleasedModel", "read_model", "write_model"]

MODEL = "model.npz"  # its name in the folder of a run
_LAYER, _LOCAL = "layer_", "local_"
_FACTS = ("classes", "clients", "widths")


@dataclass(frozen=True)
class ReleasedModel:
    """Layers, first one first. What a client needs to use them: the names of the classes, whose columns they are and how
    wide, the claim of the training, and its own layers by name."""

    layers: Sequence[np.ndarray]
    classes: tuple[str, ...] = ()
    clients: tuple[str, ...] = ()
    widths: tuple[int, ...] = ()
    claim: str = ""
    local: Mapping[str, np.ndarray] = field(default_factory=dict)


def write_model(file: Path, model: ReleasedModel) -> None:
    """All at once, mode 0600: a client's own layers are private."""
    arrays = {f"{_LAYER}{index}": layer for index, layer in enumerate(model.layers, 1)}
    facts = {name: np.array(getattr(model, name)) for name in _FACTS if getattr(model, name)}
    if model.claim:
        facts["claim"] = np.array(model.claim)
    local = {f"{_LOCAL}{name}": array for name, array in model.local.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_arrays(file, {**arrays, **facts, **local}, private=True)


def read_model(file: Path, argument: str = "model") -> ReleasedModel:
    """The model in ``file``; ``argument`` is what the user gave, for the refusal."""
    require(file.exists(), argument, str(file), "an existing file with a released model")
    try:
        with np.load(file) as stored:
            arrays = {name: stored[name] for name in stored}
    except (ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:  # what numpy says of other files
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
    )
