"""The table of docs/python-api.md: its command measures what it says, on a table that is embedded."""

from __future__ import annotations

import numpy as np
import pandas
import pytest

from accel.errors import InvalidArgument
from bench.tabular import TABLES, main, measure, mixed_tables, non_private, table_from_file


def test_the_twin_on_breast_cancer_is_close_to_no_privacy(capsys):
    task = TABLES["breast_cancer"]()
    plain = non_private(task)
    assert plain > 0.98 and measure(task, 8.0, "twin", 1)[0] > plain - 0.03
    main(["--only", "breast_cancer", "--epsilon", "3", "--backends", "twin", "--seeds", "1"])
    printed = capsys.readouterr().out
    assert "ε = 3" in printed and f"{plain:.4f}" in printed


def test_mixed_tables_have_text_gaps_dates_and_other_people():
    tables = mixed_tables(200, 0)
    bank, card = tables["bank"], tables["card"]
    assert bank["income"].isna().any() and bank["job"].isna().any() and str(bank["since"].dtype).startswith("datetime")
    assert len(set(bank["customer"]) - set(card["customer"])) == 20
    assert (mixed_tables(200, 0)["card"]["spent"] == card["spent"]).all()


def test_a_public_file_is_cut_in_two(tmp_path):
    """A small file of the form of ISLP's Default; without it the sentence says what is wanted."""
    with pytest.raises(InvalidArgument, match="a folder with Default.csv"):
        table_from_file("default", tmp_path)
    random = np.random.default_rng(0)
    balance = random.normal(800, 400, 900)
    late = np.where(balance + random.normal(0, 100, 900) > 1200, "Yes", "No")
    frame = {"default": late, "student": random.choice(["Yes", "No"], 900), "balance": balance, "income": balance * 0}
    pandas.DataFrame(frame).to_csv(tmp_path / "Default.csv", index=False)
    task = table_from_file("default", tmp_path)
    assert set(task.train["second"]["person"]) < set(task.train["first"]["person"])
    assert not set(task.train["first"]["person"]) & set(task.test["first"]["person"])
    assert list(task.train["first"].columns) == ["person", "balance"]
    plain = non_private(task)
    assert plain > 0.95 and measure(task, 8.0, "twin", 1)[0] > plain - 0.03


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_a_federation_on_loopback_is_as_good_as_the_twin():
    task = TABLES["breast_cancer"]()
    assert measure(task, 8.0, "ppvfl", 1)[0] > non_private(task) - 0.02
