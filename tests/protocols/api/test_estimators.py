"""The estimators: scikit-learn's own checks, every form of input, every backend on this machine, and what they
refuse."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pytest
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

from ppvfl import VerticalClassifier, VerticalRegressor
from protocols.api import account
from protocols.api.account import DataWarning, PrivacyWarning
from protocols.api.base import VerticalEstimator
from protocols.api.inputs import split_widths
from protocols.run.phase_costs import phase_costs
from protocols.state.model_file import read_model
from protocols.step.cost import step_cost
from protocols.step.public_weights import rounded_head
from tests.not_none import not_none
from tests.protocols.api.tables import BANK, CARD, make_tables
from tests.protocols.run.hosts.federations import make_federation
from vfl.dp import BudgetExceededError, Claim, PrivacyBudget
from vfl.dp.claim import NO_CLAIM
from vfl.losses import WAVES
from vfl.tables import IdRule, Label, Number, Schema, fit_schema
from vfl.twins import train_g_bmf

PUBLIC = {
    name: table.drop(columns=["defaulted", "spent"], errors="ignore")
    for name, table in make_tables(300, 9, first=50_000)[0].items()
}
WITHIN_CLAIM = {"check_class_weight_classifiers": "weights from 0.0001 to 1000 do not fit the fixed-point range"}


def scaled_cancer():
    x, y = load_breast_cancer(return_X_y=True)
    return (x - x.mean(axis=0)) / x.std(axis=0), y


@pytest.mark.parametrize(
    "estimator",
    [
        VerticalClassifier(backend="twin", epsilon=20.0, delta=1e-3),
        pytest.param(
            VerticalRegressor(backend="twin", target_range=(-4.0, 4.0), epsilon=20.0, delta=1e-3),
            marks=pytest.mark.heavy,
        ),
    ],
    ids=["classifier", "regressor"],
)
def test_the_twin_is_an_estimator_by_scikit_learns_own_checks(estimator):
    expected = WITHIN_CLAIM if isinstance(estimator, VerticalClassifier) else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check_estimator(estimator, on_skip=None, expected_failed_checks=expected)
    passed = sum(check["status"] == "passed" for check in found)
    assert passed >= 45, [check["check_name"] for check in found if check["status"] != "passed"]


def test_servers_and_twin_learn_the_same_and_the_cost_is_what_was_estimated():
    x, y = scaled_cancer()
    x, y = x[:, :8], np.array(["malignant", "benign"])[y]
    twin = VerticalClassifier(3, backend="twin", epsilon=8.0, batch_size=128, epochs=3)
    real = clone(twin).set_params(backend="threads").fit(x, y)
    twin.fit(x, y)
    assert twin.classes_.tolist() == ["benign", "malignant"] and real.layers_[0].shape == (9, 1)
    assert min(twin.score(x, y), real.score(x, y)) > 0.85
    cost = twin.estimate(x, y)
    # a result does not count the round in which the run was set up
    assert cost.steps == 12 and 12 * 3 < cost.rounds == real.cost_["rounds"] + 1
    # its bytes are a bound: those of the longest wave. With the waves of the run they are those of the run
    plan, (last,) = real.plan_, real.layers_
    bounded = not_none(plan.scales.one_output).public
    words = np.rint(last * 2.0**plan.scales.weight_bits).astype(np.int64)
    head = rounded_head(words, plan.scales.weight_bits, plan.scales.layers[-1].reach, bounded)
    too_many = cost.steps * (step_cost(plan).bytes - step_cost(plan, head).bytes)
    assert too_many > 0 and head.wave == WAVES[0]
    assert real.cost_["bytes"] == cost.bytes - too_many - phase_costs(plan)["set-up"].bytes
    assert cost.epsilon == pytest.approx(8.0, rel=1e-6) and "ε = 8" in str(cost)
    assert NO_CLAIM not in repr(real) + real.claim_.paragraph() + real.claim_.to_json()


# the door to a simulation -------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the noise in the model")  # at ε = 0.1
def test_a_label_is_recovered_from_a_simulation_which_says_so_and_not_by_default(tmp_path):
    """The attack of somebody who knows all rows, all labels but one, and every option: both labels are tried, and the
    model of the right one is the released model. 40 of 40 at ε = 0.1 where the noise follows from ``random_state``."""
    random = np.random.default_rng(0)
    x, secret = random.normal(size=(60, 3)), random.integers(0, 2, 60)
    options: dict[str, Any] = {
        "parties": {"a": [0], "b": [1, 2]},
        "epsilon": 0.1,
        "epochs": 1,
        "batch_size": 20,
        "classes": [0, 1],
    }

    def distances(released: VerticalClassifier, seed: int) -> list[float]:
        found = []
        for guess in (0, 1):
            y = np.concatenate([[guess], secret[1:]])
            tried = clone(released).set_params(random_state=seed).fit(x, y)
            found.append(float(np.abs(tried.layers_[0] - released.layers_[0]).max()))
        return found

    for seed in range(10):
        twin = VerticalClassifier(**options, backend="twin", random_state=seed).fit(x, secret)
        assert np.argmin(distances(twin, seed)) == secret[0] and min(distances(twin, seed)) == 0.0
    assert inspect.signature(VerticalClassifier).parameters["backend"].default == "local"
    for given in (None, 7):  # the same servers in threads: a seed is of the order of rows, never of their noise
        np.random.seed(0)  # noqa: NPY002
        real = VerticalClassifier(**options, backend="threads", random_state=given).fit(x, secret)
        assert min(distances(real, 7)) > 0.01 and NO_CLAIM not in str(real.claim_)
    shown = [repr(twin), str(twin.claim_), repr(twin.claim_), twin.claim_.headline(), twin.plan_.claim.paragraph()]
    shown += [twin.estimate(x, secret).claim, repr(VerticalClassifier(backend="twin"))]
    model = read_model(twin.save(tmp_path) / "model-a.npz")
    again = VerticalClassifier.load(tmp_path / "model-a.npz")  # whose backend is the default
    facts = [json.loads(text) for text in (twin.claim_.to_json(), (tmp_path / "estimator.json").read_text())]
    shown += [model.claim, repr(again), str(again.claim_), *(str(next(iter(found.values()))) for found in facts)]
    assert [text for text in shown if not text.startswith(NO_CLAIM)] == []
    assert twin._repr_mimebundle_()["text/html"].startswith(f"<p><b>{NO_CLAIM}")
    assert twin.claim_.proven_epsilon is None and Claim.from_json(twin.claim_.to_json()) == twin.claim_
    again.evaluate([x[:, :1], x[:, 1:]], secret, report=tmp_path / "page.html")
    assert f"<h1>{NO_CLAIM}" in (tmp_path / "page.html").read_text()


def test_without_a_seed_a_twin_takes_the_systems_entropy():
    x, y = np.random.default_rng(0).normal(size=(60, 2)), np.arange(60) % 2
    models = []
    for _ in range(2):
        np.random.seed(0)  # noqa: NPY002
        models.append(VerticalClassifier(backend="twin").fit(x, y))
    assert not np.allclose(models[0].layers_[0], models[1].layers_[0])


def test_the_twin_of_the_api_is_the_twin():
    x, y = scaled_cancer()
    model = VerticalClassifier(backend="twin", random_state=3).fit(x, y)
    _, federation = model._planned(x, y)
    assert np.array_equal(train_g_bmf(federation, model.plan_.training).model.layers[0], model.layers_[0])


def test_a_regression_in_threads_is_as_good_as_its_twin():
    x, y = load_diabetes(return_X_y=True)
    x = x / x.std(axis=0)
    scores = [
        VerticalRegressor(backend=backend, target_range=(25, 346), epsilon=20.0).fit(x, y).score(x, y)
        for backend in ("twin", "threads")
    ]
    assert min(scores) > 0.35, scores
    predicted = VerticalRegressor(backend="twin", target_range=(25, 346)).fit(x, y).predict(x)
    assert 25 < np.median(not_none(predicted)) < 346


def test_g_shuff_hidden_layers_and_three_classes():
    tables, target = make_tables(400)
    y = np.digitize(target, [-0.2, 0.4])
    x = np.column_stack([target, tables["card"][list(CARD)].to_numpy(float) / (20, 1)])
    for changes in ({"protocol": "g_shuff"}, {"hidden": (6,)}, {"class_weight": {0: 0.5, 2: 2.0}}):
        model = VerticalClassifier(backend="twin", epsilon=8.0, **changes).fit(x, y)
        assert not_none(model.predict_proba(x)).shape == (400, 3) and model.score(x, y) > 0.4, changes


# tables -------------------------------------------------------------------------------------------


def mixed(**changes):
    return VerticalClassifier(backend="twin", public=PUBLIC, id_column="customer", epsilon=8.0, **changes)


def test_tables_with_text_gaps_and_other_people():
    tables, _ = make_tables(800)
    training = {"bank": tables["bank"], "card": tables["card"].drop(columns="spent")}
    model = mixed().fit(training, y="defaulted")
    assert model.columns_.names == ("bank", "card") and model.classes_.tolist() == ["no", "yes"]
    fresh, _ = make_tables(400, 1, first=5000)
    labelled = {"bank": fresh["bank"], "card": fresh["card"].drop(columns="spent")}
    assert model.score(labelled) > 0.75
    assert len(model.predict(labelled)) == 400
    assert any("public rows" in line for line in model.claim_.public)


KINDS = {
    "integers": [0, 1],
    "texts": ["no", "yes"],
    "truth values": [False, True],
    "floats": [-1.0, 1.0],
    "small integers": np.array([3, 7], dtype=np.int8),
    "numbers of numpy": np.array([1.0, 2.0], dtype=np.float32),
    "categories": pandas.Categorical(["a", "b"]),
    "integers of pandas": pandas.array([0, 1], dtype="Int64"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", ["column", "series", "arrow"])
def test_labels_keep_their_type(tmp_path, kind, given):
    random = np.random.default_rng(2)
    x, ids = random.normal(size=(200, 2)), np.arange(200)
    labels = pandas.Series(KINDS[kind]).take((x.sum(axis=1) > 0).astype(int)).reset_index(drop=True)
    bank = pandas.DataFrame({"id": ids, "a": x[:, 0]})
    card = pandas.DataFrame({"id": ids, "b": x[:, 1], "label": labels})
    wanted = labels.astype(object).to_numpy()
    if given == "series":
        tables: Any = [bank[["a"]], card[["b"]]]
        y: Any = labels.astype(object if kind == "integers of pandas" else labels.dtype)
        y = y.astype(int) if kind == "integers of pandas" else y
        model = VerticalClassifier(backend="twin", epsilon=20.0).fit(tables, y)
    else:
        stated = {"bank": Number("a", (-3.0, 3.0)), "card": Number("b", (-3.0, 3.0))}
        schemas = {name: Schema((column,), IdRule("id")) for name, column in stated.items()}
        schemas["card"] = replace(schemas["card"], label=Label("label"))
        tables = {"bank": bank, "card": card}
        if given == "arrow":
            tables = {name: pyarrow.Table.from_pandas(table) for name, table in tables.items()}
        model = VerticalClassifier(backend="twin", schemas=schemas, epsilon=20.0).fit(tables)
    model.save(tmp_path)
    alone = VerticalClassifier.load(tmp_path)
    (tmp_path / "estimator.json").unlink()
    for each in (model, alone, VerticalClassifier.load(tmp_path)):  # the last one from the model files alone
        found = each.predict(tables)
        found = found["prediction"].to_pylist() if given == "arrow" else np.asarray(found).tolist()
        assert {type(label) for label in found} == {type(label) for label in wanted.tolist()}
        assert (np.array(found) == np.array(wanted.tolist())).mean() > 0.9
        assert each.classes_.dtype == model.classes_.dtype
        assert each.score(tables, None if given != "series" else y) > 0.9
        assert each.evaluate(tables, None if given != "series" else y).metrics["accuracy"] > 0.9


@pytest.mark.parametrize("form", ["pandas", "arrow", "files", "arrays"])
def test_predictions_say_whose_they_are(tmp_path, form):
    """Matched by id, tables of different lengths and orders give the common rows in the order of the label party's."""
    random = np.random.default_rng(4)
    x, ids = random.normal(size=(150, 2)), 1000 + np.arange(150)
    names = ("column 0", "column 1") if form == "arrays" else ("customer", "value")
    bank = pandas.DataFrame({names[0]: ids, names[1]: x[:, 0]}).iloc[::-1]
    card = pandas.DataFrame({names[0]: ids, names[1]: x[:, 1]})
    schemas = {name: Schema((Number(names[1], (-3.0, 3.0)),), IdRule(names[0], "integer")) for name in ("bank", "card")}
    schemas["card"] = replace(schemas["card"], label=Label("label"))
    label = np.where(x.sum(axis=1) > 0, "yes", "no")
    model = VerticalClassifier(backend="twin", schemas=schemas, epsilon=20.0)
    model.fit({"bank": bank, "card": card.assign(label=label)})
    fewer = {"bank": bank.iloc[:100], "card": card.sample(frac=1, random_state=0).iloc[:80]}
    common = [int(name) for name in fewer["card"][names[0]] if name in set(fewer["bank"][names[0]])]
    right = label[np.array(common) - 1000]
    new: Any = fewer
    if form == "arrow":
        new = {name: pyarrow.Table.from_pandas(table, preserve_index=False) for name, table in fewer.items()}
    elif form == "arrays":
        new = {name: table.to_numpy() for name, table in fewer.items()}
    elif form == "files":
        new = {name: tmp_path / f"{name}.parquet" for name in fewer}
        for name, table in fewer.items():
            table.to_parquet(new[name], index=False)
    found, shares = model.predict(new), model.predict_proba(new)
    assert [int(name) for name in model.predict_ids_] == common
    if form == "pandas":
        assert found.index.tolist() == common == shares.index.tolist() and shares.columns.tolist() == ["no", "yes"]
        assert found.index.name == "customer" and np.array_equal(found, shares.idxmax(axis=1))
    elif form != "arrays":
        assert found["customer"].to_pylist() == common and shares.column_names == ["customer", "no", "yes"]
        found = found["prediction"].to_numpy()
    assert len(common) > 40 and (np.asarray(found) == right).mean() > 0.9


