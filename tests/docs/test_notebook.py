"""The tutorial's notebook runs from its first cell to its last in a real kernel, and learns what it says."""

from __future__ import annotations

import re

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.docs.pages import DOCS, ROOT

NOTEBOOK = DOCS / "examples" / "tables.ipynb"


@pytest.mark.timeout(300)
def test_the_notebook_goes_from_tables_to_predictions(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    try:
        client.execute()
    except CellExecutionError as error:
        pytest.fail(str(error))
    printed = "\n".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()) if "text" in output
    )
    accuracies = [float(found) for found in re.findall(r"accuracy on new people: (0\.\d+)", printed)]
    assert len(accuracies) == 2 and min(accuracies) > 0.7, printed
    assert "differentially private" in printed
    assert (tmp_path / "kept" / "model-bank.npz").exists()
    assert "The claim of the training" in (tmp_path / "report.html").read_text()


def test_the_notebook_is_kept_without_outputs():
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None
