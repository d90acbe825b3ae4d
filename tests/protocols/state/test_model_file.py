"""The file of a released model: what is written is read, and anything else is refused in a sentence."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from accel.errors import InvalidArgument
from protocols.state.model_file import FORMAT, ReleasedModel, read_model, write_model
from vfl.tables import Category, IdRule, Number, Schema

LAYERS = [np.full((2, 2), float(i)) for i in range(1, 12)]


def test_a_clients_file_holds_all_it_needs(tmp_path):
    file = tmp_path / "new folder" / "model-bank.npz"
    local = {"up_0": np.ones((3, 2)), "down_0": np.zeros((2, 3))}
    model = ReleasedModel(LAYERS, ("no", "yes"), ("bank", "card"), (3, 2), "ε = 3 at δ = 1e-5", local)
    write_model(file, model)
    again = read_model(file)
    assert [layer[0, 0] for layer in again.layers] == list(range(1, 12))  # 10 and 11 come after 9
    assert (again.classes, again.clients, again.widths, again.claim) == (
        model.classes, model.clients, model.widths, model.claim,
    )  # fmt: skip
    assert again.local.keys() == local.keys() and all(np.array_equal(again.local[k], local[k]) for k in local)
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_servers_file_holds_the_layers_alone(tmp_path):
    write_model(tmp_path / "model.npz", ReleasedModel(LAYERS[:1]))
    again = read_model(tmp_path / "model.npz")
    assert np.array_equal(again.layers, LAYERS[:1])
    assert (again.classes, again.widths, again.claim, again.local) == ((), (), "", {})


def test_other_files_are_refused_in_a_sentence(tmp_path):
    with pytest.raises(InvalidArgument, match="--model = .*nowhere.npz.*an existing file"):
        read_model(tmp_path / "nowhere.npz", "--model")
    file = tmp_path / "other.npz"
    broken: list[dict[str, Any]] = [{"weights": np.zeros(3)}, {"layer_1": np.zeros(3), "layer_3": np.zeros(3)}]
    for arrays in broken:
        np.savez(file, **arrays)
        with pytest.raises(InvalidArgument, match="without a gap"):
            read_model(file)
    for content in (b"", b"id,x0\n", b"PK\x03\x04 half of a file"):
        file.write_bytes(content)
        with pytest.raises(InvalidArgument, match="must be a released model"):
            read_model(file)


def test_schema_task_and_bound_survive(tmp_path):
    schema = Schema((Number("age", range=(0, 120)), Category("région", ("a", "b"))), IdRule("who", "integer"))
    own: dict[str, Any] = {"schema": schema, "row_bound": 3.5, "row_rule": "clip", "local_model": "ab" * 32}
    write_model(tmp_path / "m.npz", ReleasedModel(LAYERS[:1], task="regression", target_range=(0.0, 9.5), **own))
    again = read_model(tmp_path / "m.npz")
    assert (again.schema, again.row_bound, again.row_rule, again.local_model) == tuple(own.values())
    assert (again.task, again.target_range, again.version) == ("regression", (0.0, 9.5), FORMAT)
    with pytest.raises(InvalidArgument, match="target_range = None: must be given with regression"):
        ReleasedModel(LAYERS[:1], task="regression")
    with pytest.raises(InvalidArgument, match="task = 'ranking'"):
        ReleasedModel(LAYERS[:1], task="ranking")


def test_older_files_are_known_as_such_and_newer_ones_refused(tmp_path):
    np.savez(tmp_path / "old.npz", layer_1=LAYERS[0], classes=["no", "yes"], clients=["bank"], widths=[1])
    old = read_model(tmp_path / "old.npz")
    assert (old.version, old.schema, old.classes) == (0, None, ("no", "yes"))
    np.savez(tmp_path / "new.npz", layer_1=LAYERS[0], about=json.dumps({"version": FORMAT + 1}))
    with pytest.raises(InvalidArgument, match="version = 2: must be 1; the file was written by a newer ppvfl"):
        read_model(tmp_path / "new.npz")
