"""Markdown, JSON and one HTML page without any other file, from tables and pictures."""

from __future__ import annotations

import html
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from accel.files import write_text
from bench.evaluation.tables import NOT_RUN, TableView

__all__ = ["Report", "Section", "printing_console", "rich_table", "write_report"]

_PRINTED_WIDTH = 150  # of tables in a pipe or a file; Table 1 has this


def printing_console() -> Console:
    """The console for tables: as wide as the tables are, unless it is a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_PRINTED_WIDTH)


@dataclass
class Section:
    """A heading with paragraphs, tables and pictures (SVG, with captions)."""

    title: str
    paragraphs: list[str] = field(default_factory=list)
    tables: list[TableView] = field(default_factory=list)
    pictures: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Report:
    """The whole report; ``facts`` are machine, commands and times; ``cells`` every result behind the tables; ``search``
    how our settings were chosen, so that a later report can say it too."""

    title: str
    lead: list[str]
    facts: list[tuple[str, str]]
    sections: list[Section]
    cells: list[dict[str, Any]]
    search: dict[str, Any] = field(default_factory=dict)


def rich_table(view: TableView) -> Table | Group:
    """For the terminal."""
    if view.folded:
        return Group(Text(f"{view.title} (in the report)", style="italic"))
    if not view.rows:  # columns without rows say nothing
        return Group(Text(view.title, style="italic"), *view.notes)
    out = Table(
        title=view.title, title_justify="left", caption="\n".join(view.notes), caption_justify="left", box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0), pad_edge=False,
    )  # fmt: skip
    for position, column in enumerate(view.columns):
        width = None if view.words or position < 2 else len(column)
        out.add_column(column, justify="left" if position < 2 else "right", min_width=width)
    styles = {"published": "dim", "ours": "bold"}
    previous = ""
    for kind, row in view.rows:
        if kind == "heading":
            out.add_section()
            out.add_row(f"[bold]{row[0]}[/bold]")
            continue
        name, previous = ("" if row[0] == previous else row[0]), row[0]
        out.add_row(name, *row[1:], style=styles.get(kind))
    return out


def _markdown_table(view: TableView) -> str:
    lines = ["| " + " | ".join(view.columns) + " |", "|---|---" + "|---:" * (len(view.columns) - 2) + "|"]
    for kind, row in view.rows:
        cells = [f"**{row[0]}**", *[""] * (len(view.columns) - 1)] if kind == "heading" else row
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([f"### {view.title}", "", *lines, "", *(f"{note}\n" for note in view.notes)])


def _markdown(report: Report) -> str:
    parts = [f"# {report.title}", *report.lead, "\n".join(f"- {name}: {value}" for name, value in report.facts)]
    for section in report.sections:
        parts += [f"## {section.title}", *section.paragraphs, *(_markdown_table(view) for view in section.tables)]
    return "\n\n".join(parts) + "\n"


_STYLE = """
:root { --ink: #1f2328; --faint: #6a737d; --line: #d8dee4; --shade: #f6f8fa; --ours: #fff4ec; }
* { box-sizing: border-box; }
body { font: 14px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; color: var(--ink); max-width: 66rem;
  margin: 2rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .6rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; padding-bottom: .25rem; border-bottom: 1px solid var(--line); }
p { margin: .5rem 0; max-width: 50rem; }
code { background: var(--shade); padding: .1em .3em; border-radius: 3px; font-size: .92em; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; color: var(--faint); font-size: .9rem; }
dt { font-weight: 600; } dd { margin: 0; }
h3, summary { font-size: .95rem; font-weight: 600; margin: 1rem 0 .3rem; }
summary { cursor: pointer; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .8rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .45rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { border-bottom: 2px solid var(--ink); font-weight: 600; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
th:first-child, tr:not(.heading) td:first-child { position: sticky; left: 0; background: #fff;
  white-space: normal; min-width: 9rem; }
table.words th, table.words td { text-align: left; white-space: normal; }
tr.heading td { text-align: left; font-weight: 600; background: var(--shade); border-top: 1px solid var(--ink); }
tr.published td { color: var(--faint); }
tr.ours td, tr.ours td:first-child { background: var(--ours); }
td.missing { color: #a0a7ae; font-style: italic; }
figure { margin: 1rem 0; max-width: 100%; } figure svg { max-width: 100%; height: auto; }
figcaption, .note { color: var(--faint); font-size: .82rem; max-width: 50rem; }
.pair { display: flex; flex-wrap: wrap; gap: 1.5rem; align-items: flex-end; }
@media (max-width: 40rem) {
  body { margin: 1rem auto; padding: 0 .9rem; }
  h1 { font-size: 1.35rem; }
  dl { display: block; } dd { margin: 0 0 .4rem; }
  th:first-child, tr:not(.heading) td:first-child { min-width: 6.5rem; }
  tr:not(.heading) td:nth-child(2) { white-space: normal; min-width: 7.5rem; }
  tr.heading span { position: sticky; left: .45rem; display: inline-block; white-space: normal;
    max-width: calc(100vw - 3rem); }
  .stacked th:nth-child(2), .stacked tr:not(.heading) td:nth-child(2) { display: none; }
  .stacked td:first-child::after { content: attr(data-under); display: block; color: var(--faint); font-size: .92em; }
  .stacked th:first-child, .stacked tr:not(.heading) td:first-child { min-width: 8.2rem; max-width: 8.2rem; }
  .picture { overflow-x: auto; } .picture svg { max-width: none; width: auto; }
}
@media print {
  @page { size: A4; margin: 14mm; }
  body { font-size: 9.5pt; margin: 0; padding: 0; max-width: none; }
  table { font-size: 7.2pt; } th, td { padding: .12rem .3rem; }
  h2 { break-after: avoid; } figure, tr, dl { break-inside: avoid; } thead { display: table-header-group; }
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
}
"""


def _text(value: str) -> str:
    """Escaped, with `code` marked."""
    parts = html.escape(value).split("`")
    return "".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts))


def _html_table(view: TableView) -> str:
    head = "".join(f"<th>{_text(column)}</th>" for column in view.columns)
    body, previous = [], ""
    stacked = view.columns[1:2] in (["source"], ["local update"])
    for kind, row in view.rows:
        if kind == "heading":
            title = f"<span>{_text(row[0])}</span>"
            body.append(f'<tr class="heading"><td colspan="{len(view.columns)}">{title}</td></tr>')
            continue
        name, previous = ("" if row[0] == previous else row[0]), row[0]
        cells = "".join(
            f'<td class="missing">{_text(cell)}</td>' if cell == NOT_RUN else f"<td>{_text(cell)}</td>"
            for cell in row[1:]
        )
        under = f' data-under="{html.escape(row[1])}"' if stacked else ""
        body.append(f'<tr class="{kind}"><td{under}>{_text(name)}</td>{cells}</tr>')
    notes = "".join(f'<p class="note">{_text(note)}</p>' for note in view.notes)
    kind = ' class="words"' if view.words else ' class="stacked"' if stacked else ""
    title = _text(view.title)
    if not view.rows:
        return f"<h3>{title}</h3>{notes}"
    table = f"<table{kind}><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    whole = f'<div class="scroll" role="region" aria-label="{title}" tabindex="0">{table}</div>{notes}'
    return f"<details><summary>{title}</summary>{whole}</details>" if view.folded else f"<h3>{title}</h3>{whole}"


def _html(report: Report) -> str:
    facts = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in report.facts)
    parts = [f"<h1>{_text(report.title)}</h1>", *(f"<p>{_text(p)}</p>" for p in report.lead), f"<dl>{facts}</dl>"]
    for section in report.sections:
        parts.append(f"<h2>{_text(section.title)}</h2>")
        parts += [f"<p>{_text(p)}</p>" for p in section.paragraphs]
        pictures = [
            f'<figure><div class="picture">{svg}</div><figcaption>{_text(caption)}</figcaption></figure>'
            for svg, caption in section.pictures
        ]
        parts.append(f'<div class="pair">{"".join(pictures)}</div>' if pictures else "")
        parts += [_html_table(view) for view in section.tables]
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{viewport}<title>{_text(report.title)}</title>'
    body = "".join(parts)
    return f'<!doctype html><html lang="en"><head>{head}<style>{_STYLE}</style></head><body>{body}</body></html>\n'


def write_report(report: Report, folder: Path) -> dict[str, Path]:
    """report.md, report.json and report.html in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = [asdict(view) for section in report.sections for view in section.tables]
    data = {"title": report.title, "facts": dict(report.facts), "tables": tables, "cells": report.cells}
    data |= {"search": report.search} if report.search else {}
    contents = {"md": _markdown(report), "json": json.dumps(data, indent=0, ensure_ascii=False), "html": _html(report)}
    paths = {}
    for kind, text in contents.items():
        paths[kind] = folder / f"report.{kind}"
        write_text(paths[kind], text)
    return paths
