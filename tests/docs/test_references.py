"""Every "proofs §…" in code, claims, errors and pages leads to a numbered section; nothing refers to texts we do not ship."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import refmpc
from tests.docs.pages import DOCS, ROOT, hook
from vfl.dp import (
    FixedPointSlack,
    calibrate_matrix_factorisation,
    calibrate_shuffled,
    factorise,
    labels_only_claim,
    matrix_factorisation_claim,
)

FOLDERS = ("accel", "refmpc", "vfl", "protocols", "bench", "tests", "deploy", "docs")
ENDINGS = {".py", ".md", ".toml", ".yml", ".yaml", ".service", ".mpc"}
NOT_SHIPPED = re.compile(r"\b(PROTOCOLS|DESIGN|REFERENCES)('|\.md)?\s+§")

references = hook("references")
SECTIONS = references.sections(DOCS / "proofs")


def files() -> Iterator[Path]:
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"))
    for folder in FOLDERS:
        yield from (path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in ENDINGS)


def referring() -> list[tuple[str, list[str]]]:
    found = ((str(path.relative_to(ROOT)), references.references(path.read_text())) for path in files())
    return [(name, numbers) for name, numbers in found if numbers and name != "tests/docs/test_references.py"]


def test_sections_are_numbered_without_gaps():
    chapters = sorted({int(number.split(".")[0]) for number in SECTIONS})
    assert chapters == list(range(1, len(chapters) + 1)) and len(chapters) >= 10
    for chapter in chapters:
        inner = [int(number.split(".")[1]) for number in SECTIONS if number.startswith(f"{chapter}.")]
        assert inner == list(range(1, len(inner) + 1)), f"§{chapter}"
        assert str(chapter) in SECTIONS


def test_there_is_something_to_check():
    code = [name for name, _ in referring() if name.endswith(".py") and not name.startswith("tests/")]
    assert len(code) >= 20


@pytest.mark.parametrize(("name", "numbers"), referring(), ids=[name for name, _ in referring()])
def test_references_lead_to_a_section(name, numbers):
    assert not [number for number in numbers if number not in SECTIONS]


def test_links_between_pages_name_the_section_that_they_lead_to():
    """[§6.2](privacy.md#s6-2): the text and the anchor agree."""
    for page in sorted(DOCS.rglob("*.md")):
        for number, anchor in re.findall(r"\[(?:[Pp]roofs )?§([\d.]+)\]\([^)]*#s([\d-]+)\)", page.read_text()):
            assert anchor == number.replace(".", "-") and number in SECTIONS, f"{page.name}: §{number} → s{anchor}"


def test_files_that_the_pages_name_exist():
    missing = []
    for page in sorted([*DOCS.rglob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]):
        named = re.findall(
            r"`((?:accel|refmpc|vfl|protocols|bench|tests|docs|deploy)/[\w/.@-]+\.\w+)`", page.read_text()
        )
        missing += [f"{page.name}: {name}" for name in named if not (ROOT / name).exists()]
    assert not missing


def test_nothing_refers_to_texts_that_are_not_in_the_repository():
    found = [str(path.relative_to(ROOT)) for path in files() if NOT_SHIPPED.search(path.read_text())]
    assert not found


def test_what_is_printed_refers_to_sections():
    """References inside claims, sources of primitives and error messages, as a user reads them."""
    slack = FixedPointSlack(row_bound=1.0, classes=10, width=64, steps=20)
    fixed = calibrate_matrix_factorisation(3, 1e-5, 1.0, factorise("bisr", 20, bands=10), 2, 10, slack).claim
    shuffled = calibrate_shuffled(3, 1e-5, 1.0, 100, 10, 2, slack=slack).claim
    texts = [claim.to_json() for claim in (fixed, shuffled, labels_only_claim(fixed))]
    with pytest.raises(ValueError) as refused:
        too_few = FixedPointSlack(row_bound=1.0, classes=10, width=64, steps=20, truncated_bits=8)
        matrix_factorisation_claim(1.0, 1e-5, 1.0, factorise("bisr", 20, bands=10), 2, 10, too_few)
    texts.append(str(refused.value))
    for text in texts:
        numbers = references.references(text)
        assert numbers and all(number in SECTIONS for number in numbers), text
    sources = [number for p in refmpc.PROTOCOLS.values() for number in references.references(p.source)]
    assert len(sources) >= 8 and all(number in SECTIONS for number in sources)


def test_a_reference_that_leads_nowhere_is_found():
    assert references.references("see proofs §6.2, §6.5 and §99.1; Proofs §7") == ["6.2", "6.5", "99.1", "7"]
    assert "99.1" not in SECTIONS
