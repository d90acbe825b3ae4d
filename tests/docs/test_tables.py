"""docs/tables.md, command by command, as a reader would run it: from two organisations' files to a report and
predictions."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ppvfl import VerticalClassifier
from protocols.state.model_file import read_model
from tests.docs.pages import DOCS, ROOT
from tests.protocols.run.hosts.federations import free_ports

PAGE = (DOCS / "tables.md").read_text()
COMMANDS = re.findall(r"(?m)^    ((?:python docs/|ppvfl |sed ).*)$", PAGE)


def test_the_page_shows_the_whole_way():
    words = [line.split()[1] if line.startswith("ppvfl") else line.split()[0] for line in COMMANDS]
    assert words == ["python", "schema", "schema", "sed", "check", "check", "init", "public-rows", "run"]


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_every_command_of_the_page_runs(tmp_path: Path) -> None:
    ports = free_ports(4)
    addresses = ",".join(f"127.0.0.1:{port}" for port in ports[:3])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    shown = {}
    for line in COMMANDS:
        line = line.replace("python docs/", f"{sys.executable} {DOCS}/").replace(
            "ppvfl ", f"{sys.executable} -m protocols.deploy "
        )
        if " init " in line:  # other ports, since other tests may run beside this one
            line += f" --servers {addresses} --alignment 127.0.0.1:{ports[3]}"
        done = subprocess.run(line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stdout[-2000:], done.stderr[-2000:])
        shown[line] = done.stdout
    said = list(shown.values())
    assert "width = 11" in said[1] and "width = 8" in said[2] and "427 rows" in said[4]
    assert "differentially private" in said[-1] and "outside the privacy claim" in said[-1]
    found = re.search(r"AUC\W+([01]\.\d+)", said[-1])
    assert found is not None and float(found[1]) > 0.85  # noise is drawn afresh; .95 to .99 is usual
    out = tmp_path / "runs" / "federation"
    assert "<svg" in (out / "evaluation.html").read_text()
    with (out / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 40 and {row["prediction"] for row in rows} == {"benign", "malignant"}
    assert "Accuracy on 80 public rows after each epoch" in (out / "evaluation.html").read_text()
    new = {name: tmp_path / f"{name}-new.csv" for name in ("clinic", "laboratory")}
    opened = VerticalClassifier.load(out)  # the files of both, as the commands left them
    ours = dict(zip(opened.columns_.read(new).ids or (), opened.predict(new), strict=True))
    assert sum(ours[row["person"]] == row["prediction"] for row in rows) >= 39  # on shares a tie may fall otherwise
    model = read_model(out / "model-clinic.npz")
    assert model.schema is not None and model.schema.columns[0].name == "radius" and model.schema.label is None
