"""What an earlier report has, so that a report can be renewed without training everything again.

``report.json`` holds every cell with its key: those whose key is the present one go into the cache of results as if they had
been run here (``take_cells``), and those whose files are not here are shown as the report has them. A page (``report.html``)
prints means and deviations only: they are shown, marked, in lines that were not run again and whose settings the page describes
as the presets are today (``EarlierPage``). Options that a page does not print, and changes of the code behind a figure, cannot
be noticed that way: such figures are never called current.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from html.parser import HTMLParser
from pathlib import Path

from accel.files import write_text
from accel.validate import require
from bench.evaluation.cache import ResultCache
from bench.evaluation.cells import Cell
from bench.evaluation.presets import PRESETS
from bench.evaluation.sources import ABSENT
from bench.evaluation.tables import MARK, TABLES, Entry, Line, Summary, TableView, block_title, source_title

__all__ = ["EarlierPage", "Taken", "read_page", "take_cells", "take_search"]


@dataclass(frozen=True)
class Taken:
    """How many cells of a report: kept as if run here; carried on, their files not being here; left out, because code, settings or
    data are others by now, or because the report is older than its keys."""

    kept: int
    carried: int
    left: int


_FIGURE = re.compile(r"(?P<mean>\d+\.\d+)(?: ± (?P<deviation>\d+\.\d+))?(?: \((?P<seeds>\d+)\))?")
_SEEDS = 4  # asked for where the page's command does not say


def take_cells(file: Path, cache: ResultCache) -> Taken:
    """Keep the cells of a ``report.json`` that are still what they were. Where a file behind a cell is not here (weights of our
    own, say), the cell is carried on as the report has it if settings, code and all files that are here are the same."""
    stored = json.loads(file.read_text(encoding="utf-8"))
    require("cells" in stored, "from", str(file), "a report.json of bench.paper, which has its cells")
    names = [field.name for field in fields(Cell)]
    kept = carried = left = 0
    for entry in stored["cells"]:
        cell = Cell(**{name: entry[name] for name in names})
        if not isinstance(entry["result"], dict) or cell.preset not in PRESETS:
            left += 1
        elif entry.get("key") == cell.key(cache.data):
            cache.put(cell, entry["result"])
            kept += 1
        elif entry.get("settings") == cell.settings() and _not_here(entry["files"], cell, cache):
            cache.carried[cell] = entry
            carried += 1
        else:
            left += 1
    return Taken(kept, carried, left)


def _not_here(files: Sequence[str], cell: Cell, cache: ResultCache) -> bool:
    """Whether a file of a stored cell is not on this machine, and all others are those it was run with."""
    here = cache.data.identity(cell.data, cell.pretraining)
    return ABSENT in here and all(now in (ABSENT, then) for now, then in zip(here, files, strict=True))


def take_search(file: Path, choice: Path) -> bool:
    """Write the search for our settings that a ``report.json`` holds to ``choice``, unless there is one; whether it was written."""
    search = json.loads(file.read_text(encoding="utf-8")).get("search")
    if not search or choice.exists():
        return False
    choice.parent.mkdir(parents=True, exist_ok=True)
    write_text(choice, json.dumps(search, indent=1))
    return True


class _Tables(HTMLParser):
    """All tables of a page as text; a title is a caption, or the heading before its table."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[TableView] = []
        self._heading, self._kind, self._text = "", "", ""
        self._cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.tables.append(TableView(self._heading, [], []))
        elif tag == "tr":
            self._kind, self._cells = dict(attrs).get("class") or "", []
        if tag in ("h3", "summary", "caption", "th", "td"):
            self._text = ""

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        if tag in ("h3", "summary"):
            self._heading = self._text
        elif tag == "caption":
            self.tables[-1].title = self._text
        elif tag == "th":
            self.tables[-1].columns.append(self._text)
        elif tag == "td":
            self._cells.append(self._text)
        elif tag == "tr" and self._cells:
            self.tables[-1].rows.append((self._kind, self._cells))
            self._cells = []


@dataclass(frozen=True)
class EarlierPage:
    """The tables of a page, and the presets that it describes as they are today."""

    date: str
    tables: Sequence[TableView]
    unchanged: frozenset[str]
    seeds: int  # of a figure without a number of seeds

    def table(self, title: str) -> TableView | None:
        """The table whose title begins like this."""
        return next((view for view in self.tables if view.title.startswith(title)), None)

    def rows(self, title: str) -> list[tuple[str, list[str]]]:
        """The rows of a table with names that stand for several rows repeated, as far as their preset is unchanged."""
        view = self.table(title)
        out: list[tuple[str, list[str]]] = []
        name = ""
        for kind, row in [] if view is None else view.rows:
            name = row[0] or name
            if kind in self.unchanged or kind == "heading":
                out.append((kind, [name, *row[1:]]))
        return out

    def fill(self, lines: Sequence[Line]) -> list[Line]:
        """The lines, with what the page has of them beside their cells."""
        figures: dict[tuple[str, ...], Summary] = {}
        for number in TABLES:
            columns = ([] if (view := self.table(f"Table {number}:")) is None else view.columns)[2:]
            block = ""
            for kind, row in self.rows(f"Table {number}:"):
                block = row[0] if kind == "heading" else block
                for column, text in zip(columns, row[2:], strict=False):
                    if found := _figure(text, self.seeds):
                        figures[str(number), block, row[0].removesuffix(MARK), row[1], column] = found
        return [replace(line, entries=tuple(_filled(line, entry, figures) for entry in line.entries)) for line in lines]


def _figure(text: str, seeds: int) -> Summary | None:
    found = _FIGURE.fullmatch(text)
    if found is None:
        return None
    return Summary(float(found["mean"]), float(found["deviation"] or 0.0), int(found["seeds"] or seeds), earlier=True)


def _filled(line: Line, entry: Entry, figures: Mapping[tuple[str, ...], Summary]) -> Entry:
    column = "no noise" if entry.epsilon is None else f"ε = {entry.epsilon:g}"
    key = (block_title(line), line.label.removesuffix(MARK), source_title(line), column)
    # Table 2 repeats lines of Table 7
    numbers = (line.table, 7) if line.table == 2 else (line.table,)
    return replace(entry, earlier=next((found for n in numbers if (found := figures.get((str(n), *key)))), None))


def read_page(file: Path, presets: TableView) -> EarlierPage:
    """A page that ``bench.paper`` wrote. ``presets``: the table of the two presets as it is today."""
    text = file.read_text(encoding="utf-8")
    parser = _Tables()
    parser.feed(text)
    then = next((view for view in parser.tables if view.title == presets.title), None)
    require(then is not None, "from", str(file), "a page of bench.paper that has the table of its presets (Table 1's)")
    assert then is not None
    titles = {preset.title: name for name, preset in PRESETS.items()}

    def described(view: TableView, title: str) -> list[tuple[str, str]]:
        position = view.columns.index(title) if title in view.columns else 0
        return [(row[0], row[position]) for _, row in view.rows]

    # a preset may have a column for longer runs beside its own
    unchanged = [
        name
        for title, name in titles.items()
        if all(described(then, c) == described(presets, c) for c in presets.columns[1:] if c.startswith(title))
    ]
    date = re.search(r"<dt>Date, machine</dt><dd>(\d{4}-\d\d-\d\d)", text)
    seeds = re.search(r"--seeds (\d+)", text)
    return EarlierPage(
        date[1] if date else "an unknown date", parser.tables, frozenset(unchanged), int(seeds[1]) if seeds else _SEEDS
    )
