"""Subscripts and superscripts in the pages: z_{t−k}, 2^(64−m) and the like, written as in the code, shown as
mathematics.

Markdown would take some of these underscores for emphasis. Code spans and code blocks are left alone.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = ["on_page_markdown", "typeset"]

CODE = re.compile(r"(^```.*?^```$|^(?: {4,}|\t).*?$|`[^`\n]+`|\]\([^)\n]*\)|\{#[^}\n]*\})", re.MULTILINE | re.DOTALL)
BASE = r"(?<![A-Za-z_`])(?<![A-Za-z]{2}/)(Adv|[^\W\d_][\u0300-\u036f']*|\))"
BRACED = re.compile(BASE + r"_\{([^{}]*)\}")
PLAIN = re.compile(BASE + r"_([A-Za-zα-ω]+|\d+)(?![A-Za-zα-ω_])")
POWER = re.compile(
    r"(?<=[\w)\]̂ᵀ>])\^([−-]?)(\{[^{}]*\}|\([^()]*\)|⌈[^⌉]*⌉|\d+(?:\.\d+)?(?:/\d+)?|[A-Za-zα-ω](?:<sub>[^<]*</sub>)?)"
)


def _subscript(match: re.Match[str]) -> str:
    inner = match[2].replace("<", "&lt;")
    inner = re.sub(r"\b([a-z])_([a-z])\b", r"\1<sub>\2</sub>", inner)
    return f"{match[1]}<sub>{inner}</sub>"


def _power(match: re.Match[str]) -> str:
    sign, exponent = match[1].replace("-", "−"), match[2]
    if exponent[0] == "{" or (exponent[0] == "(" and not sign):
        exponent = exponent[1:-1]
    return f"<sup>{sign}{exponent}</sup>"


def typeset(markdown: str) -> str:
    """The page with its formulas as HTML."""
    pieces = CODE.split(markdown)
    for index in range(0, len(pieces), 2):
        text = BRACED.sub(_subscript, pieces[index])
        text = PLAIN.sub(_subscript, text)
        for _ in range(2):  # e^x inside 2^⌈…⌉
            text = POWER.sub(_power, text)
        pieces[index] = text
    return "".join(pieces)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page."""
    return typeset(markdown)
