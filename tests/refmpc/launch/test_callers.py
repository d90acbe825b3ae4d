"""Who may start processes: a script without a guard, a notebook in a real kernel, a function of either."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

PROGRAM = """
import sys
sys.path[:0] = {path!r}
from dataclasses import dataclass

import refmpc

print("begun")
RATE = 2

@dataclass
class Given:
    values: list

def doubled(x):
    return RATE * x

async def program(party, own):
    assert isinstance(own, Given)
    x = await refmpc.input_from_party(party, 0, own.values, shape=(2,))
    return Given((await refmpc.reveal(doubled(x), release="doubled")).tolist())

def bank(client, value):
    return client.name, value
"""
CALL = """
inputs = [Given([1.0, -2.5]), Given(None), Given(None)]
releases = {"doubled": "a test"}
result = refmpc.run(program, inputs, parties="processes", clients={"bank": (bank, 7)}, releases=releases, timeout=60)
assert all(isinstance(output, Given) for output in result.outputs), type(result.outputs[0])
print(result.outputs[2].values, result.client_outputs["bank"])
"""
ANSWER = "[2.0, -5.0] ('bank', 7)"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setenv("REFMPC_ACCEL", "numpy")


def test_a_script_without_a_guard_starts_processes_and_runs_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.format(path=sys.path) + CALL)
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, env=os.environ)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["begun", ANSWER]


def notebook(*cells: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in cells])


def test_a_notebook_starts_processes_with_functions_of_its_cells(tmp_path):
    made = notebook(PROGRAM.format(path=sys.path), CALL, CALL)
    client = NotebookClient(made, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    try:
        client.execute()
    except CellExecutionError as error:
        pytest.fail(str(error))
    texts = ["".join(o.get("text", "") for o in cell.outputs if o.get("name") == "stdout") for cell in made.cells]
    assert [text.strip() for text in texts] == ["begun", ANSWER, ANSWER]