def test_columns_are_found_by_name_or_refused():
    tables, _ = make_tables(300)
    training = {"bank": tables["bank"], "card": tables["card"].drop(columns="spent")}
    model = mixed().fit(training, y="defaulted")
    new = {"bank": tables["bank"], "card": tables["card"][["customer", *CARD]]}
    shares = model.predict_proba(new)
    turned = {"card": new["card"][list(new["card"])[::-1]], "bank": new["bank"][list(new["bank"])[::-1]]}
    assert np.array_equal(model.predict_proba(turned), shares)
    mixed_up = {**new, "bank": new["bank"].sample(frac=1, random_state=1)}
    assert np.array_equal(model.predict_proba(mixed_up), shares)  # rows are in the order of the label party
    with pytest.raises(ValueError, match="job"):
        model.predict({**new, "bank": new["bank"].drop(columns="job")})
    with pytest.raises(ValueError, match="X: parties = 'bank': must be the parties bank, card"):
        model.predict({"bank": new["bank"]})
    nobody = new["card"].assign(customer=[f"nobody-{i}" for i in range(len(new["card"]))])
    with pytest.raises(ValueError, match="common ids = 0"):
        model.predict({**new, "card": nobody})


def test_numeric_frames_without_a_schema_are_found_by_name_too():
    x, y = scaled_cancer()
    left = pandas.DataFrame(x[:, :3], columns=["a", "b", "c"])
    right = pandas.DataFrame(x[:, 3:6], columns=["d", "e", "f"])
    model = VerticalClassifier(backend="twin", random_state=0).fit([left, right], y)
    shares = not_none(model.predict_proba([left, right]))
    assert np.array_equal(not_none(model.predict_proba([left[["c", "a", "b"]], right])), shares)
    with pytest.raises(ValueError, match="party 1: columns = 'without b'"):
        model.predict([left.rename(columns={"b": "beta"}), right])
    with pytest.raises(ValueError, match="party 1: table .*numbers only; text, dates and gaps need schemas="):
        VerticalClassifier(backend="twin").fit([left.assign(a="text"), right], y)
    labelled = VerticalClassifier(backend="twin", random_state=0).fit(
        {"one": left, "two": right.assign(label=y)}, y="label"
    )
    assert np.array_equal(labelled.layers_[0], model.layers_[0])


