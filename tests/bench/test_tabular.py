"""The table of docs/python-api.md: its command measures what it says, on a table that is embedded."""

from __future__ import annotations

from bench.tabular import TABLES, main, measure, mixed_tables, non_private


def test_the_twin_on_breast_cancer_is_close_to_no_privacy(capsys):
    task = TABLES["breast_cancer"]()
    plain = non_private(task)
    assert plain > 0.98 and measure(task, 8.0, "twin", 1)[0] > plain - 0.03
    main(["--only", "breast_cancer", "--epsilon", "3", "--backends", "twin", "--seeds", "1"])
    printed = capsys.readouterr().out
    assert "ε = 3" in printed and f"{plain:.3f}" in printed


def test_mixed_tables_have_text_gaps_dates_and_other_people():
    tables = mixed_tables(200, 0)
    bank, card = tables["bank"], tables["card"]
    assert bank["income"].isna().any() and bank["job"].isna().any() and str(bank["since"].dtype).startswith("datetime")
    assert len(set(bank["customer"]) - set(card["customer"])) == 20
    assert (mixed_tables(200, 0)["card"]["spent"] == card["spent"]).all()
