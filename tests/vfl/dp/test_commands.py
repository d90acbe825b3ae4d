"""The table and plot commands: figures, JSON and errors."""

import json

import pytest

from vfl.dp import plot, table


def test_the_table_of_the_papers_settings(capsys):
    assert table.main(["--json", "--epochs", "20"]) == 0
    content = json.loads(capsys.readouterr().out)
    rows = {(r["data"], r["setting"], r["kind"]): r for r in content["mechanisms"]}
    assert len(rows) == 12
    default = rows["CIFAR-10", "1", "bisr"]
    assert default["bands"] == 256 and default["error_product"] == pytest.approx(30.92, rel=1e-3)
    assert default["server_std"]["1.0"] == pytest.approx(3.7306 * 8.839 * 1.2 / 2**0.5, rel=1e-3)
    assert rows["EMNIST letters", "2", "bsr"]["bands"] == 975
    for row in rows.values():
        assert row["exact"] and row["slack_percent"] < 0.02
    shuffled = {r["data"]: r for r in content["shuffled"]}
    assert shuffled["CIFAR-10"]["paper"]["1.0"] == pytest.approx(1.167, abs=2e-3)
    assert shuffled["CIFAR-10"]["proven"]["1.0"] == pytest.approx(16.68, abs=0.01)


def test_the_table_for_people_fits_eighty_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert table.main(["--epochs", "2", "--data", "CIFAR-10"]) == 0
    text = capsys.readouterr().out
    assert "CIFAR-10, 2 epochs, setting 1" in text and "…" not in text


def test_bad_arguments_are_named(capsys):
    assert table.main(["--epochs", "0"]) == 2
    assert "epochs = 0" in capsys.readouterr().out
    assert plot.main(["--epochs", "0"]) == 2
    with pytest.raises(ValueError, match="setting = '3'"):
        table.mechanism_row("CIFAR-10", 20, "3", "bisr")
    with pytest.raises(ValueError, match="data = 'MNIST'"):
        table.shuffle_row("MNIST", 20)


def test_the_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    output = tmp_path / "errors.png"
    assert plot.main(["--epochs", "2", "--output", str(output), "--json"]) == 0
    assert output.read_bytes()[:4] == b"\x89PNG"
    content = json.loads(capsys.readouterr().out)
    at_b = content["bands"].index(390)
    for curves in content["curves"].values():
        assert curves["bisr"][0] == pytest.approx(curves["bsr"][0])  # one band: no factorisation
        assert curves["bisr"][at_b] < curves["bisr"][0] / 5