def test_schemas_hold_their_own_label():
    tables, target = make_tables(500)
    card = tables["card"].drop(columns="defaulted")
    schemas = {
        "bank": fit_schema(PUBLIC["bank"], id_column="customer"),
        "card": fit_schema(PUBLIC["card"], id_column="customer", label=Label("spent", "number", range=(-3.0, 3.0))),
    }
    model = VerticalRegressor(backend="twin", schemas=schemas, target_range=(-3.0, 3.0), epsilon=8.0)
    model.fit({"bank": tables["bank"], "card": card})
    assert model.score({"bank": tables["bank"], "card": card}) > 0.5
    assert len(BANK) < model.columns_.widths[0] and np.abs(target).max() < 4


# keeping ------------------------------------------------------------------------------------------


def test_a_saved_estimator_predicts_the_same(tmp_path):
    tables, _ = make_tables(300)
    training = {"bank": tables["bank"], "card": tables["card"].drop(columns="spent")}
    model = mixed().fit(training, y="defaulted")
    again = VerticalClassifier.load(model.save(tmp_path / "kept"))
    new = {"bank": tables["bank"], "card": tables["card"][["customer", *CARD]]}
    assert np.array_equal(not_none(again.predict(new)), not_none(model.predict(new)))
    assert again.claim_.paragraph() == model.claim_.paragraph()
    assert (tmp_path / "kept" / "model-bank.npz").stat().st_mode & 0o077 == 0
    with pytest.raises(ValueError, match="path = 'a VerticalClassifier': must be a VerticalRegressor"):
        VerticalRegressor.load(tmp_path / "kept")
    x, y = scaled_cancer()
    for kind, wanted in (
        (VerticalClassifier(backend="twin"), y),
        (VerticalRegressor(backend="twin", target_range=(0, 1)), y),
    ):
        kept = kind.fit(x, wanted).save(tmp_path / type(kind).__name__)
        assert np.array_equal(not_none(type(kind).load(kept).predict(x)), not_none(kind.predict(x)))


