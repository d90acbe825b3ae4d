"""backend="federation": two organisations' estimators and three servers, over TLS on loopback."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ppvfl import VerticalClassifier, VerticalRegressor
from protocols.federation.read import load
from tests.protocols.api.tables import CARD, make_tables
from tests.protocols.run.hosts.federations import free_ports
from tests.protocols.run.hosts.threads import Federation

PUBLIC = make_tables(300, 9, first=50_000)[0]


def make(directory: Path, widths: dict[str, int], **run: str) -> Federation:
    """A federation whose file says these widths, and ``run`` instead of two classes."""
    federation = Federation(directory, epochs=6, batch_size=64, learning_rate=0.05)
    file = directory / "federation.toml"
    text = (
        file.read_text()
        .replace("width = 4", f"width = {widths['bank']}")
        .replace("width = 3", f"width = {widths['card']}")
    )
    lines = [line for line in text.splitlines() if not line.startswith("classes = ")]
    at = lines.index("[run]") + 1
    lines[at:at] = [f"{name} = {value}" for name, value in run.items()]
    text = "\n".join(lines).replace("127.0.0.1:7101", f"127.0.0.1:{free_ports(1)[0]}")
    file.write_text(text)
    federation.config = load(file)
    return federation


def together(*calls: Any) -> list[Any]:
    """Each organisation by itself, at the same time."""
    outcomes: list[Any] = [None] * len(calls)

    def work(index: int) -> None:
        try:
            outcomes[index] = calls[index]()
        except Exception as error:
            outcomes[index] = error

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


@pytest.mark.parametrize("task", ["binary", "regression"])
@pytest.mark.timeout(240)
def test_two_organisations_train_and_predict(tmp_path, task):
    tables, target = make_tables(300)
    label = "defaulted" if task == "binary" else "spent"
    card = tables["card"][["customer", *CARD, label]]
    kind = VerticalClassifier if task == "binary" else VerticalRegressor
    stated: dict[str, Any] = {} if task == "binary" else {"target_range": (-4.0, 4.0)}
    public = {"bank": PUBLIC["bank"], "card": PUBLIC["card"][["customer", *CARD]]}
    local = kind(backend="twin", public=public, id_column="customer", **stated).fit(
        {"bank": tables["bank"], "card": card}, y=label
    )
    widths = dict(zip(local.columns_.names, local.columns_.widths, strict=True))
    run = {"classes": '["no", "yes"]'} if task == "binary" else {"task": '"regression"', "target_range": "[-4.0, 4.0]"}
    federation = make(tmp_path, widths, **run)
    try:
        for number in range(3):
            federation.start(number, predictions=True)
        options = {
            "backend": "federation",
            "federation": tmp_path / "federation.toml",
            "id_column": "customer",
            **stated,
        }
        bank = kind(party="bank", public=public["bank"], **options)
        holder = kind(party="card", public=public["card"], **options)
        estimate = holder.estimate(card)
        assert estimate.steps == 6 * (300 // 64) and estimate.epsilon == pytest.approx(3.0, rel=1e-6)
        mine = kind(party="bank", public=tables["bank"], **options)
        with pytest.raises(ValueError, match="--public = '330 of 330 rows have an id of the rows that are trained on'"):
            mine.fit(tables["bank"])
        together(lambda: bank.fit(tables["bank"]), lambda: holder.fit(card, y=label))
        assert np.array_equal(bank.layers_[0], holder.layers_[0]) and holder.layers_[0].shape == (
            sum(widths.values()) + 1,
            1,
        )
        assert "differentially private" in holder.claim_.paragraph()
        output = "label" if task == "binary" else "value"
        with pytest.raises(
            ValueError, match=rf"party = 'bank': must be 'card'.*join_prediction\(X, output='{output}'\)"
        ):
            bank.predict(tables["bank"])
        with pytest.raises(ValueError, match="party = 'card': must be another party than the receiver"):
            holder.join_prediction(card, output)
        party = {"federation": options["federation"]}
        bank = kind.load(bank.save(tmp_path / "kept")).set_params(**party)  # this party's own file, and nothing else
        assert sorted(file.name for file in (tmp_path / "kept").iterdir()) == ["estimator.json", "model-bank.npz"]
        holder = kind.load(holder.save(tmp_path / "card") / "model-card.npz").set_params(
            backend="federation", party="card", **party
        )
        with pytest.raises(ValueError, match="party = 'bank': must be 'card', the party of the model file"):
            kind.load(tmp_path / "card" / "model-card.npz").set_params(
                backend="federation", party="bank", **party
            ).join_prediction(tables["bank"], output)
        nothing, found = together(
            lambda: bank.join_prediction(tables["bank"], output),
            lambda: holder.predict(tables["card"][["customer", *CARD]]),
        )
    finally:
        federation.stop()
    assert nothing is None and len(found) == 300
    if task == "binary":
        assert (found == tables["card"]["defaulted"].to_numpy()).mean() > 0.6
    else:
        assert np.corrcoef(found, target)[0, 1] > 0.3
        with pytest.raises(ValueError, match="backend = 'federation': must be 'local', 'threads' or 'twin'"):
            holder._scaled(card)
