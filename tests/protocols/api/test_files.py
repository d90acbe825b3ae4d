"""Estimators and the model files of ``ppvfl client``: the same rows give the same answers through either, or are
refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from ppvfl import VerticalClassifier, VerticalRegressor
from protocols.state.model_file import read_model, write_model
from tests.not_none import not_none
from tests.protocols.api.tables import CARD, make_tables

PUBLIC = {
    name: table.drop(columns=["defaulted", "spent"], errors="ignore")
    for name, table in make_tables(300, 9, first=50_000)[0].items()
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[VerticalClassifier, dict[str, Any], Path]:
    tables = make_tables(300)[0]
    training = {"bank": tables["bank"], "card": tables["card"].drop(columns="spent")}
    model = VerticalClassifier(backend="twin", public=PUBLIC, id_column="customer").fit(training, y="defaulted")
    return model, {"bank": tables["bank"], "card": tables["card"][["customer", *CARD]]}, tmp_path_factory.mktemp("kept")


def test_a_folder_of_every_partys_file_reads_raw_tables(trained):
    model, new, folder = trained
    model.save(folder / "all")
    (folder / "all" / "estimator.json").unlink()  # what `ppvfl run` leaves has none
    again = VerticalClassifier.load(folder / "all")
    assert np.allclose(not_none(again.predict_proba(new)), not_none(model.predict_proba(new)))
    assert again.id_column == "customer" and again.claim_.paragraph() == model.claim_.paragraph()
    turned = {name: table[table.columns[::-1]] for name, table in new.items()}
    assert np.array_equal(again.predict(turned), model.predict(new))
    with pytest.raises(ValueError, match="the column .*, which the schema names, is missing"):
        again.predict({"bank": new["bank"].drop(columns=new["bank"].columns[1]), "card": new["card"]})


def test_one_partys_file_scales_its_own_table_and_takes_the_others_as_scaled(trained):
    model, new, folder = trained
    file = model.save(folder / "one") / "model-card.npz"
    again = VerticalClassifier.load(file)
    assert np.allclose(again.row_bounds_, model.row_bounds_)
    blocks = model.columns_.read(new)
    card = new["card"].set_index("customer").loc[list(not_none(blocks.ids))].reset_index()
    found = again.predict_proba({"bank": blocks.features[0], "card": card})
    assert np.allclose(not_none(found), not_none(model.predict_proba(new)))
    with pytest.raises(
        ValueError, match="card: the .*column.* is missing"
    ):  # scaled numbers are no table of this party
        again.predict({"bank": blocks.features[0], "card": blocks.features[1]})
    with pytest.raises(ValueError, match="use VerticalClassifier"):
        VerticalRegressor.load(file)


def test_a_file_without_a_schema_opens_too(tmp_path):
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 5))
    parts, y = [x[:, :2], x[:, 2:]], (x.sum(axis=1) > 0).astype(int)
    model = VerticalClassifier(backend="twin", epsilon=8.0).fit(parts, y)
    again = VerticalClassifier.load(model.save(tmp_path) / "model-party-1.npz")
    assert np.allclose(not_none(again.predict_proba(parts)), not_none(model.predict_proba(parts)))


def test_files_that_do_not_belong_together_are_refused(trained):
    model, new, folder = trained
    kept = model.save(folder / "mixed")
    (kept / "estimator.json").unlink()
    other = read_model(kept / "model-bank.npz")
    write_model(kept / "model-bank.npz", replace(other, layers=[other.layers[0] + 1]))
    with pytest.raises(ValueError, match="of another training.: must be files of one training"):
        VerticalClassifier.load(kept)
    write_model(kept / "model-bank.npz", replace(other, client=""))
    with pytest.raises(ValueError, match="model-bank.npz, which names no party"):
        VerticalClassifier.load(kept)
    write_model(kept / "model-bank.npz", replace(other, local_model="a fingerprint"))
    with pytest.raises(ValueError, match="parties with a model of their own = 'bank'"):
        VerticalClassifier.load(kept).predict(new)
    with pytest.raises(ValueError, match="must be a folder that save.. wrote.*every party's model-NAME.npz"):
        VerticalClassifier.load(folder)


def test_ids_with_leading_zeros_need_a_rule_and_then_match():
    random = np.random.default_rng(1)
    x = random.normal(size=(300, 2))
    ids, label = np.arange(300), np.where(x.sum(axis=1) > 0, "yes", "no")
    bank = pandas.DataFrame({"id": [f"{i:05d}" for i in ids], "a": x[:, 0]})
    card = pandas.DataFrame({"id": ids.astype(float), "b": x[:, 1], "label": label}).sample(frac=1, random_state=0)
    public = {name: table.head(50).assign(id=1000 + np.arange(50)) for name, table in (("bank", bank), ("card", card))}
    with pytest.raises(ValueError, match="a number with leading zeros.*rule = 'integer'"):
        VerticalClassifier(backend="twin", public=public, id_column="id").fit({"bank": bank, "card": card}, y="label")
    model = VerticalClassifier(backend="twin", public=public, id_column="id", id_rule="integer", epsilon=8.0)
    assert model.fit({"bank": bank, "card": card}, y="label").score({"bank": bank, "card": card}) > 0.9


def test_an_evaluation_has_figures_a_page_and_a_line_without_privacy(trained, tmp_path):
    model = trained[0]
    tables = make_tables(400, 5)[0]
    new = {"bank": tables["bank"], "card": tables["card"].drop(columns="spent")}
    found = model.evaluate(new, report=tmp_path / "report.html", non_private=(new, None))
    assert found.task == "classification" and found.metrics["accuracy"] == pytest.approx(model.score(new))
    page = (tmp_path / "report.html").read_text()
    assert "without privacy" in page and "outside the privacy claim" in page and "ROC" in page
    with pytest.raises(ValueError, match="labels that are no class"):
        model.evaluate({**new, "card": new["card"].assign(defaulted="perhaps")})
    numbers = {"bank": tables["bank"], "card": tables["card"].drop(columns="defaulted")}
    regressor = VerticalRegressor(
        backend="twin", public=PUBLIC, id_column="customer", target_range=(-4.0, 4.0), epsilon=8.0
    )
    regressor.fit(numbers, y="spent")
    assert regressor.evaluate(numbers).metrics["R²"] == pytest.approx(regressor.score(numbers))