def test_it_works_in_pipelines_and_searches():
    x, y = scaled_cancer()
    scores = cross_val_score(
        make_pipeline(FunctionTransformer(), VerticalClassifier(backend="twin", epsilon=8.0)), x, y, cv=3
    )
    assert scores.min() > 0.85


# what the owner of the rows is told ---------------------------------------------------------------


def test_private_rows_given_as_public_ones_are_refused():
    tables, _ = make_tables(100)
    training = {"bank": tables["bank"], "card": tables["card"].drop(columns="spent")}
    some = {**PUBLIC, "card": training["card"].sample(30, random_state=0)}
    with pytest.raises(ValueError, match="public: card = '30 of 30 rows have an id of the rows that are trained on'"):
        VerticalClassifier(backend="twin", public=some, id_column="customer").fit(training, y="defaulted")
    x, y = scaled_cancer()
    with pytest.raises(ValueError, match="public: party 1 = '200 of 200 rows are rows that are trained on'"):
        VerticalClassifier(backend="twin", public=x[100:300]).fit(x, y)
    with pytest.raises(ValueError, match="public: a = '50 of 50 rows are rows"):
        tables = {name: pandas.DataFrame(x[:, part]) for name, part in (("a", slice(3)), ("b", slice(3, 6)))}
        tables = {name: table.rename(columns=str) for name, table in tables.items()}
        VerticalClassifier(backend="twin", public={n: t.head(50) for n, t in tables.items()}).fit(tables, y)


