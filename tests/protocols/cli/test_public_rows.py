"""Public labelled rows in a federation: written once, the same for everybody, measured on after every epoch, for no
ε."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ppvfl import VerticalClassifier
from protocols.cli import main
from protocols.cli.predict import stated_figures
from protocols.client.columns import OwnColumns
from protocols.client.evaluation import print_evaluation
from protocols.federation.public_plan import plan_for, training_for
from protocols.federation.public_rows import FILE, public_rows_of
from protocols.federation.read import configuration_hash, load
from protocols.log import Log
from protocols.net.server_calls import ServerCalls
from protocols.plan.public_rows import PublicRows
from protocols.run.hosts.sessions import thinned
from protocols.state.model_file import ReleasedModel, read_model, write_model
from tests.not_none import not_none
from tests.protocols.api.tables import CARD, make_tables
from tests.protocols.api.test_federation_backend import PUBLIC, make, together
from vfl.data.scaling import RowBound
from vfl.gradients import GlobalModel
from vfl.tables import ClientTable, Ids

EPOCHS = 6
TABLES = {name: PUBLIC[name] for name in ("bank", "card")}


def prepared(directory: Path, *more: str) -> tuple[Any, dict[str, Any]]:
    """A federation whose file names public rows, by the command; and both clients' options of an estimator."""
    columns = {"bank": TABLES["bank"], "card": TABLES["card"][["customer", *CARD]]}
    others = {name: table.assign(customer="another " + table["customer"]) for name, table in columns.items()}
    local = VerticalClassifier(backend="twin", public=others, id_column="customer")
    training = {"bank": TABLES["bank"], "card": TABLES["card"].drop(columns="spent")}
    local.fit(training, y="defaulted")
    federation = make(
        directory, dict(zip(("bank", "card"), local.columns_.widths, strict=True)), classes='["no", "yes"]'
    )
    for name, table in training.items():
        table.to_parquet(directory / f"{name}.parquet")
        columns[name].to_parquet(directory / f"{name}-scale.parquet")
    files = ",".join(f"{name}={directory}/{name}.parquet" for name in training)
    scale = ",".join(f"{name}={directory}/{name}-scale.parquet" for name in training)
    words = ["--config", str(directory / "federation.toml"), "--columns", files, "--public", scale]
    assert main(["public-rows", *words, "--id", "customer", "--label-column", "defaulted", *more]) == 0
    federation.config = load(directory / "federation.toml")
    return federation, {"backend": "federation", "federation": directory / "federation.toml", "id_column": "customer"}


def trained(federation: Any, options: dict[str, Any]) -> list[VerticalClassifier]:
    tables, _ = make_tables(300)
    both = [
        VerticalClassifier(party="bank", public=TABLES["bank"], **options),
        VerticalClassifier(party="card", public=TABLES["card"][["customer", *CARD]], **options),
    ]
    try:
        for number in range(3):
            federation.start(number)
        card = tables["card"][["customer", *CARD, "defaulted"]]
        together(lambda: both[0].fit(tables["bank"]), lambda: both[1].fit(card, y="defaulted"))
    finally:
        federation.stop()
    return both


@pytest.mark.timeout(240)
@pytest.mark.parametrize("patience", [0, 1])
def test_every_client_gets_the_curve_with_the_model(tmp_path, patience, capsys):
    federation, options = prepared(tmp_path, "--patience", str(patience), "--json")
    assert json.loads(capsys.readouterr().out)["rows"] == 300
    rows = not_none(public_rows_of(federation.config))
    bank, card = trained(federation, options)
    curve = card.model_.curve
    assert curve == bank.model_.curve and [point[0] for point in curve] == list(range(1, len(curve) + 1))
    assert len(curve) == EPOCHS if not patience else 2 <= len(curve) <= EPOCHS
    embeddings = rows.words[:, :-1] * 2.0**-14
    released = GlobalModel(list(card.layers_))
    right = released.accuracy(embeddings, rows.labels, "binary")
    wanted = max(accuracy for _, accuracy, _ in curve) if patience else curve[-1][1]
    # of the model that was released: the best, or the last; servers measure with weights rounded as a step uses them
    undecided = int((abs(released.logits(embeddings)) < 0.01).sum())
    assert right == pytest.approx(wanted, abs=undecided / len(embeddings) + 1e-5)
    assert "300 labelled rows are public and take no part in the training" in card.claim_.paragraph()
    if patience:
        assert "stops when 1 epochs have not raised it" in card.claim_.paragraph()


