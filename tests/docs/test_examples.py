"""The code in docs/examples runs and prints what the pages show; the pages show all of it; documented commands
parse."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys

import pytest

from protocols.cli import make_parser
from protocols.run.options import parse_options
from tests.docs.pages import DOCS, ROOT
from vfl.tables import read_table

GUIDES = {"add_a_primitive": "guides/add-a-primitive.md", "add_a_protocol": "guides/add-a-protocol.md"}


def run_example(name, *arguments, cwd=ROOT):
    """In a process of its own: examples register primitives, which other tests count."""
    command = [sys.executable, "-W", "error", str(DOCS / "examples" / f"{name}.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", GUIDES)
def test_guides_show_what_their_examples_print(name):
    page = (DOCS / GUIDES[name]).read_text()
    shown = re.search(rf'```text title="python docs/examples/{name}.py"\n(.*?)```', page, re.DOTALL)
    assert shown is not None
    assert run_example(name) == shown[1]


@pytest.mark.parametrize("name", GUIDES)
def test_guides_show_all_of_their_examples(name):
    code, page = (DOCS / "examples" / f"{name}.py").read_text(), (DOCS / GUIDES[name]).read_text()
    parts = re.findall(r"--8<-- \[start:(\w+)\]", code)
    assert parts and re.findall(rf'--8<-- "docs/examples/{name}.py:(\w+)"', page) == parts


def test_the_example_of_the_tutorial_computes_a_softmax():
    assert run_example("softmax").startswith("[0.09  0.245 0.665] ")


@pytest.mark.timeout(300)
def test_the_first_program_of_the_readme_trains(tmp_path):
    program = re.findall(r"(?s)```python\n(.*?)```", (ROOT / "README.md").read_text())[0]
    (tmp_path / "first.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(tmp_path / "first.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    score, _, claim = done.stdout.partition("\n")
    assert done.returncode == 0 and float(score) > 0.9, done.stderr
    assert claim.startswith("Everything this run releases is (3, 1e-05)-differentially private")


def test_the_tables_of_the_tutorial_are_about_the_same_people(tmp_path):
    assert "427 people" in run_example("make_columns", str(tmp_path))
    clinic = read_table(tmp_path / "clinic.csv", id_column="person").table.column("person").to_pylist()
    laboratory = read_table(tmp_path / "laboratory.parquet", id_column="person").table.column("person").to_pylist()
    assert clinic[0].startswith("0") and len(set(map(int, clinic)) & set(laboratory)) > 380


def commands(pattern):
    pages = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    found = []
    for page in pages:
        for line in re.findall(rf"(?m)^(?:    )?({pattern}.*)$", page.read_text().replace("\\\n", " ")):
            found.append((f"{page.name}: {line.split('  #')[0].strip()}", shlex.split(line.split("  #")[0])))
    return found


TRAINING = [
    pair for pair in commands(r"python -m protocols\.\w+") if "--resume" not in pair[1] and pair[1][2].count(".") == 1
]


@pytest.mark.parametrize(("where", "words"), TRAINING, ids=[where for where, _ in TRAINING])
def test_documented_training_commands_are_understood(where, words):
    protocol = words[2].split(".")[1]
    assert importlib.util.find_spec(words[2]) is not None
    assert parse_options(protocol, None, words[3:]).protocol == protocol


@pytest.mark.parametrize(
    ("where", "words"), commands("ppvfl [a-z]"), ids=[where for where, _ in commands("ppvfl [a-z]")]
)
def test_documented_ppvfl_commands_are_understood(where, words):
    assert make_parser().parse_args(words[1:]).command == words[1]


def test_there_are_commands_to_check():
    assert len(TRAINING) >= 8 and len(commands("ppvfl [a-z]")) >= 12