def test_real_fits_of_a_process_are_counted_and_a_budget_refuses_them(tmp_path, monkeypatch):
    """A search that looks like one fit spends once a fold, over clones and pipelines. A simulation spends nothing."""
    monkeypatch.setattr(account, "_fits", [])
    x, y = np.random.default_rng(3).normal(size=(240, 2)), np.arange(240) % 2
    x[:, 0] += 2 * y
    fast: dict[str, Any] = {"backend": "threads", "epochs": 1, "batch_size": 80, "epsilon": 2.0}
    assert VerticalClassifier(**fast | {"backend": "twin"}).fit(x, y).spent_ is None
    first = VerticalClassifier(**fast).fit(x, y)
    assert first.spent_ == pytest.approx((2.0, 1e-5), rel=1e-3)
    with pytest.warns(PrivacyWarning, match="2 real fits in this process.*spend ε = 2.8.*δ = 2e-05 together"):
        assert not_none(VerticalClassifier(**fast).fit(x, y).spent_)[0] > 2.7
    budget = PrivacyBudget(tmp_path / "budget.json", 3.0, 1e-4)
    search = make_pipeline(FunctionTransformer(), VerticalClassifier(**fast, budget=budget))
    cross_val_score(search, x, y, cv=2, error_score="raise")
    assert len(budget.runs()) == 2 and 2.2 < budget.spent_epsilon() <= 3.0
    with pytest.raises(BudgetExceededError, match="must stay within 3"):
        clone(search).fit(x, y)
    assert len(budget.runs()) == 2 and len(account._fits) == 4