def test_the_file_must_be_the_one_that_everybody_agreed_on(tmp_path, capsys):
    federation, _ = prepared(tmp_path, "--patience", "3")
    config = federation.config
    assert "300 public rows with labels" in capsys.readouterr().out
    assert plan_for(config, 300).public_parameters()["public_rows"]
    text = (tmp_path / "federation.toml").read_text()
    for old, new, sentence in (
        (r"patience = 3", "patience = -1", r"\[run\] patience = -1"),
        (r"public_rows = .*\n", "", r"\[run\] patience = 3: must be 0 without public rows"),
        (r"public_rows = .*\n", 'public_rows = "x"\n', r"\[run\] public_rows = 'x': must be 64 hexadecimal digits"),
        (
            r"\[run\]\n",
            '[run]\nweights = "secret"\n',
            r"absent, except in a classification with g_bmf or g_shuff and open weights",
        ),
        (r'average = "auto"', 'average = "fifth"', r"\[run\] patience = 3: must be 0 with average = 'fifth'"),
    ):
        (tmp_path / "federation.toml").write_text(re.sub(old, new, text))
        with pytest.raises(ValueError, match=sentence):
            load(tmp_path / "federation.toml")
    (tmp_path / "federation.toml").write_text(text)
    changed = text.replace("patience = 3", "patience = 4")
    (tmp_path / "federation.toml").write_text(changed)
    assert configuration_hash(load(tmp_path / "federation.toml")) != configuration_hash(config)
    assert training_for(config, 300).average == "none"  # the last fifth is not known before the end
    kept = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(kept[: len(kept) // 2])
    with pytest.raises(ValueError, match="cannot be read .*: copy it again"):
        public_rows_of(config)
    other = not_none(_other_rows(tmp_path, kept))
    np.savez(tmp_path / FILE, words=other["words"], labels=other["labels"])
    with pytest.raises(ValueError, match="digest of .*: must be .*as .run. public_rows says"):
        public_rows_of(config)
    (tmp_path / FILE).unlink()
    with pytest.raises(ValueError, match="public_rows = 'without .*public-rows.npz'"):
        public_rows_of(config)


def _other_rows(directory: Path, kept: bytes) -> dict[str, np.ndarray]:
    (directory / FILE).write_bytes(kept)
    with np.load(directory / FILE) as arrays:
        found = dict(arrays)
    found["labels"] = 1 - found["labels"]
    return found


def test_the_report_has_the_curve_and_a_column_that_somebody_stated(tmp_path, capsys):
    labels = tuple("no" if i % 3 else "yes" for i in range(30))
    table = ClientTable("card.csv", Ids(map(str, range(30))), (), np.empty((30, 0), np.float32), labels)
    own = OwnColumns(table, np.empty((30, 0)), RowBound(1.0), "a test")
    shares = np.column_stack([np.linspace(0.1, 0.9, 30), np.linspace(0.9, 0.1, 30)])
    curve = ((1, 0.6, 0.7), (2, 0.8, 0.5))
    model = ReleasedModel([np.zeros((2, 1))], ("no", "yes"), task="binary", curve=curve)
    write_model(tmp_path / "model.npz", model)
    model = read_model(tmp_path / "model.npz")
    assert model.curve == curve
    public = PublicRows(np.zeros((10, 2), dtype=np.int64), np.array([0] * 7 + [1] * 3))
    rest: dict[str, Any] = {"held_out": True, "as_json": False, "public": public}
    page = tmp_path / "report.html"
    print_evaluation(own, np.arange(30), shares, model, page, **rest, non_private={"AUC": 0.987})
    assert "without privacy" in capsys.readouterr().out
    text = page.read_text()
    assert "Accuracy on 10 public rows after each epoch" in text and "0.987" in text
    with pytest.raises(ValueError, match="--non-private = 'AUCC': must be figures of this report: accuracy, AUC"):
        print_evaluation(own, np.arange(30), shares, model, page, **rest, non_private={"AUCC": 0.9})
    assert stated_figures("AUC=0.9, accuracy=.85") == {"AUC": 0.9, "accuracy": 0.85}
    with pytest.raises(ValueError, match="--non-private 'AUC' must be FIGURE=VALUE"):
        stated_figures("AUC")


def test_servers_that_tell_different_curves_are_not_believed(tmp_path):
    calls = ServerCalls.__new__(ServerCalls)
    calls._log = Log("bank", tmp_path / "log")
    honest, other = [[1, 0.5, 0.7]], [[1, 0.9, 0.1]]
    assert calls._curve_of([{"curve": honest}] * 3) == ((1, 0.5, 0.7),)
    assert calls._curve_of([{}] * 3) == ()
    for wrong in (other, "text", [[1, 2]], [["a", "b", "c"]], None, 7):
        assert calls._curve_of([{"curve": honest}, {"curve": wrong}, {"curve": honest}]) == ()


def test_a_long_curve_still_fits_into_a_message():
    curve = [[epoch, epoch / 7, 1 / 3] for epoch in range(1, 20_001)]
    kept = thinned(curve)
    assert len(kept) == 500 and kept[0][0] == 1 and kept[-1][0] == 20_000
    assert len(json.dumps(kept)) < 1 << 15
    assert [point[0] for point in thinned(curve[:7])] == list(range(1, 8))
