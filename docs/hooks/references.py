"""References of the form "proofs §6.2": where they lead, and links for them in the pages made from docstrings.

``tests/docs/test_references.py`` uses the same two functions to see that every reference in the repository resolves.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

__all__ = ["REFERENCE", "on_page_content", "references", "sections"]

HEADING = re.compile(r"^#{1,3} (\d+(?:\.\d+)?)\.? .+ \{#s([\d-]+)\}$", re.MULTILINE)
REFERENCE = re.compile(r"[Pp]roofs\s+§\d+(?:\.\d+)*(?:(?:, | and |, and )§\d+(?:\.\d+)*)*")
NUMBER = re.compile(r"§(\d+(?:\.\d+)*)")


def sections(folder: Path) -> dict[str, str]:
    """Number of every section of the proofs → its page and anchor."""
    found: dict[str, str] = {}
    for page in sorted(folder.glob("*.md")):
        for number, anchor in HEADING.findall(page.read_text()):
            if number in found:
                raise ValueError(f"{page.name}: section {number} is already in {found[number]}")
            if anchor != number.replace(".", "-"):
                raise ValueError(f"{page.name}: section {number} has the anchor s{anchor}")
            found[number] = f"{page.name}#s{anchor}"
    return found


def references(text: str) -> list[str]:
    """The numbers that ``text`` refers to."""
    return [number for reference in REFERENCE.findall(text) for number in NUMBER.findall(reference)]


def on_page_content(html: str, page: Any, config: Any, **_: Any) -> str:
    """Called by mkdocs for every page: references in the API pages become links."""
    if not page.file.src_uri.startswith("reference/"):
        return html
    known = sections(Path(config["docs_dir"]) / "proofs")

    def link(number: re.Match[str]) -> str:
        target, _, anchor = known[number[1]].partition("#")
        path = posixpath.relpath("proofs/" + target.replace(".md", ".html"), posixpath.dirname(page.file.dest_uri))
        return f'<a href="{path}#{anchor}">{number[0]}</a>'

    return REFERENCE.sub(lambda reference: NUMBER.sub(link, reference[0]), html)