def test_counts_are_shown_to_the_owner_and_what_looks_wrong_is_warned_of():
    tables, _ = make_tables(400)
    training = {"bank": tables["bank"], "card": tables["card"].drop(columns="spent")}
    model = mixed().fit(training, y="defaulted")
    assert model.n_rows_ == 400 and model.table_rows_ == {"bank": 440, "card": 400}
    assert all(0 <= share < 0.2 for share in model.clipped_share_.values())
    renamed = training["bank"]["customer"].where(np.arange(440) < 60, "other-" + training["bank"]["customer"])
    with pytest.warns(DataWarning) as said:
        few = mixed().fit({**training, "bank": training["bank"].assign(customer=renamed)}, y="defaulted")
    assert any(f"{few.n_rows_} of 400 rows matched by id (tables: bank 440, card 400)" in str(w.message) for w in said)
    x, y = load_breast_cancer(return_X_y=True)
    with pytest.warns(DataWarning) as said:
        assert VerticalClassifier(backend="twin").fit(x, y).clipped_share_["party 1"] > 0.99
    words = "party 1: 100% of the rows are longer than the row bound 15.49"
    assert any(str(w.message).startswith(words) and "pass public= rows" in str(w.message) for w in said)
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    with pytest.warns(DataWarning, match="noise in the model is .* of the furthest that the gradients of 60 rows can"):
        VerticalClassifier(backend="twin", epsilon=0.1).fit(x[:60], y[:60])


# refused ------------------------------------------------------------------------------------------

