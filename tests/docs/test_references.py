"""What pages and pictures refer to is there: sections, files, modules; figures of steps are those that a dry run
counts."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

import accel.errors
import refmpc
from bench.shapes import StepShape, step_plan
from protocols.plan.run_plan import Plan, PublicClient, PublicFederation, plan_run
from protocols.step.cost import step_cost
from tests.docs.pages import DOCS, ROOT, hook
from vfl.dp import (
    FixedPointSlack,
    calibrate_matrix_factorisation,
    calibrate_shuffled,
    factorise,
    labels_only_claim,
    matrix_factorisation_claim,
)
from vfl.training import TrainingConfig

FOLDERS = ("accel", "refmpc", "vfl", "protocols", "bench", "tests", "deploy", "docs")
ENDINGS = {".py", ".md", ".toml", ".yml", ".yaml", ".service", ".mpc"}
PAPER_MB = 453.6  # a step of the paper, Table 5
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


def pages_and_pictures() -> list[Path]:
    own = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    return sorted([*own, *DOCS.rglob("*.md"), *DOCS.rglob("*.svg")])


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    module, attributes = name, ""
    while True:
        try:
            if importlib.util.find_spec(module) is not None:
                return not attributes or resolve_name(f"{module}:{attributes[1:]}") is not None
        except ModuleNotFoundError:
            pass
        except AttributeError:
            return False
        if "." not in module:
            return False
        module, _, last = module.rpartition(".")
        attributes = f".{last}{attributes}"


def test_modules_that_pages_and_pictures_name_exist():
    missing, found = [], set()
    for page in pages_and_pictures():
        text = page.read_text()
        inside = re.findall(r">([^<]+)<", text) if page.suffix == ".svg" else re.findall(r"`([^`\n]+)`", text)
        named = {
            name
            for part in inside
            for name in re.findall(r"(?<![\w./-])(?:accel|refmpc|vfl|protocols|bench|ppvfl)(?:\.\w+)+(?![\w/])", part)
        }
        found |= named
        missing += [f"{page.name}: {name}" for name in sorted(named) if not exists(name)]
    assert not missing and {"vfl.data.columns", "refmpc.primitives.io"} <= found
    assert not exists("refmpc.io") and not exists("vfl.dp.nothing")


def test_the_tree_of_errors_names_classes_that_exist():
    named = re.findall(r"(?<![\w./])(?:accel|refmpc|vfl|protocols|bench)(?:\.\w+)+", str(accel.errors.__doc__))
    assert len(named) >= 25 and not [name for name in named if not exists(name)]


def test_a_picture_is_called_alike_by_itself_and_by_the_pages():
    shown = [
        (alt, (page.parent / file).read_text())
        for page in pages_and_pictures()
        for alt, file in re.findall(r"!\[([^]]+)\]\(([^)]+\.svg)\)", page.read_text())
    ]
    assert len(shown) >= 5
    assert not [alt for alt, picture in shown if f"<title>{alt.replace(chr(39), '&#x27;')}</title>" not in picture]


def test_figures_of_a_step_are_those_that_a_dry_run_counts():
    def both(plan: Plan) -> tuple[refmpc.Cost, refmpc.Cost]:
        """With open weights, at most, and with secret ones."""
        opened, secret = (replace(plan, training=plan.training.with_(weights=w)) for w in ("open", "secret"))
        return step_cost(opened), step_cost(secret)

    def small(**changes: Any) -> tuple[refmpc.Cost, refmpc.Cost]:
        clients, classes = (PublicClient("bank", 4), PublicClient("card", 4)), changes.pop("classes", 2)
        facts = PublicFederation(clients, 64, classes, 1.0, ())
        training = TrainingConfig(epochs=1, batch_size=32, learning_rate=0.1, epsilon=8.0, **changes)
        opened, secret = (plan_run("g_bmf", facts, training.with_(weights=w)) for w in ("open", "secret"))
        return step_cost(opened), step_cost(secret)

    (ten, ten_secret), (letters, letters_secret) = (both(step_plan(StepShape(128, 2000, s))) for s in (10, 26))
    mb = {cost: f"{cost.bytes / 1e6:.2f} MB" for cost in (ten, ten_secret, letters, letters_secret)}
    (binary, _), (number, number_secret) = small(task="binary"), small(task="regression", classes=1)
    hidden, hidden_secret = small(hidden=(16,), classes=3)
    quoted = {
        "README.md": [
            f"open weights (the default), noise made | at most {mb[ten]} | {ten.rounds} |",
            f"secret weights, noise made | {mb[ten_secret]} | {ten_secret.rounds} |",
            f"the paper (its own machine) | {PAPER_MB} MB |",
        ],
        "docs/index.md": [
            f"at least {PAPER_MB * 1e6 / ten.bytes // 100 * 100:.0f} times less traffic a training step than the "
            f"paper reports "
            f"({mb[ten]} at most, {PAPER_MB} MB)"
        ],
        "docs/architecture.md": [
            f"{ten.rounds} rounds a step, {ten_secret.rounds} with secret weights",
            f"two classes {binary.rounds}, a regression {number.rounds}",
            f"one hidden layer {hidden.rounds} or {hidden_secret.rounds}",
        ],
        "docs/tutorial.md": [f"to the clients only: {ten_secret.rounds} rounds a step"],
        "docs/reference/costs.md": [
            f"costs {ten.rounds} rounds and at most {mb[ten]} with open weights, {ten_secret.rounds} rounds and "
            f"{mb[ten_secret]} with"
        ],
        "docs/proofs/step.md": [
            f"that is at most {mb[ten]} a step with open weights and {mb[ten_secret]} with secret ones, noise "
            f"included, instead of "
            f"the paper's {PAPER_MB} MB",
            f"| S = 10 | {ten_secret.rounds} rounds, {mb[ten_secret]} | {ten.rounds} rounds, {mb[ten]} |",
            f"| S = 26 | {letters_secret.rounds} rounds, {mb[letters_secret]} | {letters.rounds} rounds, "
            f"{mb[letters]} |",
            f"| regression | {number_secret.rounds} | {number.rounds} |",
        ],
    }
    texts = {page: " ".join((ROOT / page).read_text().split()) for page in quoted}
    assert not [(page, words) for page, all_words in quoted.items() for words in all_words if words not in texts[page]]


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
