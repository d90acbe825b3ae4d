"""The site builds strictly, without the network; its cost table is complete; formulas are typeset; the README is
short."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

import refmpc
from tests.docs.pages import DOCS, ROOT, hook


def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path):
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason="the extra [docs] is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    pages = {page.relative_to(tmp_path).as_posix(): page.read_text() for page in tmp_path.rglob("*.html")}
    ours = {name: text for name, text in pages.items() if not name.startswith("reports/")}
    assert len(ours) >= 25
    loads = re.compile(r'<(?:script|img|link|iframe)[^>]+(?:src|href)="(https?:)?//')
    assert not [name for name, text in ours.items() if loads.search(text)]
    assert f'id="{"refmpc.multiply_truncate"}"' in pages["reference/refmpc.html"]
    assert 'href="../proofs/primitives.html#s2-2"' in pages["reference/costs.html"]


def test_the_cost_table_has_every_primitive_with_its_declared_cost():
    table = hook("cost_table").cost_table()
    named = re.findall(r"(?m)^\| \[`(\w+)`\]", table)
    assert sorted(named) == sorted(refmpc.PROTOCOLS)
    assert "| [`multiply_truncate`][refmpc.multiply_truncate] | 2 | 30 | 16 bits cut |" in table
    assert "| 6 | 1176 | up to 2^20 |" in table  # clip_factor


def test_a_primitive_without_a_line_stops_the_build():
    with pytest.raises(KeyError, match="add a line to CALLS for cube"):
        hook("cost_table").cost_table({**refmpc.PROTOCOLS, "cube": refmpc.PROTOCOLS["multiply"]})


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("Σ_{k≥1} ω_k z_{t−k}", "Σ<sub>k≥1</sub> ω<sub>k</sub> z<sub>t−k</sub>"),
        ("C_1·b/b_1 of docs/a_b.md", "C<sub>1</sub>·b/b<sub>1</sub> of docs/a_b.md"),
        ("1024β·Adv_G", "1024β·Adv<sub>G</sub>"),
        ("ρ_λ: λ_0", "ρ<sub>λ</sub>: λ<sub>0</sub>"),
        ("G'_t and z'_{<t}", "G'<sub>t</sub> and z'<sub>&lt;t</sub>"),
        ("2^(64−m), 2^−f_z, 10^-5", "2<sup>64−m</sup>, 2<sup>−f<sub>z</sub></sup>, 10<sup>−5</sup>"),
        ("`is_negative` and norm_limit", "`is_negative` and norm_limit"),
        ("## 6.2 Title {#s6-2}", "## 6.2 Title {#s6-2}"),
        ("[x](a_b.md#s_1)", "[x](a_b.md#s_1)"),
        ("    x_t stays", "    x_t stays"),
    ],
)
def test_formulas_are_typeset_and_code_is_not(written, shown):
    assert hook("mathematics").typeset(written) == shown


def test_no_formula_of_the_proofs_is_left_to_markdown():
    """An underscore between spaces or marks would be taken for emphasis."""
    mathematics = hook("mathematics")
    for page in sorted((DOCS / "proofs").glob("*.md")):
        text = "".join(mathematics.CODE.split(mathematics.typeset(page.read_text()))[::2])
        text = re.sub(r"[a-z]{2,}(_[a-z]+)+", "name", text)  # names of parameters, such as fan_out, are no formulas
        left = re.findall(r"\S*_\S*", text)
        assert not left, f"{page.name}: {left}"


def test_the_readme_is_short_and_its_links_lead_somewhere():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.split()) < 1000
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"):
        links = re.findall(r"\]\(([^)#]+)", (ROOT / name).read_text())
        assert links and not [link for link in links if not (ROOT / link).exists()]