X, Y = np.zeros((40, 4)), np.arange(40) % 2
REFUSED = {
    "backend = 'cloud': must be one of": VerticalClassifier(backend="cloud"),
    "class_weight = 'balanced': must be .*would count the private labels": VerticalClassifier(
        backend="twin",
        class_weight="balanced",
    ),
    "target_range = None: must be .lowest, highest.": VerticalRegressor(backend="twin"),
    "target_range = .3, 1.: must be": VerticalRegressor(backend="twin", target_range=(3, 1)),
    "epsilon = -1": VerticalClassifier(backend="twin", epsilon=-1),
    "y = 'labels that are no class': must be among .0, 2.": VerticalClassifier(backend="twin", classes=[0, 2]),
    "federation = .None, None.: must be a federation.toml": VerticalClassifier(backend="federation"),
    "parties = .*: must be each of the 4 columns": VerticalClassifier(
        backend="twin", parties={"a": [0, 1], "b": [1, 2, 3]}
    ),
    "protocol = 'gl_bmf': must be": VerticalClassifier(backend="twin", protocol="gl_bmf"),
    "id_column = 'id': must be absent without schemas": VerticalClassifier(backend="twin", id_column="id"),
    "id_rule = 'integer': must be 'text' without public and id_column": VerticalClassifier(
        backend="twin", id_rule="integer"
    ),
    r"class_weight = \['bad'\]: must be weights of the classes \[0, 1\]": VerticalClassifier(
        backend="twin", class_weight={"bad": 3.0}
    ),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_cannot_be_is_refused_in_a_sentence(sentence):
    with pytest.raises(ValueError, match=sentence):
        REFUSED[sentence].fit(X, Y)


class Wrong:
    """No value of any argument."""

    def __repr__(self) -> str:
        return "<wrong>"


BOTH = pytest.mark.parametrize("kind", [VerticalClassifier, VerticalRegressor])


@BOTH
def test_a_wrong_value_of_every_argument_is_refused_by_its_name(kind, tmp_path):
    """Arguments from the signature, so that a new one is tried too."""
    file = Path(make_federation(tmp_path).source)
    for name in inspect.signature(kind).parameters:
        options: dict[str, Any] = {"backend": "twin"}
        if name in ("federation", "party"):
            options = {"backend": "federation", "federation": file, "party": "bank"}
        options |= {"target_range": (0, 1)} if kind is VerticalRegressor else {}
        wrongs = [Wrong(), "nobody"] if name == "party" else [Wrong()]
        for wrong in wrongs:
            with pytest.raises(ValueError) as refused:
                kind(**options | {name: wrong}).fit(X, Y)
            assert ("party = " if name == "party" else name) in str(refused.value), (name, str(refused.value))


@BOTH
@pytest.mark.filterwarnings("ignore")
def test_a_wrong_value_of_every_methods_argument_is_refused_by_its_name(kind, tmp_path):
    """Of every public method, from its signature. They ended in a TypeError that did not name it."""
    fitted = kind(backend="twin", **({"target_range": (0, 1)} if kind is VerticalRegressor else {})).fit(X, Y)
    right = {"X": X, "y": Y, "directory": tmp_path, "path": tmp_path, "output": "label"}
    public = [name for name in vars(VerticalEstimator) | vars(kind) if not name.startswith("_")]
    tried = []
    for method in public:
        if not callable(getattr(fitted, method, None)) or method == "set_score_request":
            continue
        arguments = inspect.signature(getattr(fitted, method)).parameters
        for name in arguments:
            if (method, name) == ("join_prediction", "X"):
                continue  # read by a federation's client, as in fit
            given = {each: right[each] for each in arguments if each in right} | {name: Wrong()}
            with pytest.raises(ValueError, match=rf"(^|\W){name}\b") as refused:
                getattr(fitted, method)(**given)
            tried.append((method, name, str(refused.value)))
    assert {"fit", "predict", "evaluate", "save", "load", "estimate", "score"} <= {method for method, *_ in tried}


def test_more_input_that_is_refused():
    with pytest.raises(ValueError, match="rows = .*: must be as many at every party"):
        VerticalClassifier(backend="twin").fit([X, X[:-1]], Y)
    with pytest.raises(ValueError, match="NaN or inf"):
        VerticalClassifier(backend="twin").fit([X, np.full((40, 2), np.nan)], Y)
    with pytest.raises(AttributeError, match="no attribute 'VerticalCluster'; it exports"):
        import protocols

        protocols.VerticalCluster  # noqa: B018


def test_only_a_federation_is_joined():
    with pytest.raises(ValueError, match="backend = 'twin': must be 'federation'"):
        VerticalClassifier(backend="twin").join_prediction(np.zeros((2, 2)))


def test_columns_of_a_matrix_are_split_as_equally_as_can_be():
    names, strips = split_widths(5, 2)
    assert names == ("party 1", "party 2") and strips == ((0, 1, 2), (3, 4))
    assert split_widths(1, 2)[1] == ((0,),)
    assert split_widths(3, {"bank": [2], "card": [0, 1]}) == (("bank", "card"), ((2,), (0, 1)))


def test_the_api_imports_no_torch():
    words = "import sys; from ppvfl import VerticalClassifier; assert not {'torch', 'bench'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", words], check=True, timeout=60)
